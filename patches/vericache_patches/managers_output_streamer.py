"""Hook on ``output_streamer.py``: no chunk without a token."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def accept(original: Hook, accumulator: Any, *, req: Any) -> None:
    """Pass a request on unless it is running and has nothing new to send."""
    sent = req.send_token_offset
    if not req.finished() and sent and len(req.output_ids_through_stop) == sent:
        return
    original(accumulator, req=req)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.managers.scheduler_components.output_streamer."
                "_GenerationStreamAccumulator.accept"
            ),
            kind="around",
            args=("self", "req"),
            reason="It decides by len(output_ids) % interval, so every drafting "
            "iteration would stream an empty chunk.",
            remove_when="SGLang skips requests that emitted nothing.",
        ),
        accept,
    ),
)
