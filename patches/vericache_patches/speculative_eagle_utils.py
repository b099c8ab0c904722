"""Hook on ``sglang/srt/speculative/eagle_utils.py``: slot allocation on demand."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def eagle_prepare_for_decode(original: Hook, batch: Any) -> None:
    """Skip the allocation of an iteration if all requests have enough slots.

    ``Req.vericache_room`` is the number of slots beyond the committed ones that a
    request may use before the next call; a request without it is not ours.
    """
    rooms = [(req.kv, getattr(req, "vericache_room", None)) for req in batch.reqs]
    penalised = batch.sampling_info.penalizer_orchestrator.is_required
    if penalised or not all(
        room is not None and kv.kv_allocated_len - kv.kv_committed_len >= room
        for kv, room in rooms
    ):
        original(batch)
        return
    for req in batch.reqs:
        req.decode_batch_idx += 1


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target="sglang.srt.speculative.eagle_utils.eagle_prepare_for_decode",
            kind="around",
            args=("batch",),
            reason="It tops every request up to two cycles of slots every iteration; a "
            "request that emits one token at a time needs that once in two cycles, and "
            "a swapped-out one must get none. Only algorithms built in prepare their "
            "own decode batch.",
            remove_when="SGLang lets a spec algorithm prepare its own decode batch.",
            body="81ccdd23988a",
        ),
        eagle_prepare_for_decode,
    ),
)
