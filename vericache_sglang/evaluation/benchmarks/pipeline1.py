"""The paper's pipeline 1: long contexts on one server (section 8), measured.

Every system answers the same samples of the data sets: scores and distances from the
full KV, then the first answers again greedily: all prompts in the prefix cache, by
turns with plain SGLang (closed loop); at Poisson rates (open loop); and recorded
sessions with their pauses. Plain SGLang is also measured beside itself: what it differs
by is noise.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tqdm import tqdm  # type: ignore[import-untyped]

from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation.altered import LONGEST, LOSSY
from vericache_sglang.evaluation.benchmark import DEMO_LONG, REPOSITORY, Benchmark
from vericache_sglang.evaluation.benchmarks.divergence import (
    FULL,
    SEEDED,
    STUDY,
    compared,
    prepare,
    reference,
)
from vericache_sglang.evaluation.client import closed_loop
from vericache_sglang.evaluation.experiment import Experiment
from vericache_sglang.evaluation.figures import mismatches
from vericache_sglang.evaluation.fleet import served
from vericache_sglang.evaluation.inner_drafters import OPTION, chosen
from vericache_sglang.evaluation.options import OPTIONS
from vericache_sglang.evaluation.picture import require_matplotlib
from vericache_sglang.evaluation.pipeline_page import draw_pipeline, pipeline_page
from vericache_sglang.evaluation.server import ServerError
from vericache_sglang.evaluation.systems import BUILT_IN, REFERENCE, described, words
from vericache_sglang.evaluation.workload import BenchRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vericache_sglang.evaluation.benchmark import Results
    from vericache_sglang.evaluation.benchmarks.divergence import Study
    from vericache_sglang.evaluation.client import Pass
    from vericache_sglang.evaluation.experiment import Session
    from vericache_sglang.evaluation.server import Server, Starter
    from vericache_sglang.evaluation.systems import System

AGAIN = f"{FULL}, again"
SPARSE_DRAFTS = 8
"""Draft length of SparseSpec's published figures, in tokens."""

LEFT_OUT: Mapping[str, str] = {
    "pipeline 2 (remote prefixes)": "it needs five machines; `bench remote` measures "
    "its paths on one, over EMULATED links",
    "HBM over link bandwidth": "SIMULATED by `bench --figure fig13-left-link`; "
    "`bench sweep --links` measures an emulated link",
    "KV budget on the paper's models": "SIMULATED by `bench --figure "
    "fig13-left-budget`; `--pools` measures it here",
    "G_R/G_L and T_init/T_decode": "PLANNED and SIMULATED by `bench --figures "
    "fig13-right-instances fig13-right-arrival`",
}
"""What of the paper's section 8 is not measured here, and why or by what else."""

SERVED: Mapping[str, tuple[Any, str]] = {
    **STUDY,
    **OPTION,
    "repeats": (3, "timed passes of a closed loop"),
    "rates": ([float], "also Poisson arrivals a second, of systems that are lossless"),
    "prefill": (("cached", "timed"), OPTIONS["prefill"][1]),
    "timeout": OPTIONS["timeout"],
    "one-at-a-time": (False, "a device holds one server: no passes by turns"),
    "engine": (
        SEEDED,
        "SGLang flags of every server, quoted; without the default one (on a GPU it "
        "changes kernels) only lossy systems' KL divergence is measured",
    ),
}
"""The options that ``measure`` reads."""


@dataclass(frozen=True, slots=True)
class TaskRequests:
    """What is sent to every server to time it.

    Attributes:
        requests: First request of every sample, greedy.
        sessions: Recorded sessions among them.
    """

    requests: list[BenchRequest]
    sessions: list[Session]

    def ask(self, server: Server, options: argparse.Namespace) -> Pass:
        """Answer every request once; an answer may end early."""
        bodies = [request.body(ends=True) for request in self.requests]
        clients, timeout = options.clients, options.timeout
        return closed_loop(server.url, bodies, clients, lambda: None, timeout)


@dataclass(frozen=True, slots=True)
class WarmServers:
    """The servers of an experiment.

    Attributes:
        by_name: By the name of the system.
    """

    by_name: Mapping[str, Server]

    def ready(self, system: System) -> tuple[Server, bool]:
        """See ``Fleet.ready``."""
        return self.by_name[system.name], False


