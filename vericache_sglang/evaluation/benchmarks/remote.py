"""Prefixes stored near a verifier, a drafter behind a slow link: its paths in turn.

Section 8.2 of the paper in small, on one machine: the links to the store are EMULATED
by delayed reads from a folder, the verifier has one half of the cores and the drafters
the other. Each path has drafters of its own; those of one path have requests at once.
The paper's B1 decodes without drafts, so it has a verifier of its own; on the other one
requests of B1 are drafted for, as on any server.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np

from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation.benchmark import DEMO_LONG, Benchmark
from vericache_sglang.evaluation.client import Pass, answered
from vericache_sglang.evaluation.figures import latencies, mismatches
from vericache_sglang.evaluation.fleet import served
from vericache_sglang.evaluation.lossless import bodies, greedy
from vericache_sglang.evaluation.prefix_store import link, write
from vericache_sglang.evaluation.server import OwnServer, free_port, halves
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Collection, Mapping, Sequence

    from vericache_sglang.evaluation.benchmark import Results

    Body = dict[str, Any]

B1, B2, P1, P2, AUTO = "b1", "b2", "p1", "p2", "auto"
PLAIN_B1 = "b1 without drafts"
PATHS: Mapping[str, str] = {
    **{P1: P1, P2: P2, B1: B1, AUTO: AUTO},
    **{PLAIN_B1: B1, B2: "local"},
}
"""The paper's name of a path -> ``--vericache-remote-path`` of the drafter.

A drafter that decodes itself reads the full KV of a stored prefix: that is B2. The
choice is measured between the two B1, with which it is compared pass by pass.
"""

MOST_OF_B1, MOST_OF_B2 = 1.5, 0.25
"""Longest time to the first token of P1, as shares of that of B1 and of B2."""

LEAST_OF_BEST = 0.97
"""Least tokens/s of the choice, as a share of the better of B1 and B2: what the medians
of one system, measured twice, may differ by."""

LEAST_OF_BASELINES = 1.15
"""Least tokens/s of the choice with requests at once, as a share of the better of the
paper's B1 and B2."""

BEST = "the better of b1 and b2"
BASELINES = "the better of b1 without drafts and b2"
OTHERS: Mapping[str, tuple[str, Callable[[float, float], float]]] = {
    BEST: (B1, max),
    "the sum of b1 and b2": (B1, add),
    BASELINES: (PLAIN_B1, max),
    "the sum of b1 without drafts and b2": (PLAIN_B1, add),
}
"""What the choice is compared with; no mix of two paths exceeds their sum."""

LONGER_THAN_ANY = 1_000_000
"""``--vericache-min-prompt`` of a server that drafts for no request."""

ALONE = 6
"""Requests of a pass in which they are asked one at a time."""


def _requests(options: argparse.Namespace) -> list[Body]:
    """Return one question about each document."""
    tokenizer = load_tokenizer(options.model)
    lengths = [options.tokens] * options.documents
    texts = record_prompts(tokenizer, lengths, options.seed)
    params = [greedy(options.output, ignore_eos=True)] * len(texts)
    return bodies({"prompts": texts, "params": params})


