"""Hook on ``sglang/srt/managers/schedule_batch.py``: no copies of retracted rows."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def release_req(original: Hook, **of: Any) -> bool:
    """Keep no copy of a retracted request's row (disaggregation_decode: ``add``)."""
    from vericache_sglang.runtime.algorithm import served_config

    if served_config() is not None:
        of["offload_kv"] = False
    released: bool = original(**of)
    return released


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target="sglang.srt.managers.schedule_batch.release_req",
            kind="around",
            args=(
                *("req", "remaing_req_count", "req_to_token_pool"),
                *("token_to_kv_pool_allocator", "tree_cache", "hisparse_coordinator"),
                "offload_kv",
            ),
            reason="A decode server of a prefill/decode pair copies a retracted row by "
            "token position, which a compressed row does not list.",
            remove_when="SGLang asks the algorithm which requests start again.",
            body="a0f85cccb76b",
        ),
        release_req,
    ),
)
