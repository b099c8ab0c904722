"""A complement's last layers are damaged while a verification over it has started.

Once for every complement; the bytes are whole when they are asked for again. Whether
waiting pays is not asked, so verifications start early however fast the machine is.
"""

from contextlib import contextmanager

import torch

from vericache_sglang.engine import reloads
from vericache_sglang.engine.layer_gate import LayerGate
from vericache_sglang.memory.complement import RawComplement


def install():
    """Flip a bit of the layer that is checked next behind a closed gate."""
    over, verify = LayerGate.over, RawComplement.verify
    started, seen = [], set()

    @contextmanager
    def watched(self, pool):
        if not seen.issuperset(self.keys):
            started.append(self)
            seen.update(self.keys)
        with over(self, pool):
            yield
        started.clear()  # its last layers were here already: another time

    def damaged(self, layer):
        if not started or layer != self.layers - 1:
            return verify(self, layer)
        started.clear()
        byte = self.values[layer].view(-1).view(torch.uint8)[7:8]
        byte ^= 1
        try:
            return verify(self, layer)
        finally:
            byte ^= 1

    reloads.worth_starting = lambda *asked: True
    LayerGate.over = watched
    RawComplement.verify = damaged
