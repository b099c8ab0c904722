"""Rank 1 of a tensor-parallel server is late, loses reloads and flips a bit.

Its copies take 20 ms longer, every fifth fails, and every third complement is damaged
in its host memory. Nothing is wrong on the other ranks.
"""

import time
from collections import Counter

import torch
from torch import distributed

from vericache_sglang.errors import TransferError
from vericache_sglang.kv.residual import HostResidual
from vericache_sglang.kv.thread_transfers import ThreadTransfer, ThreadTransfers

LATE_S = 0.02


class Broken:
    """A transfer that fails when it is looked at."""

    seconds = 1e-6
    nbytes = 1

    def done(self):
        """Fail."""
        raise TransferError("injected: rank 1 lost its copy")

    def cancel(self):
        """Nothing runs."""


def install():
    """Break rank 1; which rank this is, is known once the ranks have met."""
    start, done, seal = ThreadTransfers.start, ThreadTransfer.done, HostResidual.seal
    calls = Counter()
    began = {}

    def bad():
        return distributed.is_initialized() and distributed.get_rank() == 1

    def losing(self, residual, lease, drafts):
        calls["start"] += 1
        if bad() and calls["start"] % 5 == 4:
            return Broken()
        transfer = start(self, residual, lease, drafts)
        began[id(transfer)] = time.perf_counter()
        return transfer

    def late(self):
        here = done(self)
        return here and not (
            bad() and time.perf_counter() < began.get(id(self), 0.0) + LATE_S
        )

    def flipping(self, layer):
        seal(self, layer)
        calls["seal"] += layer == 0
        if bad() and layer == self.layers - 1 and calls["seal"] % 3 == 2:
            part = next(part for part in self._parts(0) if part.numel() > 7)
            element = part.view(-1).view(torch.uint8)[7:8]
            element ^= 1

    ThreadTransfers.start = losing
    ThreadTransfer.done = late
    HostResidual.seal = flipping
