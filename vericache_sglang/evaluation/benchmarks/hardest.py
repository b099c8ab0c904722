"""Speed over plain SGLang's where drafting pays least, prefills included.

Answers that end before compressing a prompt can pay back, drafts that are all rejected,
and requests whose tokens the host needs at once. First tokens and later tokens are
timed apart.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vericache_sglang.evaluation.benchmark import DEMO_LONG, Benchmark
from vericache_sglang.evaluation.client import answered
from vericache_sglang.evaluation.figures import (
    growth,
    latencies,
    median_interval,
    mismatches,
)
from vericache_sglang.evaluation.fleet import served
from vericache_sglang.evaluation.lossless import bodies, greedy
from vericache_sglang.evaluation.server import halves
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import (
    code_prompts,
    load_tokenizer,
    record_prompts,
)

if TYPE_CHECKING:
    import argparse

    from vericache_sglang.evaluation.benchmark import Results
    from vericache_sglang.evaluation.server import OwnServer, Server

WRONG_KIND = "wrong drafts"
WRONG = {"compressor": "random", "keep": 0.02}
"""Settings under which nearly every draft on a prompt of records is wrong."""

GRAMMAR = {"regex": r"[ -~]{400}"}
"""A grammar that constrains every token and ends no answer early."""


class Case(NamedTuple):
    """One point.

    Attributes:
        context: Prompt tokens.
        requests: Sent at once.
        kind: ``short``, ``wrong drafts``, ``log-probabilities`` or ``grammar``.
    """

    context: int
    requests: int
    tokens: int
    kind: str = "short"

    @property
    def name(self) -> str:
        """Its name in the results."""
        return f"{self.kind}: {self.context}x{self.requests}, {self.tokens} tokens"


CASES = [
    *(Case(context, 1, n) for context in (3000, 8000) for n in (1, 5, 20)),
    *(Case(context, 4, n) for context in (3000, 8000) for n in (1, 5, 20)),
    Case(3000, 16, 5),
    Case(6000, 2, 100, WRONG_KIND),
    Case(8000, 1, 100, WRONG_KIND),
    Case(3000, 4, 100, "log-probabilities"),
    Case(8000, 1, 100, "log-probabilities"),
    Case(3000, 4, 100, "grammar"),
    Case(8000, 1, 100, "grammar"),
]


def requests_of(options: argparse.Namespace, case: Case) -> list[dict[str, Any]]:
    """Return the bodies of a case's requests, the same for both systems."""
    tokenizer, lengths = load_tokenizer(options.model), [case.context] * case.requests
    seed = options.seed + case.context + case.requests
    if case.kind == WRONG_KIND:
        prompts = code_prompts(tokenizer, lengths, seed)
    else:
        prompts = record_prompts(tokenizer, lengths, seed, 6)
    more = GRAMMAR if case.kind == "grammar" else {}
    params = greedy(case.tokens, ignore_eos=True, **more)
    fields = {"return_logprob": True, "top_logprobs_num": 5}
    return bodies(
        {
            "prompts": prompts,
            "params": [params] * case.requests,
            "more": fields if case.kind == "log-probabilities" else {},
        }
    )


