"""Tensor-parallel ranks plan by what each of them sees; rank 1 sees copies late."""

from torch import distributed

from vericache_sglang.engine.agreement import Agreement, Heard
from vericache_sglang.engine.reloads import Progress


def install():
    """Send nothing; rank 1 takes every second look at its copies away."""
    looks = [0]

    def hear(self, host_slots, reloads):
        looks[0] += 1
        if distributed.get_rank() == 1 and looks[0] % 2:
            reloads = [Progress.TRAVELLING] * len(reloads)
        return Heard(host_slots, tuple(reloads))

    Agreement.hear = hear
