"""Size of the staging buffer in this process."""

from __future__ import annotations

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.runtime_context import get_server_args

from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.config.schema import STAGING_SHARE, resolve_staging
from vericache_sglang.runtime.algorithm import served_config


def staging_slots(pool: int | None = None) -> int:
    """Return the slots to allocate after SGLang's KV pool; 0 if VeriCache is off.

    Args:
        pool: Total KV slots of the device, staging included, if they bound the buffer;
            None if the pool is sized by a flag.
    """
    config = served_config()
    if config is None:
        return 0
    context: int = model_config_of(get_server_args()).context_len
    compressor = create_compressor(config.compressor, config.seed)
    # A codec's tokens are all staged in full for a verification.
    exact = 0.0 if compressor.codec else None
    return resolve_staging(config, context, exact, pool)


def with_staging(slots: int) -> int:
    """Return an upper bound on total slots when ``slots`` are SGLang's own.

    The bound of ``resolve_staging`` on the automatic size, solved for the total and
    rounded down, so that no more is allocated than was reserved.
    """
    return max(0, slots * STAGING_SHARE // (STAGING_SHARE - 1) - 1)
