"""One bit of every complement flips in host memory after it was written."""

import torch

from vericache_sglang.memory.complement import Complement


def install():
    """Flip the lowest bit of one element once the last layer is sealed."""
    right = Complement.seal

    def seal(self, layer):
        right(self, layer)
        if layer == self.keys.shape[0] - 1:
            element = self.values[0].view(-1)[7:8]
            bits = element.view(torch.int32)
            bits ^= 1

    Complement.seal = seal
