"""One bit of every complement flips in host memory after it was written."""

import torch

from vericache_sglang.kv.residual import HostResidual


def install():
    """Flip the lowest bit of one byte of a part once the last layer is sealed."""
    right = HostResidual.seal

    def seal(self, layer):
        right(self, layer)
        if layer == self.layers - 1:
            part = next(part for part in self._parts(0) if part.numel() > 7)
            element = part.view(-1).view(torch.uint8)[7:8]
            element ^= 1

    HostResidual.seal = seal
