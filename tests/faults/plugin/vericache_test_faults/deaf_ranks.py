"""Tensor-parallel ranks plan by what each of them sees; rank 1 sees copies late."""

from torch import distributed

from vericache_sglang.kv.prefetch import Progress
from vericache_sglang.runtime.tp_sync import Agreed, TensorParallelSync


def install():
    """Send nothing; rank 1 takes every second look at its copies away."""
    looks = [0]

    def sync_inputs(self, host_slots, prefetches):
        looks[0] += 1
        if distributed.get_rank() == 1 and looks[0] % 2:
            prefetches = [Progress.TRAVELLING] * len(prefetches)
        return Agreed(host_slots, tuple(prefetches))

    TensorParallelSync.sync_inputs = sync_inputs
