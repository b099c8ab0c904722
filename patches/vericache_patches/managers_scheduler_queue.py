"""Hook on ``scheduler.py``: requests that other servers decode, or own."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def add_request_to_queue(
    original: Hook, scheduler: Any, req: Any, is_retracted: bool = False
) -> None:
    """Let a drafter send a new request elsewhere; let a verifier note its guests.

    A drafter also takes back a request that drafted here and has lost its row. The
    draft KV of one that could start early is read from the store first.
    """
    role = getattr(scheduler.draft_worker, "role", None)
    early = getattr(scheduler.draft_worker, "early_starts", None)
    if early is not None:
        early.expect(req)
    if role is None or not role.take(scheduler, req, is_retracted):
        original(scheduler, req, is_retracted)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target="sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
            kind="around",
            args=("self", "req", "is_retracted"),
            reason="A drafter's requests are decoded by verifiers, without a row here; "
            "and of a stored prefix the draft KV is to be read first, if the request "
            "can begin with it.",
            remove_when="SGLang lets a spec worker take a request from the queue, and "
            "tells a storage prefetch for which request it is.",
        ),
        add_request_to_queue,
    ),
)
