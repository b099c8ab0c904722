"""Hundreds of streams at once, of which many are aborted or hung up on."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING

from fuzzing.attack import probe
from fuzzing.wire import post, stream

if TYPE_CHECKING:
    from fuzzing.target import Target

FATES = ("finish", "finish", "abort", "hang_up", "abort_early", "hang_up_early")
"""What happens to a stream; early is after a time that may end before its prefill."""


async def streams(
    target: Target, count: int, probes: dict[str, str], seed: int
) -> tuple[dict[str, int], list[str]]:
    """Open ``count`` streams at once and end two thirds of them at random.

    Args:
        target: The server.
        count: Streams.
        probes: Prompts of healthy requests, with their reference texts.
        seed: Other seeds choose other prompts, fates and moments.

    Returns:
        How many streams met each end, and what went wrong: a finished stream with
        another text than its reference, an ended one whose text is no beginning of it.
    """
    rng = random.Random(seed)
    plans = [
        (rng.choice(list(probes)), rng.choice(FATES), rng.randint(1, 20), rng.random())
        for _ in range(count)
    ]
    ends: Counter[str] = Counter()
    wrong: list[str] = []

    async def one(index: int, prompt: str, fate: str, events: int, wait: float) -> None:
        wanted, name = probes[prompt], f"stream-{seed}-{index:06d}"
        reader = asyncio.create_task(_read(target, name, prompt, fate, events))
        if fate.endswith("early"):
            await asyncio.sleep(wait * count / 25)
            if fate == "hang_up_early":
                reader.cancel()
            elif not reader.done():
                await post(target.url, "/abort_request", {"rid": name})
        try:
            text, reason = await reader
        except asyncio.CancelledError:
            ends["hung up on"] += 1
            return
        ends[reason] += 1
        right = text == wanted if reason == "length" else wanted.startswith(text)
        if not right or reason not in ("length", "abort", "hung up on"):
            wrong.append(f"{name} ({fate}): {text!r} ({reason}) is not {wanted!r}")

    await asyncio.gather(*(one(i, *plan) for i, plan in enumerate(plans)))
    return dict(ends), wrong


async def _read(
    target: Target, name: str, prompt: str, fate: str, events: int
) -> tuple[str, str]:
    """Read one stream to its end; return its text and its finish reason."""
    text, reason, seen = "", "no end", 0
    async for event in stream(target.url, {**probe(prompt), "rid": name}):
        if "error" in event:
            return text, str(event["error"])
        seen += 1
        text = event["text"]
        finish = event["meta_info"]["finish_reason"]
        if finish is not None:
            reason = finish["type"]
        elif fate == "hang_up" and seen == events:
            reason = "hung up on"
            break
        elif fate == "abort" and seen == events:
            await post(target.url, "/abort_request", {"rid": name})
    # An unfinished character at the end of an aborted text is not in the reference.
    return (text if reason == "length" else text.rstrip("\ufffd")), reason