@dataclass(frozen=True, slots=True)
class Series:
    """One pass over systems, beside plain SGLang.

    Attributes:
        suffix: Ends the names of its rows.
        pool: KV slots of every server; None: as SGLang has it.
        whole: Measure answers too, and plain SGLang again at the end; else only speed.
    """

    suffix: str = ""
    pool: int | None = None
    whole: bool = True


WHOLE = Series()


@dataclass(frozen=True, slots=True)
class FullKV:
    """Plain SGLang, which the other systems are compared with.

    Attributes:
        timed: Its answers to the timed requests.
        answers: What ``reference`` returned; None: only speed is compared.
        pool: KV slots of every server; None: as SGLang has it.
        server: Stays up beside each other system's; None: a device holds only one.
    """

    system: System
    timed: Pass
    answers: dict[str, Any] | None
    pool: int | None
    server: Server | None = None


def requests_of(study: Study) -> TaskRequests:
    """Return the timed requests of a study's samples."""
    requests: list[BenchRequest] = []
    sessions: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for task, samples in study.samples.items():
        for sample in samples:
            if sample.session:
                turns = sessions.setdefault((task, sample.session), [])
                turns.append((len(requests), sample.gap))
            tokens = min(sample.output_tokens, study.options.output)
            prompt = tuple(study.prompt(sample, sample.messages))
            requests.append(BenchRequest(prompt, tokens))
    return TaskRequests(requests, list(sessions.values()))


def answered(
    study: Study, load: TaskRequests, server: Server, system: System, full: FullKV
) -> dict[str, Any]:
    """Measure one system on its running, warm server.

    Args:
        study: The samples and options.
        load: What is timed.
        server: The system's.
        system: Lossy ones are not measured over arrival rates.
        full: Its passes alternate with the system's where its server is up.

    Returns:
        The row: ``tasks`` (see ``compared``) and the figures of ``Experiment``;
        ``mismatches`` counts the greedy answers that are not plain SGLang's.

    Raises:
        ServerError: A server failed.
    """
    answers = full.answers
    tasks = compared(study, server, system, answers) if answers else {}
    up = {system.name: server}
    if full.server is not None:
        up = {REFERENCE: full.server, **up}
    plain = replace(full.system, name=REFERENCE)
    pair = (plain, system) if full.server is not None else (system,)
    closed = _experiment(study, load, up, pair, rates=[])
    row = closed.results()[system.name]
    passes = [found[system.name][0] for found in closed.rounds]
    row["mismatches"] = sum(mismatches(full.timed, done) for done in passes)
    if answers and not system.lossy:
        opened = _experiment(study, load, up, (system,), repeats=0)
        over = opened.results()[system.name]
        row |= {key: over[key] for key in ("open_loop", "replay")}
    return {**_told(system, full), "tasks": tasks, **row}


def _told(system: System, full: FullKV) -> dict[str, Any]:
    """Return the part of a row that is known before measuring."""
    return {
        "about": system.about,
        "flags": [each.replace(f"{REPOSITORY}/", "") for each in system.flags],
        "lossy": system.lossy,
        "pool": full.pool,
    }


def _experiment(
    study: Study,
    load: TaskRequests,
    up: Mapping[str, Server],
    systems: Sequence[System],
    **more: Any,
) -> Experiment:
    """Run an experiment on running servers.

    Raises:
        ServerError: A system was skipped.
    """
    given = {
        **vars(study.options),
        **{"concurrency": [study.options.clients], "end_early": True},
        **{"kl_requests": 0, "simulated_acceptance": None, "memory_gbps": None},
        **more,
    }
    experiment = Experiment(
        argparse.Namespace(**given),
        systems,
        load.requests,
        WarmServers(up),
        load.sessions,
    )
    experiment.run()
    for name, why in experiment.skipped.items():
        raise ServerError(f"{name}: {why}")
    return experiment


