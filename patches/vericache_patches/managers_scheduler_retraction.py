"""Hook on ``sglang/srt/managers/scheduler.py``: requests that lost their KV."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def update_running_batch(original: Hook, scheduler: Any, batch: Any) -> Any:
    """Send requests that lost or leave their KV back to prefill, as a retraction does.

    The prefix cache keeps KV that is left to it.
    """
    lost = [
        i
        for i, req in enumerate(batch.reqs)
        if getattr(req, "vericache_lost", False) and not req.finished()
    ]
    if lost:
        back = [batch.reqs[i] for i in lost]
        for i, req in zip(lost, back, strict=True):
            if getattr(req, "vericache_kept", False):
                req.vericache_kept = False
                scheduler.tree_cache.insert_req(req, up_to=req.owned_kv_len())
            batch.release_req(i, len(batch.reqs) - len(lost))
        batch.filter_batch(
            keep_indices=[i for i in range(len(batch.reqs)) if i not in lost]
        )
        batch.batch_is_full = False
        for req in back:
            req.vericache_lost = False
            scheduler._add_request_to_queue(req, is_retracted=True)
    return original(scheduler, batch)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target="sglang.srt.managers.scheduler.Scheduler.update_running_batch",
            kind="around",
            args=("self", "batch"),
            reason="A speculative worker cannot ask for a request to be prefilled "
            "again when its host copy turns out damaged.",
            remove_when="SGLang lets a worker retract a request.",
            body="8cacdb9cc78d",
        ),
        update_running_batch,
    ),
)
