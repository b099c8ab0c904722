"""Hooks on ``sglang/srt/managers/schedule_batch.py``: requests that are retracted."""

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


def build_rebootstrap_payload(original: Hook, req: Any) -> dict[str, Any]:
    """Ask by another id: the prefill server may not have ended the first request."""
    return {**original(req), "rid": f"{req.rid}-{req.bootstrap_room}"}


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
    (
        Patch(
            target="sglang.srt.managers.schedule_batch.Req.build_rebootstrap_payload",
            kind="around",
            args=("self",),
            reason="An id is refused while a request has it, and SGLang asks only "
            "between a pause and new weights.",
            remove_when="SGLang asks for the KV of retracted requests again.",
        ),
        build_rebootstrap_payload,
    ),
)
