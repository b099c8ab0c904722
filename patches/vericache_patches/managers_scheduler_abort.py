"""Hook on ``sglang/srt/managers/scheduler.py``: aborts match the exact request id."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch

HIDDEN = "\x00"
"""Prefix put before the ids of requests that an abort must not match."""


def abort_request(original: Hook, scheduler: Any, recv_req: Any) -> Any:
    """Hide requests whose id has the aborted id only as a prefix."""
    if recv_req.abort_all or not scheduler.draft_worker:
        return original(scheduler, recv_req)
    hidden = [
        req
        for req in _requests(scheduler)
        if req.rid != recv_req.rid and req.rid.startswith(recv_req.rid)
    ]
    for req in hidden:
        req.rid = HIDDEN + req.rid
    try:
        return original(scheduler, recv_req)
    finally:
        for req in hidden:
            req.rid = req.rid.removeprefix(HIDDEN)


def _requests(scheduler: Any) -> list[Any]:
    """Return every request that ``abort_request`` examines, without duplicates."""
    found = [
        *scheduler.waiting_queue,
        *scheduler.grammar_manager.grammar_queue,
        *scheduler.collect_inflight_reqs(),
    ]
    if scheduler.chunked_req is not None:
        found.append(scheduler.chunked_req)
    if (moving := scheduler.disagg_decode_transfer_queue) is not None:
        waiting = scheduler.disagg_decode_prealloc_queue
        found += [arriving.req for arriving in (*waiting.queue, *moving.queue)]
    return list({id(req): req for req in found}.values())


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target="sglang.srt.managers.scheduler.Scheduler.abort_request",
            kind="around",
            args=("self", "recv_req"),
            reason="Upstream aborts every request whose id begins with the given one, "
            "also where a client that chose a short id hangs up, and where the "
            "scheduler itself aborts one: a check of what clients send is too early.",
            remove_when="SGLang compares whole ids.",
            body="8dd2e82cffb2",
        ),
        abort_request,
    ),
)