def serve(
    study: Study,
    load: TaskRequests,
    system: System,
    full: FullKV,
    start: Starter | None = None,
) -> dict[str, Any]:
    """Start a system's server and measure it; a failure is the row's ``error``."""
    try:
        with served(system, study.options.model, start=start) as server:
            load.ask(server, study.options)
            return answered(study, load, server, system, full)
    except ServerError as error:
        return {**_told(system, full), "error": str(error)}


def measure(
    study: Study,
    systems: Sequence[System],
    results: Results,
    start: Starter | None = None,
    series: Series = WHOLE,
) -> None:
    """Add a row for plain SGLang and for every system.

    Args:
        study: The samples and options.
        systems: To be measured beside plain SGLang.
        results: Get the rows, and failures: an error, or an answer of a system that
            is not lossy which is not plain SGLang's.
        start: See ``served``.
        series: What is measured of them, and how the rows are named.
    """
    load, options = requests_of(study), study.options
    plain = described(FULL)
    again = replace(plain, name=AGAIN, about="what the full KV differs by from itself")
    listed = [plain, *systems, *([again] if series.whole else [])]
    plain, *others = (_equipped(each, options, series) for each in listed)
    with ExitStack() as stack:
        server = stack.enter_context(served(plain, options.model, start=start))
        answers = reference(study, server) if series.whole else None
        full = FullKV(plain, load.ask(server, options), answers, series.pool)
        results.row(plain.name, answered, study, load, server, plain, full)
        if options.one_at_a_time:
            stack.close()
        else:
            full = replace(full, server=server)
        for system in tqdm(others, desc="systems", unit="system"):
            results.row(system.name, serve, study, load, system, full, start)
    seeded = SEEDED in words("--engine", options.engine)
    for name in (plain.name, *(each.name for each in others)):
        row = results.rows[name]
        results.require("error" not in row, f"{name}: {row.get('error')}")
        failed = row.get("failed_requests", 0)
        results.require(not failed, f"{name}: {failed} requests failed")
        differ = row.get("mismatches") or 0
        held = row["lossy"] or not seeded or not differ
        results.require(held, f"{name}: {differ} answers are not the full KV's")


def _equipped(system: System, options: argparse.Namespace, series: Series) -> System:
    """Return a system with the flags of every server, and a pool of so many slots."""
    flags = (*system.flags, *words("--engine", options.engine))
    if series.pool is not None:
        flags = (*flags, "--max-total-tokens", str(series.pool))
    return replace(system, name=f"{system.name}{series.suffix}", flags=flags)


def lossy_systems(options: argparse.Namespace, prompt_tokens: float) -> list[System]:
    """Return the lossy sweeps: kept shares, budgets in tokens, bits.

    Args:
        options: The command line.
        prompt_tokens: Mean of a prompt: a server keeps shares, so a budget is the
            share that is so many tokens of a mean prompt.

    Raises:
        ConfigError: A compressor is unknown.
    """
    shares = [
        (name, f"keep {k:g}", k) for name in options.offline for k in options.keeps
    ]
    shares += [
        (name, f"{budget} tokens", min(1.0, budget / prompt_tokens))
        for name in options.online
        for budget in options.budgets
    ]
    shares += [
        (f"{name}{',' if ':' in name else ':'}bits={bits}", f"{bits} bit", 1.0)
        for name in options.quantizers
        for bits in options.bits
    ]
    return [
        described(
            f"lossy {name.partition(':')[0]}, {how}",
            ours(options, compressor=name, keep=keep, residency="host"),
            alteration=LOSSY,
            about=f"the compressed KV alone, share kept {keep:.3f}",
        )
        for name, how, keep in shares
    ]


