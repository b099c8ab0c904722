"""Hook on ``sglang/srt/managers/scheduler.py``: our counters in the server's state."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def get_internal_state(original: Hook, scheduler: Any, recv_req: Any) -> Any:
    """Add the worker's report under the key ``vericache``."""
    output = original(scheduler, recv_req)
    report = getattr(scheduler.draft_worker, "report", None)
    if report is not None:
        output.internal_state["vericache"] = report()
    return output


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target="sglang.srt.managers.scheduler.Scheduler.get_internal_state",
            kind="around",
            args=("self", "recv_req"),
            reason="A speculative worker cannot add to GET /get_server_info.",
            remove_when="SGLang asks its spec worker for state to report.",
        ),
        get_internal_state,
    ),
)
