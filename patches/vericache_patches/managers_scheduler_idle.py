"""Hooks on ``scheduler.py``: requests that other servers decode are in flight too."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def collect_inflight_reqs(original: Hook, scheduler: Any) -> Any:
    """Add the requests that are decoded elsewhere: an abort finds them here."""
    found = original(scheduler)
    role = getattr(scheduler.draft_worker, "role", None)
    return found if role is None else {*found, *role.in_flight}


def is_fully_idle(
    original: Hook,
    scheduler: Any,
    for_health_check: bool = False,
    ignore_waiting: bool = False,
) -> Any:
    """Return False too while requests are decoded elsewhere."""
    role = getattr(scheduler.draft_worker, "role", None)
    if not for_health_check and role is not None and any(role.in_flight):
        return False
    return original(scheduler, for_health_check, ignore_waiting)


SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
ASKED = "SGLang asks its spec worker for the requests it holds."

HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=f"{SCHEDULER}.collect_inflight_reqs",
            kind="around",
            args=("self",),
            reason="Aborts must reach requests that are decoded elsewhere.",
            remove_when=ASKED,
        ),
        collect_inflight_reqs,
    ),
    (
        Patch(
            target=f"{SCHEDULER}.is_fully_idle",
            kind="around",
            args=("self", "for_health_check", "ignore_waiting"),
            reason="A flush or new weights must not meet requests decoded elsewhere.",
            remove_when=ASKED,
        ),
        is_fully_idle,
    ),
)
