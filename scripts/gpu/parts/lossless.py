"""Tokens beside plain SGLang's, greedy and seeded, under deterministic inference.

Without it plain SGLang itself answers differently at another batch size. How often it
does is measured too, and is what VeriCache's differences are to be read beside there.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu.check import ROOT, Check, NotMetError, backend_flags, first_difference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpu.check import Context
    from gpu.job import Job

    Answers = Sequence[Sequence[int]]
    """Output tokens of requests."""

MODEL = ROOT / "configs" / "demo-model"

SIZES = {"cuda": (8, 1000, 12000, 96), "cpu": (4, 150, 500, 16)}
"""Prompts, tokens of the shortest and of the longest, tokens of an answer."""

KINDS: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "top_p": 0.9},
}
"""Sampling parameters; each request of the second kind has a seed of its own."""

WAVES = ("together", "alone")
"""All requests at once, and one after the other: two batch sizes."""

EVERY: Mapping[str, tuple[str, ...]] = {
    "cuda": ("--dtype", "bfloat16", "--max-total-tokens", "524288"),
    "cpu": (),
}
"""Flags of every server, by device."""

DRAFTS = ("--vericache-min-prompt", "64", "--vericache-draft-length", "16")
DRAFTS += ("--vericache-staging-tokens", "32768", "--vericache-host-gb", "2")


class Row(NamedTuple):
    """A server: its compressor, "" for plain SGLang, and where its residual KV is."""

    compressor: str = ""
    residency: str = "device"
    deterministic: bool = True
    own: bool = False
    """With our attention backend, where the default is another one."""

    @property
    def is_exact(self) -> bool:
        """Whether tokens have to equal plain SGLang's.

        KV that comes back from the host is read in another order than that of
        positions, and bf16 rounds otherwise then: near ties may flip.
        """
        return self.deterministic and self.residency != "host"


PLANES = "split-planes:exponent_bits=3,mantissa_bits=1"

ROWS: Mapping[str, Row] = {
    "plain": Row(),
    "snapkv": Row("snapkv"),
    "snapkv-host": Row("snapkv", "host"),
    "plain-own": Row(own=True),
    "planes": Row(PLANES, own=True),
    "plain-default": Row(deterministic=False),
    "snapkv-default": Row("snapkv", deterministic=False),
    "kivi": Row("kivi:bits=4", own=True),
    "keynorm": Row("keynorm"),
    "kvzip-host": Row("kvzip", "host"),
    "kvzap": Row(f"kvzap:weights={MODEL}/kvzap-linear"),
    "both-host": Row(f"snapkv+{PLANES}", "host", own=True),
}
"""Servers by name, the most important ones first."""

REHEARSED = ("plain", "snapkv-host", "planes")


def checks(context: Context) -> list[Check]:
    """Return the checks, the most important ones first."""
    names = [name for name in ROWS if not context.on_cpu or name in REHEARSED]
    if not context.has_fa3 and "plain-own" in names:  # then all have our attention
        names.remove("plain-own")
    return [
        Check(
            name=name,
            about=ROWS[name].compressor.rpartition("/")[2] or "plain SGLang",
            run=partial(answered, name=name),
            seconds=480.0,
        )
        for name in names
    ]


def reference(context: Context, row: Row) -> str:
    """Return the name of the reference row; "" for plain SGLang's."""
    if not row.compressor:
        return ""
    if not row.deterministic:
        return "plain-default"
    return "plain-own" if row.own and context.has_fa3 else "plain"


def answered(job: Job, *, name: str) -> None:
    """Answer every request in every wave and compare with the reference.

    Raises:
        NotMetError: Tokens differ where they must not, or nothing was drafted.
        ServerError: The server does not boot, or a request failed.
    """
    from vericache_sglang.evaluation.client import closed_loop
    from vericache_sglang.evaluation.server import ServerError

    context, row = job.context, ROWS[name]
    up = job.serve(MODEL, flags(context, row))
    waves: dict[str, Answers] = {}
    for kind in KINDS:
        bodies = requests(context, kind)
        for wave in WAVES:
            up.flush()
            clients = len(bodies) if wave == "together" else 1
            done = closed_loop(up.url, bodies, clients, lambda: None, 240.0)
            if errors := {answer.error for answer in done.answers if answer.error}:
                raise ServerError(f"requests failed: {'; '.join(sorted(errors))}")
            waves[f"{kind} {wave}"] = [answer.ids for answer in done.answers]
    shown = {
        f"own flips, {kind}": differing(*(waves[f"{kind} {w}"] for w in WAVES))
        for kind in KINDS
    }
    job.figures |= {"waves": waves, "rows": [shown]}
    against = reference(context, row)
    if not against:
        return
    counted = up.counters()
    shown["accepted"] = f"{counted['accepted']} in {counted['cycles']} cycles"
    right = job.found(against, "waves")
    if right is None:
        raise NotMetError(f"{against} gave no answers to compare with")
    found = {wave: differing(right[wave], ids) for wave, ids in waves.items()}
    shown |= {f"{wave}: differing": words for wave, words in found.items()}
    wrong = [wave for wave, words in found.items() if not words.startswith("0 ")]
    if wrong and row.is_exact:
        raise NotMetError(f"tokens differ from {against}'s: {', '.join(wrong)}")
    if not counted["cycles"]:
        raise NotMetError("nothing was drafted and verified")


def flags(context: Context, row: Row) -> list[str]:
    """Return the flags of a row's server."""
    found = list(EVERY[context.device])
    found += ["--enable-deterministic-inference"] if row.deterministic else []
    if row.compressor:
        found += [*DRAFTS, "--vericache-compressor", row.compressor]
        found += ["--vericache-residency", row.residency]
    else:
        found.append("--disable-vericache")
    # Plain SGLang with Triton's attention would be another system than ours with ours.
    own = row.own or not context.has_fa3
    return [*found, *backend_flags(context, drafts=bool(row.compressor), own=own)]


def requests(context: Context, kind: str) -> list[dict[str, Any]]:
    """Return the bodies of the requests of a kind, prompts growing in equal ratios."""
    from vericache_sglang.evaluation.workload import demo_requests

    count, least, most, output = SIZES[context.device]
    step = (most / least) ** (1 / (count - 1))
    lengths = [round(least * step**i) for i in range(count)]
    bodies = [one.body(ends=False) for one in demo_requests(MODEL, lengths, output, 7)]
    for seed, body in enumerate(bodies):
        seeds = {"sampling_seed": seed} if kind == "seeded" else {}
        body["sampling_params"] |= KINDS[kind] | seeds
    return bodies


def differing(wanted: Answers, got: Answers) -> str:
    """Return how many tokens lie behind the first difference of an answer, of all."""
    tokens = 0
    for a, b in zip(wanted, got, strict=True):
        at = first_difference(a, b)
        tokens += 0 if at is None else max(len(a), len(b)) - at
    return f"{tokens} of {sum(map(len, wanted))}"
