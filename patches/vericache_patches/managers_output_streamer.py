"""Hook on ``output_streamer.py``: stream intervals with several tokens per step."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def accept(original: Hook, accumulator: Any, *, req: Any) -> None:
    """Stream a request's output unless it has no new tokens, or belongs elsewhere.

    Upstream streams at exactly 1, k + 1, 2k + 1, ... tokens; a request of ours is due
    once it has reached or passed the next of these. Requests with ``vericache_room``
    may emit several tokens per step, as may those that verifiers decode; others are not
    ours. Guests of a verifier have no client here.
    """
    if getattr(req, "vericache_guest", False):
        req.finished_output = req.finished()
        return
    sent = req.send_token_offset
    if not req.finished() and len(req.output_ids_through_stop) == sent:
        return
    params = req.sampling_params
    asked = params.stream_interval
    interval = asked or accumulator.default_stream_interval
    ours = getattr(req, "vericache_room", None) is not None
    ours = ours or hasattr(req, "vericache_path")
    if req.finished() or not req.stream or interval == 1 or not ours:
        original(accumulator, req=req)
    elif (len(req.output_ids) - 1) // interval > (sent - 1) // interval:
        params.stream_interval = 1
        original(accumulator, req=req)
        params.stream_interval = asked


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.managers.scheduler_components.output_streamer."
                "_GenerationStreamAccumulator.accept"
            ),
            kind="around",
            args=("self", "req"),
            reason="It streams when len(output_ids) % interval == 1: an empty chunk in "
            "every drafting iteration, and silence where a run jumps over that.",
            remove_when="SGLang counts the tokens since the last chunk.",
            body="a4e99238a5c8",
        ),
        accept,
    ),
)