class PathServers:
    """Plain SGLang, a verifier near the store, and drafters for each path.

    Args:
        options: The command line, checked.
        folder: Of the store.
        running: Stops the servers.
    """

    def __init__(
        self, options: argparse.Namespace, folder: str, running: ExitStack
    ) -> None:
        self._model = options.model
        self._running = running
        slots = options.tokens + options.output + 512

        def engine(prompts: int) -> dict[str, Any]:
            most = (prompts + 1) * slots
            return {"max_total_tokens": most, "chunked_prefill_size": 2048}

        ours = {"compressor": options.compressor}
        near = {**engine(options.clients), **link(folder, options.near)}
        at_once = -(-options.clients // options.drafters)
        far = {**engine(at_once), **link(folder, options.far)}
        own, others = halves()
        self.plain = self._serve("plain", None, engine(1), own | others)

        def verifier(**more: int) -> tuple[OwnServer, str]:
            address = f"tcp://127.0.0.1:{free_port()}"
            settings = {**ours, **more, "role": "verifier", "peer_bind": address}
            return self._serve("verifier", settings, near, own), address

        def drafters(path: str, address: str) -> list[OwnServer]:
            peers = {"role": "drafter", "verifiers": address, "remote_path": path}
            return [
                self._serve(f"{path}-{i}", {**ours, **peers}, far, others)
                for i in range(options.drafters)
            ]

        drafting, plain = verifier(), verifier(min_prompt=LONGER_THAN_ANY)
        self._servers: dict[str, tuple[OwnServer, list[OwnServer]]] = {}
        for name, path in PATHS.items():
            near_one, address = plain if name == PLAIN_B1 else drafting
            self._servers[name] = near_one, drafters(path, address)

    def _serve(
        self,
        name: str,
        settings: Mapping[str, Any] | None,
        engine: Mapping[str, Any],
        cores: set[int],
    ) -> OwnServer:
        system = described(name, settings, engine)
        server = self._running.enter_context(served(system, self._model))
        server.pin(cores)
        return server

    def fresh(self, name: str) -> list[OwnServer]:
        """Return a path's drafters; what they need is in the store and nowhere else."""
        near_one, drafters = self._servers[name]
        for server in (near_one, *drafters):
            server.flush()
        return drafters


def _asked(
    drafters: Sequence[OwnServer], requests: Sequence[Body], clients: int
) -> Pass:
    """Have drafters answer requests, each its share of them, as many as clients."""
    count = min(len(drafters), clients)

    def share(i: int) -> Pass:
        return answered(drafters[i].url, requests[i::count], clients // count)

    with ThreadPoolExecutor(count) as pool:
        passes = list(pool.map(share, range(count)))
    answers = [passes[i % count].answers[i // count] for i in range(len(requests))]
    return Pass(tuple(answers), max(each.seconds for each in passes))


def _row(done: Pass, wanted: Pass) -> dict[str, Any]:
    answers = done.answers
    spreads = latencies(answers)
    # While as many clients wait as there are: until the last request is sent.
    until = max(answer.sent for answer in answers)
    tokens = sum(
        max((count for at, count in answer.times if at <= until), default=0)
        for answer in answers
    )
    paths = [(answer.drafting or {}).get("path", "") for answer in answers]
    return {
        "answers_that_differ": mismatches(wanted, done),
        "paths": {path: paths.count(path) for path in sorted({*paths})},
        "seconds_to_first_token": spreads["ttft_s"]["p50"],
        "seconds_of_an_answer": spreads["latency_s"]["p50"],
        "tokens_per_s": tokens / until,
    }


def _measure(options: argparse.Namespace, results: Results) -> None:
    if not 1 < options.clients < options.documents:
        raise ConfigError(
            f"--clients {options.clients}: must be at least 2, and fewer than the "
            f"documents ({options.documents})"
        )
    requests = _requests(options)
    with ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory())
        texts = [request["text"] for request in requests]
        write(options.model, texts, folder, options.compressor)
        servers = PathServers(options, folder, running)
        wanted = answered(servers.plain.url, requests, 1)
        for number in range(options.passes):
            names = list(PATHS)[:: -1 if number % 2 else 1]
            for name in names:
                for clients in (1, options.clients):
                    results.row(
                        f"{name}, {clients} at once, pass {number + 1}",
                        _turn,
                        *(servers, name, requests, clients, wanted, number + 1),
                    )
    _summarise(options, results)


def _turn(
    servers: PathServers,
    name: str,
    requests: Sequence[Body],
    clients: int,
    wanted: Pass,
    number: int,
) -> dict[str, Any]:
    count = len(requests) if clients > 1 else ALONE
    done = _asked(servers.fresh(name), requests[:count], clients)
    expected = Pass(wanted.answers[:count], wanted.seconds)
    turn = {"path": name, "clients": clients, "pass": number}
    return turn | _row(done, expected)


def _summarise(options: argparse.Namespace, results: Results) -> None:
    rows = results.rows.values()
    differ = sum(row["answers_that_differ"] for row in rows)
    figures: dict[str, dict[str, float]] = {}
    for name in PATHS:
        for clients in (1, options.clients):
            found = [r for r in rows if (r["path"], r["clients"]) == (name, clients)]
            figures[f"{name}, {clients} at once"] = {
                key: float(np.median([row[key] for row in found]))
                for key in (
                    "seconds_to_first_token",
                    "seconds_of_an_answer",
                    "tokens_per_s",
                )
            }
    first = {
        name: figures[f"{name}, 1 at once"]["seconds_to_first_token"] for name in PATHS
    }
    shares = {clients: _shares(rows, clients) for clients in (1, options.clients)}
    results.figures = {
        "label": "EMULATED links; one machine",
        "link_mb_per_s": {"near": options.near, "far": options.far},
        "answers_that_differ": differ,
        "medians": figures,
        "first_token_of_p1_by_b1": first[P1] / first[B1],
        "first_token_of_p1_by_b2": first[P1] / first[B2],
        "tokens_per_s_of_auto": {
            f"{clients} at once": {
                f"by {other}": {"median": float(np.median(found)), "passes": found}
                for other, found in by.items()
            }
            for clients, by in shares.items()
        },
    }
    results.require(differ == 0, f"{differ} answers differ from plain SGLang's")
    for other, most in ((B1, MOST_OF_B1), (B2, MOST_OF_B2)):
        share = first[P1] / first[other]
        results.require(
            share <= most, f"first tokens of p1: {share:.2f} of {other}'s, not {most}"
        )
    bounds = [(clients, BEST, LEAST_OF_BEST) for clients in shares]
    bounds.append((options.clients, BASELINES, LEAST_OF_BASELINES))
    for clients, other, least in bounds:
        share = float(np.median(shares[clients][other]))
        results.require(
            share >= least,
            f"tokens/s of auto, {clients} at once: {share:.2f} of {other}",
        )


def _shares(rows: Collection[dict[str, Any]], clients: int) -> dict[str, list[float]]:
    """Return tokens/s of the choice over those of ``OTHERS``, by pass."""
    found: dict[str, list[float]] = {other: [] for other in OTHERS}
    for number in sorted({row["pass"] for row in rows}):
        rates = {
            row["path"]: row["tokens_per_s"]
            for row in rows
            if (row["pass"], row["clients"]) == (number, clients)
        }
        for other, (near, of) in OTHERS.items():
            found[other].append(rates[AUTO] / of(rates[near], rates[B2]))
    return found


REMOTE = Benchmark(
    about="Stored prefixes near a verifier, and drafters behind slow links (all "
    "links EMULATED): time to first token and tokens/s of B1 with and without drafts, "
    "P1, P2, B2 and the choice. Fails where an answer differs, first tokens of P1 take "
    "over 1.5 of B1's or 0.25 of B2's, the choice is slower than B1 or B2, or has less "
    "than 1.15 of B2's or of B1's without drafts.",
    model=DEMO_LONG,
    seed=11,
    options={
        "tokens": (15560, "of a prompt: a document of 30 segments, and its question"),
        "documents": (30, "each asked about once in a pass"),
        "clients": (12, "at once, after one at a time; fewer than documents"),
        "drafters": (
            2,
            "of each path, each with a link of its own",
        ),
        "output": (64, "tokens of an answer"),
        "passes": (3, "of every path"),
        "near": (300.0, "MB/s from the store to the verifier"),
        "far": (9.0, "MB/s from the store to the drafter"),
        "compressor": ("keynorm", "as --vericache-compressor"),
    },
    measure=_measure,
    selecting=("passes",),
)
