"""Hook on ``sglang/srt/mem_cache/memory_pool.py``: a request's row goes back."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def free(original: Hook, pool: Any, req: Any) -> None:
    """Free the row, then tell whoever asked the pool to be told."""
    original(pool, req)
    on_free = getattr(pool, "vericache_on_free", None)
    if on_free is not None:
        on_free(req)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target="sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free",
            kind="around",
            args=("self", "req"),
            reason="Retraction and abort release a row without telling the worker; "
            "prepare_for_kv_cache_release is called for finished requests only.",
            remove_when="SGLang calls a worker hook from release_kv_cache.",
        ),
        free,
    ),
)
