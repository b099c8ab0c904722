"""Figures of a pass: rates, latencies and increments of the server's counters."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import comb
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vericache_sglang.evaluation.client import Answer, Pass

SHARES = (10, 50, 90, 99)
"""Percentiles that are reported."""

TOTALS = (
    *("iterations", "mixed_iterations", "draft_rows", "verify_rows", "plain_rows"),
    *("waits", "drafted", "accepted", "cycles", "compressions", "restores"),
    *("fallbacks", "offloads", "loads", "swap_outs", "swap_ins", "shared_prefetches"),
    *("staged_bytes", "offloaded_bytes", "prefetch_seconds", "disabled_speculations"),
    *("deadline_misses", "failed_prefetches", "reprefills"),
    *("inner_proposed_draft", "inner_proposed_verify", "inner_proposed_plain"),
    *("inner_accepted_draft", "inner_accepted_verify", "inner_accepted_plain"),
)
"""Monotonic counters of a server."""

DEFINITIONS: Mapping[str, str] = {
    "tokens_per_s": "output tokens of answers without error / seconds from the first "
    "request sent to the last answer ended; prefill and queueing included",
    "decode_tokens_per_s": "tokens after the last request's first token and before the "
    "first request's end / that time, in which all are decoding; none without such a "
    "time",
    "ttft_s": "from sending a request (open loop: from its arrival time) to the first "
    "event with a token",
    "itl_s": "waits between a request's tokens: an event with k tokens after s seconds "
    "is one wait of s and k - 1 of 0",
    "burst_s": "waits between a request's events, whatever they brought",
    "latency_s": "from sending (open loop: arrival) to the end of the stream",
    "accepted_per_verify": "drafts accepted / verifications (server's counters); the "
    "full KV's own token comes on top",
    "proposals_per_row": "an inner drafter's proposals that were accepted / drafted, "
    "verified and plain rows (server's counters); none without proposals",
    "accepted": "as accepted_per_verify, for each verification (the answers' figures)",
    "moved_bytes_per_token": "bytes copied to the host and back / output tokens "
    "(server's counters); 0 for plain SGLang",
    "link_share": "time prefetches were on the link / seconds (server's counters)",
    "kv_read_share": "rate at which forwards read KV, as the server estimates it, / "
    "--memory-gbps",
    "mismatches": "requests whose token ids differ from plain's in the same round",
    "ratio": "tokens_per_s / plain's in the same round",
    "kl": "nats per token of KL(full KV || lossy) after plain's own tokens, from both "
    "sides' top-k log-probabilities; tokens outside either list are one outcome, so "
    "it is a lower bound",
}
"""Definition of each figure of the results."""


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Return mean, percentiles, greatest value and count; None for no value."""
    found = np.fromiter(values, float)
    if not len(found):
        return None
    shares = np.percentile(found, SHARES).tolist()
    named = {f"p{share}": value for share, value in zip(SHARES, shares, strict=True)}
    most, count = float(found.max()), len(found)
    return {"mean": float(found.mean()), **named, "max": most, "n": count}


def middle(values: Sequence[float]) -> dict[str, float] | None:
    """Return median, least and greatest of repeats; None for no value."""
    if not values:
        return None
    median = float(np.median(values))
    return {"median": median, "min": min(values), "max": max(values)}


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return two of the values between which the median lies with at least 95 %.

    By order statistics, so for any distribution; of fewer than six values the least and
    the greatest, which hold it less surely.
    """
    ordered, n = sorted(values), len(values)
    tails = accumulate(comb(n, k) / 2**n for k in range(n))
    outside = max(1, sum(tail <= 0.025 for tail in tails))
    return ordered[outside - 1], ordered[-outside]


def token_waits(times: Sequence[tuple[float, int]]) -> list[float]:
    """Return the inter-token latencies; see ``itl_s`` in ``DEFINITIONS``.

    Args:
        times: (seconds, tokens so far) of every event with new tokens.
    """
    waits: list[float] = []
    for (before, had), (after, has) in pairwise(times):
        waits += [after - before, *[0.0] * (has - had - 1)]
    return waits


def decode_rate(answers: Sequence[Answer]) -> float | None:
    """Return output tokens per second while all requests decode; None: never.

    Args:
        answers: Successful answers to requests that were sent together.
    """
    times = [answer.times for answer in answers if answer.times]
    if not times:
        return None
    begin = max(events[0][0] for events in times)
    end = min(events[-1][0] for events in times)
    if end <= begin:
        return None
    had = [max((n for at, n in events if at <= begin), default=0) for events in times]
    has = [max(n for at, n in events if at <= end) for events in times]
    return (sum(has) - sum(had)) / (end - begin)


def latencies(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the spreads of client latencies; failed answers do not count."""
    good = [answer for answer in answers if not answer.error and answer.times]
    events = [[at for at, _ in answer.times] for answer in good]
    return {
        "ttft_s": spread(answer.times[0][0] - answer.sent for answer in good),
        "itl_s": spread(w for answer in good for w in token_waits(answer.times)),
        "burst_s": spread(b - a for times in events for a, b in pairwise(times)),
        "latency_s": spread(answer.ended - answer.sent for answer in good),
    }


