"""Hooks on ``sglang/srt/managers/scheduler.py``: our report, and control requests."""

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


def process_input_requests(original: Hook, scheduler: Any, recv_reqs: Any) -> None:
    """Let the worker's gate hold control requests until the scheduler is idle.

    What an error of the last iteration has made unreliable is reset first.
    """
    worker = scheduler.draft_worker
    begin_iteration = getattr(worker, "begin_iteration", None)
    if begin_iteration is not None:
        begin_iteration(scheduler)
    gate = getattr(worker, "control_gate", None)
    if gate is not None:
        recv_reqs = gate.admit(scheduler, recv_reqs or ())
    original(scheduler, recv_reqs)


SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=f"{SCHEDULER}.get_internal_state",
            kind="around",
            args=("self", "recv_req"),
            reason="A speculative worker cannot add to GET /get_server_info.",
            remove_when="SGLang asks its spec worker for state to report.",
        ),
        get_internal_state,
    ),
    (
        Patch(
            target=f"{SCHEDULER}.process_input_requests",
            kind="around",
            args=("self", "recv_reqs"),
            reason="Weights sent right after an answer end the process, as its request "
            "is still in a batch; and a speculative worker is not told of new weights, "
            "nor asked before a batch is chosen whether its KV is still reliable.",
            remove_when="SGLang defers control requests until it is idle, tells its "
            "spec worker of new weights, and lets it retract every request.",
        ),
        process_input_requests,
    ),
)
