"""Hooks on ``sglang/srt/managers/scheduler.py``: room for shadow checks."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def process_input_requests(original: Hook, scheduler: Any, recv_reqs: Any) -> None:
    """Let the shadow see what arrives; it holds what needs an idle server."""
    shadow = getattr(scheduler.draft_worker, "shadow", None)
    if shadow is not None:
        recv_reqs = shadow.inputs(scheduler, recv_reqs or ())
    original(scheduler, recv_reqs)


def maybe_sleep_on_idle(original: Hook, scheduler: Any) -> None:
    """Begin a shadow check in place of sleeping; every idle check has been made."""
    shadow = getattr(scheduler.draft_worker, "shadow", None)
    if shadow is None or not shadow.start(scheduler):
        original(scheduler)


SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
REASON = "A speculative worker can neither use idle time nor put a request in."
REMOVE_WHEN = "SGLang gives its spec worker idle time for requests of its own."

HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=f"{SCHEDULER}.process_input_requests",
            kind="around",
            args=("self", "recv_reqs"),
            reason=REASON,
            remove_when=REMOVE_WHEN,
        ),
        process_input_requests,
    ),
    (
        Patch(
            target=f"{SCHEDULER}.maybe_sleep_on_idle",
            kind="around",
            args=("self",),
            reason=REASON,
            remove_when=REMOVE_WHEN,
        ),
        maybe_sleep_on_idle,
    ),
)
