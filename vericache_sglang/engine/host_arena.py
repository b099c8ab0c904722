"""The one piece of host memory of this process, sized and made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import torch

from vericache_sglang.config.schema import resolve_host
from vericache_sglang.memory.arena import Arena
from vericache_sglang.memory.transfers import GIB

if TYPE_CHECKING:
    from vericache_sglang.config.schema import VeriCacheConfig


def open_arena(config: VeriCacheConfig, ranks: int) -> Arena:
    """Return the arena, pinned where CUDA is present.

    Args:
        config: Its ``host_gb``; 0 takes a part of what is free now.
        ranks: Ranks on this machine, >= 1.
    """
    free = psutil.virtual_memory().available
    size = int(resolve_host(config, free, ranks) * GIB)
    return Arena(size, torch.cuda.is_available())
