"""Hook on ``sglang/srt/managers/schedule_policy.py``: slots of swapped-out requests."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def running_request_offset(original: Hook, adder: Any, req: Any) -> Any:
    """Add the slots that a swapped-out request needs before new requests start."""
    return original(adder, req) + getattr(req, "vericache_swapped_slots", 0)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.managers.schedule_policy.PrefillAdder."
                "_get_running_request_total_token_offset"
            ),
            kind="around",
            args=("self", "req"),
            reason="Admission counts what running requests will still take; a swapped-"
            "out one takes all of its slots again, or newcomers would starve it. The "
            "free slots that the cache reports must add up, so it cannot hide some.",
            remove_when="SGLang asks its spec worker what running requests need.",
        ),
        running_request_offset,
    ),
)
