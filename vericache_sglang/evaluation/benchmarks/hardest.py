"""Speed over plain SGLang's where drafting pays least, prefills included.

Answers that end before compressing a prompt can pay back, drafts that are all rejected,
and requests whose tokens the host needs at once. First tokens and later tokens are
timed apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vericache_sglang.evaluation.benchmark import DEMO_LONG, Benchmark
from vericache_sglang.evaluation.client import closed_loop
from vericache_sglang.evaluation.figures import growth, latencies, mismatches
from vericache_sglang.evaluation.fleet import served
from vericache_sglang.evaluation.lossless import bodies, greedy
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import (
    code_prompts,
    load_tokenizer,
    record_prompts,
)

if TYPE_CHECKING:
    import argparse

    from vericache_sglang.evaluation.benchmark import Results
    from vericache_sglang.evaluation.server import Server

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
        tokens: Of each answer.
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
    plain: Server,
    ours: Server,
    asked: list[dict[str, Any]],
    pairs: int,
    least_s: float,
) -> dict[str, Any]:
    """Have two servers answer the same requests by turns, without cached prefixes.

    Every pair begins its prompts with another number, so nothing has to be flushed.

    Args:
        plain: The one.
        ours: The other.
        asked: Requests of a pass, sent at once.
        pairs: Least pairs of passes.
        least_s: Least time of all passes, in seconds: short passes vary the most.

    Returns:
        Ratios of plain SGLang's time to ours, one of each pair: of the whole pass, to
        the first token, and per later token where there are any.
    """
    for server in (plain, ours):
        server.flush()  # other points have the same prompts
        _pass(server, asked, 0)
    found: dict[str, list[float]] = {"seconds": [], "ttft_s": [], "tpot_s": []}
    different, before = 0, ours.counters()
    took_s = 0.0
    while (i := len(found["seconds"])) < pairs or took_s < least_s:
        order = (plain, ours) if i % 2 == 0 else (ours, plain)
        passes = {server: _pass(server, asked, i + 1) for server in order}
        took_s += sum(done.seconds for done in passes.values())
        different += mismatches(passes[plain], passes[ours])
        times = [_times(passes[server]) for server in (plain, ours)]
        for key, ratios in found.items():
            if times[1][key]:
                ratios.append(times[0][key] / times[1][key])
    return {
        "ratios": found,
        "mismatched_requests": different,
        "counters": growth(before, ours.counters()),
    }


def _pass(server: Server, asked: list[dict[str, Any]], number: int) -> Any:
    fresh = [{**body, "text": f"{number} {body['text']}"} for body in asked]
    done = closed_loop(server.url, fresh, len(fresh), lambda: None, 3600.0)
    failed = [answer.error for answer in done.answers if answer.error]
    if failed:
        raise RuntimeError(f"a request failed: {failed[0]}")
    return done


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
    cases = [case for case in CASES if not options.kinds or case.kind in options.kinds]
    slots = max(2 * case.requests * (case.context + 700) for case in cases)
    engine = {"max_total_tokens": slots, "chunked_prefill_size": 2048}
    limits = options.pairs, options.seconds
    for start in range(options.starts):
        with served(described("plain", None, engine), options.model) as plain:
            for wrong in (False, True):
                chosen = [each for each in cases if (each.kind == WRONG_KIND) is wrong]
                if not chosen:
                    continue
                system = described("vericache", WRONG if wrong else {}, engine)
                with served(system, options.model) as ours:
                    for case in chosen:
                        asked, name = requests_of(options, case), f"{case.name}/{start}"
                        results.row(name, compare, plain, ours, asked, *limits)
    _summarise(cases, options, results)


def _summarise(
    cases: list[Case], options: argparse.Namespace, results: Results
) -> None:
    """Report each point's median over the pairs of all starts, and check the worst."""
    rows = results.rows
    points: dict[str, dict[str, float]] = {}
    for case in cases:
        mine = [rows[f"{case.name}/{start}"] for start in range(options.starts)]
        pooled = {
            key: [ratio for row in mine for ratio in row["ratios"][key]]
            for key in mine[0]["ratios"]
        }
        points[case.name] = {
            key: float(np.median(ratios)) for key, ratios in pooled.items() if ratios
        }
    differ = sum(row["mismatched_requests"] for row in rows.values())
    results.figures["mismatched_requests"] = differ
    results.require(differ == 0, f"{differ} requests differ from plain SGLang's")
    results.figures["median_ratios"] = points
    for key in ("seconds", "ttft_s", "tpot_s"):
        have = {name: point[key] for name, point in points.items() if key in point}
        worst = min(have, key=lambda name: have[name])
        told = f"{key} of {worst}: {have[worst]:.3f}"
        results.require(have[worst] >= options.floor, f"too slow, {told}")


HARDEST = Benchmark(
    about="Never slower than plain SGLang where drafting pays least: short answers "
    "behind long prompts, wrong drafts, log-probabilities and grammars, prefills "
    "included. Fails where an answer differs or a ratio is too low.",
    model=DEMO_LONG,
    seed=3,
    options={
        "kinds": ([str], "kinds of requests; by default all"),
        "starts": (3, "pairs of servers started: processes differ by some percent"),
        "pairs": (3, "least timed pairs per point and start"),
        "seconds": (12.0, "least seconds of timed passes per point and start"),
        "floor": (0.97, "least ratio that does not fail"),
    },
    measure=_hardest,
    selecting=("kinds",),
)
