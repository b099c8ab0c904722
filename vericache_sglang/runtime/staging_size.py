"""How large the staging region is in this process."""

from __future__ import annotations

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.runtime_context import get_server_args

from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.config.schema import STAGING_SHARE, resolve_staging
from vericache_sglang.runtime.algorithm import served_config


def staging_slots(pool: int | None = None) -> int:
    """Return the slots to allocate behind SGLang's KV pool; 0 where VeriCache is off.

    Args:
        pool: KV slots of the device, these included, where they bound the buffer; None
            where the pool is sized by flag.
    """
    config = served_config()
    if config is None:
        return 0
    context: int = model_config_of(get_server_args()).context_len
    compressor = create_compressor(config.compressor, config.seed)
    # Packed tokens come back whole for a verification.
    exact = 0.0 if compressor.codec else None
    return resolve_staging(config, context, exact, pool)


def with_staging(slots: int) -> int:
    """Return at most the slots of a device of which ``slots`` are SGLang's own.

    The bound of ``resolve_staging`` on the automatic size, solved for the whole and
    rounded down, so that no more is allocated than was set aside.
    """
    return max(0, slots * STAGING_SHARE // (STAGING_SHARE - 1) - 1)
