"""How large the staging region is in this process."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.runtime_context import get_parallel, get_server_args, get_spec

from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.config.files import active_config, is_disabled
from vericache_sglang.config.schema import VeriCacheConfig, resolve_staging
from vericache_sglang.engine.algorithm import NAME
from vericache_sglang.errors import ConfigError


def staging_slots() -> int:
    """Return the slots to allocate behind SGLang's KV pool; 0 where VeriCache is off.

    Read once, when the pool is built, in the process that builds it.
    """
    if is_disabled() or (get_spec().speculative_algorithm or "").upper() != NAME:
        return 0
    context: int = model_config_of(get_server_args()).context_len
    config = active_config() or VeriCacheConfig()
    compressor = create_compressor(config.compressor, config.seed)
    # Packed tokens come back whole for a verification.
    return resolve_staging(config, context, 0.0 if compressor.codec else None)


def staging_bytes(configurator: Any, budget: int) -> int:
    """Return the bytes of the staging region on this rank.

    Args:
        configurator: SGLang's ``KVCacheConfigurator``; names heads, layers and dtype.
        budget: Bytes there are for slots of any kind.

    Raises:
        ConfigError: Nothing would be left for SGLang's own slots.
    """
    slots = staging_slots()
    model, parallel = configurator.model_config, get_parallel()
    heads = model.get_num_kv_heads(parallel.attn_tp_size, parallel.attn_dcp_size)
    slot = heads * (model.head_dim + model.v_head_dim)
    slot *= configurator.kv_cache_dtype.itemsize
    needed: int = slots * slot * configurator.layer_info.num_effective_layers
    if needed >= budget:
        raise ConfigError(
            f"--vericache-staging-tokens: a region of {slots} slots takes "
            f"{needed / 2**30:.1f} GiB, {budget / 2**30:.1f} GiB are left for all KV; "
            "set it lower, or raise --mem-fraction-static"
        )
    return needed