def accepted(answers: Sequence[Answer]) -> dict[str, float] | None:
    """Return the spread of acceptance lengths, without bonus tokens; None: no cycle."""
    found: list[float] = []
    for answer in answers:
        counts = (answer.drafting or {}).get("accepted_histogram", [])
        for drafts, verifications in enumerate(counts):
            found += [float(drafts)] * verifications
    return spread(found)


def pass_figures(
    done: Pass,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    memory_gbps: float | None,
) -> dict[str, Any]:
    """Return the figures of one pass.

    Args:
        done: The clients' records.
        before: The server's counters before the pass; empty without VeriCache.
        after: The same after the pass.
        memory_gbps: Bandwidth of device memory in GB/s; None: unknown.
    """
    good = [answer for answer in done.answers if not answer.error]
    tokens = sum(len(answer.ids) for answer in good)
    return {
        "seconds": done.seconds,
        "requests": len(done.answers),
        "output_tokens": tokens,
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "cached_prompt_tokens": sum(answer.cached_tokens for answer in good),
        "tokens_per_s": tokens / done.seconds if done.seconds > 0 else 0.0,
        "decode_tokens_per_s": decode_rate(good),
        "errors": sorted({answer.error for answer in done.answers if answer.error}),
        "failed_requests": len(done.answers) - len(good),
        **latencies(done.answers),
        **_counted(done.seconds, tokens, before, after, memory_gbps),
    }


def _counted(
    seconds: float,
    tokens: int,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    memory_gbps: float | None,
) -> dict[str, Any]:
    grown = growth(before, after)
    moved = grown.get("staged_bytes", 0) + grown.get("offloaded_bytes", 0)
    read = after.get("kv_read_bytes_per_s")
    known = bool(grown) and seconds > 0
    return {
        "counters": grown,
        "accepted_per_verify": per_verify(grown)["accepted_per_verify"],
        "proposals_per_row": proposals_per_row(grown),
        "moved_bytes_per_token": _ratio(moved, tokens),
        "link_share": grown["prefetch_seconds"] / seconds if known else None,
        "kv_read_share": read / (memory_gbps * 1e9) if read and memory_gbps else None,
    }


def growth(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the increments of a server's ``TOTALS``; empty without VeriCache."""
    return {key: after[key] - before.get(key, 0) for key in TOTALS if key in after}


def per_verify(grown: Mapping[str, Any]) -> dict[str, float | None]:
    """Return tokens drafted and accepted per verification; None without any."""
    verified = grown.get("cycles", 0)
    return {
        f"{what}_per_verify": _ratio(grown.get(what, 0), verified)
        for what in ("drafted", "accepted")
    }


def proposals_per_row(grown: Mapping[str, Any]) -> float | None:
    """Return an inner drafter's accepted proposals per row; None without proposals."""
    phases = ("draft", "verify", "plain")
    proposed, accepted = (
        sum(grown.get(f"inner_{what}_{phase}", 0) for phase in phases)
        for what in ("proposed", "accepted")
    )
    rows = sum(grown.get(f"{phase}_rows", 0) for phase in phases)
    return _ratio(accepted, rows) if proposed else None


def per_token(grown: Mapping[str, Any], tokens: int) -> float:
    """Return the iterations that a request took part in or waited through per token.

    Args:
        grown: Increments of ``TOTALS``.
        tokens: Output tokens, > 0.
    """
    rows = ("draft_rows", "verify_rows", "plain_rows", "waits")
    return float(sum(grown[name] for name in rows) / tokens)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def mismatches(wanted: Pass, got: Pass) -> int:
    """Count the requests whose token ids differ; those that failed do not count."""
    pairs = zip(wanted.answers, got.answers, strict=True)
    return sum(a.ids != b.ids for a, b in pairs if not (a.error or b.error))
