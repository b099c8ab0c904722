"""The acceptance from which an inner drafter pays, by the gain model of a server."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vericache_sglang.planning.intra import (
    InnerDrafter,
    ServerModel,
    full_kv,
    search,
)
from vericache_sglang.planning.paper.assumptions import CONTEXT_TOKENS, KEEP, server
from vericache_sglang.planning.paper.examples import EAGLE3

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

STEP = 0.01
"""Break-even acceptance is found to this, rounded up."""

LENGTHS = range(1, 64, 2)
"""Draft lengths tried."""

DRAFTERS: Mapping[str, InnerDrafter] = {
    "`ngram`": InnerDrafter(length=1),
    "`eagle3`, a head of 1.5 GB": replace(EAGLE3, length=1),
    "`model`, 1.7B parameters": InnerDrafter(
        length=1, weight_bytes=3.4e9, kv_bytes=512 * 112 * 1024
    ),
}
"""Drafters of Qwen3-32B that propose one token: the first one is the cheapest."""

PLACES: Mapping[str, tuple[str, int]] = {
    "RTX PRO 6000, 24K tokens": ("rtx-pro-6000", CONTEXT_TOKENS),
    "H100 NVL, 24K tokens": ("h100-nvl", CONTEXT_TOKENS),
    "H200, 500 tokens, 256 requests": ("h200", 500),
}
"""GPUs and context lengths, with as many requests as pay, at most ``MOST``."""

MOST = 256


def break_even(
    model: ServerModel, inner: InnerDrafter, keep: float, lengths: Iterable[int]
) -> float | None:
    """Return the least acceptance with which a drafter is not slower than none.

    Draft length and requests are the best ones with it, and without it.

    Args:
        model: A server without an inner drafter. At most nine numbers of requests
            whose full KV stays on the device are tried.
        inner: Its ``accept`` is ignored.
        keep: c.
        lengths: Candidates for x.

    Returns:
        A multiple of ``STEP`` in [0, 1]; None if it never pays.
    """
    tried, fitting = list(lengths), full_kv(model).requests
    held = range(0, fitting + 1, max(1, fitting // 8))

    def speed(drafter: InnerDrafter) -> float:
        given = replace(model, inner=drafter)
        return search(given, [keep], tried, resident=held).tokens_per_s

    alone = speed(InnerDrafter())

    def pays(steps: int) -> bool:
        return speed(replace(inner, accept=steps * STEP)) >= alone

    low, high = 0, round(1 / STEP)
    if not pays(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if pays(middle):
            high = middle
        else:
            low = middle + 1
    return low * STEP


def table() -> str:
    """Return the break-even acceptance of every drafter and place, as Markdown."""
    rows = [("drafter", *PLACES), ("---",) * (1 + len(PLACES))]
    servers = [
        replace(server("qwen3-32b", gpu, context_tokens=tokens), concurrency=MOST)
        for gpu, tokens in PLACES.values()
    ]
    for name, inner in DRAFTERS.items():
        found = [break_even(each, inner, KEEP, LENGTHS) for each in servers]
        rows.append((name, *("never" if p is None else f"{p:.2f}" for p in found)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