def compare(
    plain: OwnServer, ours: OwnServer, asked: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """Have two servers answer the same requests at once, without cached prefixes.

    Each has half of the cores, and they change places after every pass: what other
    work a machine has varies more from one second to the next than the systems differ.
    Every pass begins its prompts with another number, so nothing has to be flushed.

    Args:
        asked: Requests of a pass, sent at once.
        seconds: Pairs of passes are begun until so much time is over.

    Returns:
        Ratios of plain SGLang's time to ours: of whole passes, to the first token, and
        per later token where there are any.
    """
    both = (plain, ours)
    for server in both:
        server.flush()  # other points have the same prompts
    different, before = 0, ours.counters()
    spent: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    parts = halves()
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(2) as pool:
        for number in count(1):
            for server, cores in zip(both, parts, strict=True):
                server.pin(cores)
            parts = parts[::-1]
            done = list(pool.map(_pass, both, repeat(asked), repeat(number)))
            different += mismatches(*done)
            for total, each in zip(spent, done, strict=True):
                total.update(_times(each))
            if number % 2 == 0 and time.monotonic() > end:
                break
    theirs, own = spent
    return {
        "ratios": {key: theirs[key] / own[key] for key in own if own[key]},
        "mismatched_requests": different,
        "counters": growth(before, ours.counters()),
    }


def _pass(server: Server, asked: list[dict[str, Any]], number: int) -> Any:
    fresh = [{**body, "text": f"{number} {body['text']}"} for body in asked]
    return answered(server.url, fresh, len(fresh))


def _times(done: Any) -> dict[str, float]:
    spreads = latencies(done.answers)
    later = [
        (answer.times[-1][0] - answer.times[0][0]) / (len(answer.ids) - 1)
        for answer in done.answers
        if len(answer.ids) > 1
    ]
    return {
        "seconds": done.seconds,
        "ttft_s": spreads["ttft_s"]["mean"],
        "tpot_s": float(np.mean(later)) if later else 0.0,
    }


def _hardest(options: argparse.Namespace, results: Results) -> None:
    for i in range(options.pairs):
        results.row(f"servers {i + 1}", _fresh_servers, options, i % 2 == 1)
    _summarise(options, results)


def _fresh_servers(options: argparse.Namespace, ours_first: bool) -> dict[str, Any]:
    """Measure every point, on servers of their own.

    A process is up to 10 % faster or slower than another of the same kind as long as it
    lives, and the one that started first is faster more often. What a server learns
    about a kind of requests, it learns in the timed passes.
    """
    cases = [case for case in CASES if not options.kinds or case.kind in options.kinds]
    slots = max(2 * case.requests * (case.context + 700) for case in cases)
    engine = {"max_total_tokens": slots, "chunked_prefill_size": 2048}
    settings = {"ours": {}, WRONG_KIND: WRONG}
    system_of = {case: case.kind if case.kind in settings else "ours" for case in cases}
    names = ["plain", *dict.fromkeys(system_of.values())]
    if ours_first:
        names.reverse()
    points: dict[str, dict[str, Any]] = {}
    with ExitStack() as running:
        servers = {
            name: running.enter_context(
                served(described(name, settings.get(name), engine), options.model)
            )
            for name in names
        }
        asked = {case: requests_of(options, case) for case in cases}
        for server in servers.values():
            _pass(server, asked[cases[0]], 0)
        for case, requests in asked.items():
            points[case.name] = compare(
                servers["plain"], servers[system_of[case]], requests, options.seconds
            )
    return {"points": points}


def _summarise(options: argparse.Namespace, results: Results) -> None:
    """Report each point's medians and intervals, and check the worst."""
    points: dict[str, dict[str, list[float]]] = {}
    differ = 0
    for row in results.rows.values():
        for name, point in row["points"].items():
            differ += point["mismatched_requests"]
            for key, ratio in point["ratios"].items():
                points.setdefault(name, {}).setdefault(key, []).append(ratio)
    results.figures["mismatched_requests"] = differ
    results.require(differ == 0, f"{differ} requests differ from plain SGLang's")
    medians = results.figures["median_ratios"] = {}
    for name, found in points.items():
        medians[name] = {}
        for key, ratios in found.items():
            median = float(np.median(ratios))
            medians[name][key] = {
                "median": median,
                "interval": median_interval(ratios),
                "ratios": ratios,
            }
            told = f"{key} of {name}: {median:.3f}"
            results.require(median >= options.floor, f"too slow, {told}")


HARDEST = Benchmark(
    about="Never slower than plain SGLang where drafting pays least: short answers "
    "behind long prompts, wrong drafts, log-probabilities and grammars, prefills "
    "included. Fails where an answer differs or a ratio is too low.",
    model=DEMO_LONG,
    seed=3,
    options={
        "kinds": ([str], "kinds of requests; by default all"),
        "pairs": (7, "pairs of fresh servers"),
        "seconds": (8.0, "time of the passes at a point; two passes at least"),
        "floor": (0.97, "least median ratio that does not fail"),
    },
    measure=_hardest,
    selecting=("pairs",),
)
