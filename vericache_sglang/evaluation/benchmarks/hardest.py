"""Speed over plain SGLang's where drafting pays least, prefills included.

Answers that end before compressing a prompt can pay back, drafts that are all rejected,
and requests whose tokens the host needs at once. First tokens and later tokens are
timed apart.
"""

from __future__ import annotations

from contextlib import ExitStack
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
from vericache_sglang.evaluation.time_slices import SliceClock, in_slices
from vericache_sglang.evaluation.workload import (
    code_prompts,
    load_tokenizer,
    record_prompts,
)

if TYPE_CHECKING:
    import argparse

    from vericache_sglang.evaluation.benchmark import Results
    from vericache_sglang.evaluation.client import Pass
    from vericache_sglang.evaluation.server import OwnServer

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
    plain: OwnServer, ours: OwnServer, asked: list[dict[str, Any]], pairs: int
) -> dict[str, Any]:
    """Have two servers answer the same requests in slices, without cached prefixes.

    Every pass begins its prompts with another number, so nothing has to be flushed, and
    what a server learns about a kind of requests, it learns in these passes.

    Args:
        asked: Requests of a pass, sent at once.
        pairs: Passes of each.

    Returns:
        Ratios of plain SGLang's time to ours in every pass: of the whole pass, to the
        first token, and per later token where there are any.
    """
    both = (plain, ours)
    for server in both:
        server.flush()  # other points have the same prompts
    different, before = 0, ours.counters()
    ratios: dict[str, list[float]] = {}
    for number in range(pairs):
        fresh = [{**body, "text": f"{number} {body['text']}"} for body in asked]

        def ask(i: int, clock: SliceClock, fresh: list[dict[str, Any]] = fresh) -> Pass:
            return answered(both[i].url, fresh, len(fresh), clock.now)

        done = in_slices(both, ask)
        different += mismatches(*done)
        theirs, own = map(_times, done)
        for key, seconds in own.items():
            ratios.setdefault(key, []).append(theirs[key] / seconds)
    return {
        "ratios": ratios,
        "mismatched_requests": different,
        "counters": growth(before, ours.counters()),
    }


def _times(done: Pass) -> dict[str, float]:
    later = [
        (answer.times[-1][0] - answer.times[0][0]) / (len(answer.ids) - 1)
        for answer in done.answers
        if len(answer.ids) > 1
    ]
    return {
        "seconds": done.seconds,
        "ttft_s": latencies(done.answers)["ttft_s"]["mean"],
        **({"tpot_s": float(np.mean(later))} if later else {}),
    }


def _hardest(options: argparse.Namespace, results: Results) -> None:
    cases = [case for case in CASES if not options.kinds or case.kind in options.kinds]
    slots = max(2 * case.requests * (case.context + 700) for case in cases)
    engine = {"max_total_tokens": slots, "chunked_prefill_size": 2048}
    settings = {"plain": None, "ours": {}, WRONG_KIND: WRONG}
    _, own = halves()
    with ExitStack() as running:
        servers = {}
        for name, of_system in settings.items():
            system = described(name, of_system, engine)
            servers[name] = running.enter_context(served(system, options.model))
            servers[name].pin(own)
        warm = bodies({"prompts": ["0"], "params": [greedy(8)]})
        for server in servers.values():
            answered(server.url, warm, 1)
        for case in cases:
            ours = servers[case.kind if case.kind in servers else "ours"]
            asked = requests_of(options, case)
            results.row(
                case.name, compare, servers["plain"], ours, asked, options.pairs
            )
    _summarise(options, results)


def _summarise(options: argparse.Namespace, results: Results) -> None:
    """Report each point's medians and intervals, and check the worst."""
    differ = sum(row["mismatched_requests"] for row in results.rows.values())
    results.figures["mismatched_requests"] = differ
    results.require(differ == 0, f"{differ} requests differ from plain SGLang's")
    medians = results.figures["median_ratios"] = {}
    for name, row in results.rows.items():
        medians[name] = {}
        for key, ratios in row["ratios"].items():
            median = float(np.median(ratios))
            interval = median_interval(ratios)
            medians[name][key] = {"median": median, "interval": interval}
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
        "pairs": (7, "passes of both systems at a point"),
        "floor": (0.97, "least median ratio that does not fail"),
    },
    measure=_hardest,
    selecting=("kinds",),
)
