"""Hook on ``kv_cache_configurator.py``: a block table with VeriCache's rows."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def build_req_pool(original: Hook, configurator: Any, **sizes: int) -> Any:
    """Build our pool of block-table rows where VeriCache is on."""
    from sglang.srt.runtime_context import get_exec

    from vericache_sglang.runtime.block_table import block_table_pool

    context: int = configurator.model_config.context_len
    return block_table_pool(
        sizes["max_num_reqs"],
        context + sizes["extra_max_context_len"],
        arriving=sizes.get("pre_alloc_size", 0),
        device=configurator.device,
        enable_memory_saver=get_exec().features.enable_memory_saver,
    ) or original(configurator, **sizes)


CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=f"{CONFIGURATOR}._build_default_req_pool",
            kind="around",
            args=("self", "max_num_reqs", "extra_max_context_len"),
            reason="No platform may choose the pool of block-table rows, and SGLang "
            "builds on its table before a worker could enlarge it. Its free() is also "
            "all that is called when a request is retracted or aborted.",
            remove_when="SGLang takes the pool class from a registry.",
            body="f2c65ecda4df",
        ),
        build_req_pool,
    ),
    (
        Patch(
            target=f"{CONFIGURATOR}._build_decode_req_pool",
            kind="around",
            args=("self", "max_num_reqs", "extra_max_context_len", "pre_alloc_size"),
            reason="The same of a decode server of a prefill/decode pair, whose pool "
            "has further rows for requests whose KV is arriving.",
            remove_when="SGLang takes the pool class from a registry.",
            body="10112f388e7c",
        ),
        build_req_pool,
    ),
)
