"""Sizes and allocates this process's pool of host pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vericache_sglang.config.schema import resolve_host
from vericache_sglang.device.host_limit import available_host_bytes
from vericache_sglang.errors import ConfigError
from vericache_sglang.kv.host_pages import HostPagePool, page_bytes_of
from vericache_sglang.kv.transfers import GIB

if TYPE_CHECKING:
    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.kv.geometry import KVGeometry


def open_page_pool(
    config: VeriCacheConfig, geometry: KVGeometry, ranks: int
) -> HostPagePool:
    """Return the pool, pinned where CUDA is present.

    Args:
        config: Its ``host_gb``, in GiB; 0 takes a share of the free host memory.
        geometry: Shapes of the KV pool.
        ranks: Ranks on this machine, >= 1.

    Raises:
        ConfigError: The machine or the container has less free; page-locking so much
            would end the process.
    """
    free, pinned = available_host_bytes(), torch.cuda.is_available()
    size = int(resolve_host(config, free, ranks) * GIB)
    if pinned and size > free:
        raise ConfigError(
            f"--vericache-host-gb: {size / GIB:.1f} GiB asked for, but the machine, or "
            f"the container's limit, leaves {free / GIB:.1f} GiB"
        )
    return HostPagePool(size, page_bytes_of(geometry), pinned)
