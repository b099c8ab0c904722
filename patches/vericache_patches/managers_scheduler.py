"""Hooks on ``sglang/srt/managers/scheduler.py``: our report, and control requests."""

from __future__ import annotations

from typing import Any

from zmq import POLLIN

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
    role = getattr(worker, "role", None)
    if role is not None:
        _wake_by(scheduler, role)
        role.exchange(scheduler)
    gate = getattr(worker, "control_gate", None)
    if gate is not None:
        recv_reqs = gate.admit(scheduler, recv_reqs or ())
    original(scheduler, recv_reqs)


def _wake_by(scheduler: Any, role: Any) -> None:
    """Let messages of drafters and verifiers wake an idle scheduler that sleeps."""
    sleeper = scheduler.idle_sleeper
    if sleeper is not None and role.ready not in sleeper.poller:
        sleeper.poller.register(role.ready, POLLIN)


def add_request_to_queue(
    original: Hook, scheduler: Any, req: Any, is_retracted: bool = False
) -> None:
    """Let a drafter send a new request elsewhere; let a verifier note its guests."""
    role = getattr(scheduler.draft_worker, "role", None)
    if role is None or is_retracted or not role.take(scheduler, req):
        original(scheduler, req, is_retracted)


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
    (
        Patch(
            target=f"{SCHEDULER}._add_request_to_queue",
            kind="around",
            args=("self", "req", "is_retracted"),
            reason="A drafter's requests are decoded by verifiers, without a row here.",
            remove_when="SGLang lets a spec worker take a request from the queue.",
        ),
        add_request_to_queue,
    ),
    (
        Patch(
            target=f"{SCHEDULER}.collect_inflight_reqs",
            kind="around",
            args=("self",),
            reason="Aborts must reach requests that are decoded elsewhere.",
            remove_when="SGLang asks its spec worker for the requests it holds.",
            body="c6afc06cce3a",
        ),
        collect_inflight_reqs,
    ),
    (
        Patch(
            target=f"{SCHEDULER}.is_fully_idle",
            kind="around",
            args=("self", "for_health_check", "ignore_waiting"),
            reason="A flush, new weights or a shutdown must not meet requests that are "
            "decoded elsewhere.",
            remove_when="SGLang asks its spec worker for the requests it holds.",
        ),
        is_fully_idle,
    ),
)
