"""How large the staging region is in this process."""

from __future__ import annotations

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.runtime_context import get_server_args, get_spec

from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.config.files import active_config, is_disabled
from vericache_sglang.config.schema import VeriCacheConfig, resolve_staging
from vericache_sglang.engine.algorithm import NAME


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