def ours(options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Return VeriCache's settings of one system.

    Raises:
        ConfigError: The compressor is unknown.
    """
    create_compressor(more["compressor"], 0)
    return {"min_prompt": options.min_prompt, **more}


def lossless_systems(options: argparse.Namespace) -> list[System]:
    """Return VeriCache, drafters alone and under it, and sparse resident drafts."""
    drafts = {"compressor": options.compressor, "keep": options.keep}
    mine = ours(options, **drafts, draft_length=options.draft_length)
    resident = {"draft_length": SPARSE_DRAFTS, "residency": "device"}
    sparse = ours(options, compressor="snapkv", keep=options.keep, **resident)
    found = [
        described("VeriCache", mine, about=BUILT_IN["vericache"].about),
        described(
            "VeriCache, host",
            {**mine, "residency": "host"},
            alteration=LONGEST,
            about="VeriCache as in the paper: the full KV is off the device, drafts "
            f"have {options.draft_length} tokens whatever they cost",
        ),
        described(
            "as SparseSpec",
            sparse,
            alteration=LONGEST,
            about=f"{BUILT_IN['sparse'].about}; drafts of {SPARSE_DRAFTS} tokens",
        ),
    ]
    for drafter in chosen(options)[0]:
        composed = f"VeriCache + {drafter.name}"
        about = "its proposals, as many as pay, in drafted and verified rows"
        found += [drafter.alone(), drafter.under(mine, composed, about)]
    return found


def prepared(
    options: argparse.Namespace, results: Results, out: Mapping[str, str]
) -> Study:
    """Check the options of ``SERVED`` and read or draw the samples.

    Args:
        options: The command line.
        results: Get ``left_out`` and ``prompts``.
        out: What is not measured, and why; drafters that the model has not join it.

    Raises:
        ConfigError: An option is out of bounds, data is missing or malformed, or
            matplotlib is.
    """
    if options.out:
        require_matplotlib()
    if options.repeats < 1 or not all(rate > 0 for rate in options.rates):
        raise ConfigError("--repeats must be >= 1, --rates > 0")
    _, missing = chosen(options)
    study = prepare(options)
    lengths = [len(request.prompt) for request in requests_of(study).requests]
    results.figures = {
        "left_out": {**out, **missing},
        "prompts": {
            "requests": len(lengths),
            "mean_tokens": statistics.fmean(lengths),
            "max_tokens": max(lengths),
        },
    }
    return study


def _measure(options: argparse.Namespace, results: Results) -> None:
    if min([*options.budgets, *options.pools], default=1) < 1:
        raise ConfigError("--budgets and --pools must be >= 1")
    study = prepared(options, results, LEFT_OUT)
    mean = results.figures["prompts"]["mean_tokens"]
    lossless, lossy = lossless_systems(options), lossy_systems(options, mean)
    measure(study, [*lossless, *lossy], results)
    for pool in options.pools:
        series = Series(f", pool {pool}", pool, whole=False)
        measure(study, lossless, results, series=series)
    if options.out:
        draw_pipeline(results.write(), options.out.with_suffix(".svg"))


PIPELINE1 = Benchmark(
    about="The paper's pipeline 1 on the data sets: full KV, lossy sweeps, VeriCache, "
    "sparse drafts over resident KV; EAGLE3, a small model and prompt lookup, alone "
    "and under VeriCache; quality, speed, latency over arrival rates. Fails where an "
    "answer of a lossless system is not the full KV's.",
    model=DEMO_LONG,
    options={
        "compressor": ("kvzip", "of VeriCache, as --vericache-compressor"),
        "keep": (0.2, "share of tokens of VeriCache and of the sparse drafts"),
        "draft-length": (25, "tokens, of VeriCache"),
        "offline": (["kvzip"], "lossy selectors by kept share"),
        "keeps": ([0.25, 0.5, 0.75], "shares of tokens"),
        "online": (["snapkv"], "lossy selectors by budget"),
        "budgets": ([1024, 2048, 4096], "tokens of a mean prompt"),
        "quantizers": (["kivi"], "lossy codecs by bits"),
        "bits": ([8, 4, 2], "of a number"),
        "pools": ([int], "KV slots: lossless systems again in smaller pools"),
        **SERVED,
        "samples": (2, SERVED["samples"][1]),
        "context": (4000, SERVED["context"][1]),
        "output": (384, SERVED["output"][1]),
        "kl-tokens": (64, SERVED["kl-tokens"][1]),
        "repeats": (2, SERVED["repeats"][1]),
        "rates": ([1.0], SERVED["rates"][1]),
    },
    measure=_measure,
    page=pipeline_page,
    selecting=("offline", "keeps", "online", "budgets", "quantizers", "bits", "pools"),
)
