"""Hook on ``sglang/srt/managers/scheduler.py``: requests that lost their KV."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def update_running_batch(original: Hook, scheduler: Any, batch: Any) -> Any:
    """Send requests whose KV was lost back to prefill, as a retraction does."""
    worker = scheduler.draft_worker
    if getattr(worker, "forgets_all", False) and scheduler.chunked_req is None:
        _forget_all(scheduler, batch, worker)
    lost = [
        i
        for i, req in enumerate(batch.reqs)
        if getattr(req, "vericache_lost", False) and not req.finished()
    ]
    if lost:
        back = [batch.reqs[i] for i in lost]
        for i in lost:
            batch.release_req(i, len(batch.reqs) - len(lost))
        batch.filter_batch(
            keep_indices=[i for i in range(len(batch.reqs)) if i not in lost]
        )
        for req in back:
            req.vericache_lost = False
            scheduler._add_request_to_queue(req, is_retracted=True)
    return original(scheduler, batch)


def _forget_all(scheduler: Any, batch: Any, worker: Any) -> None:
    """Take the KV of every request at once, with all that is cached and booked.

    Nothing of it is freed piece by piece: what is booked is in doubt.
    """
    back = [req for req in batch.reqs if not req.finished()]
    batch.filter_batch(keep_indices=[])
    for req in back:
        scheduler.req_to_token_pool.free(req)
        req.kv.mark_kv_released()
        req.reset_for_retract()
        req.vericache_lost = False
    worker.forget_all()
    scheduler.tree_cache.reset()
    scheduler.req_to_token_pool.clear()
    scheduler.token_to_kv_pool_allocator.clear()
    for req in back:
        if req.to_finish is None:
            scheduler._add_request_to_queue(req, is_retracted=True)
        else:
            _answer_with(scheduler, req)


def _answer_with(scheduler: Any, req: Any) -> None:
    """Send the client of a request that is not running why it ends."""
    from sglang.srt.managers.scheduler import _make_abort_req

    told = _make_abort_req(req, finished_reason=req.to_finish.to_json())
    scheduler.ipc_channels.send_to_tokenizer.send_output(told, req)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target="sglang.srt.managers.scheduler.Scheduler.update_running_batch",
            kind="around",
            args=("self", "batch"),
            reason="A speculative worker cannot ask for a request to be prefilled "
            "again when its host copy turns out damaged.",
            remove_when="SGLang lets a worker retract a request.",
        ),
        update_running_batch,
    ),
)
