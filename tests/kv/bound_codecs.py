"""Every codec, bound to a model of these heads and layers."""

import torch

from vericache_sglang.compression.codecs.catalog import create_codec
from vericache_sglang.compression.codecs.kvquant_tables import (
    Samples,
    calibrate_layer,
)
from vericache_sglang.compression.codecs.kvquant_tables import (
    write_tables as write_kvquant,
)
from vericache_sglang.compression.codecs.rope import Rope
from vericache_sglang.compression.codecs.rotatekv_tables import (
    write_tables as write_rotatekv,
)

LAYERS, HEADS, DIM = 3, 2, 32
LINES = [
    "split-planes:exponent_bits=4,mantissa_bits=3,block=16",
    "split-planes:exponent_bits=1,mantissa_bits=0,block=1",
    "kivi:bits=2,group=32,window=32",
    "kvquant:tables={kvquant},cap=0.05",
    "rotatekv:tables={rotatekv},group=32,bits=3,clip=1.0",
    "turboquant:bits=3",
]


def bound_codecs(folder):
    """Return every line's codec, bound, with tables in a folder."""
    rows = torch.randn(200, HEADS * DIM, generator=torch.Generator().manual_seed(0))
    layer = calibrate_layer(*[Samples(rows, torch.ones_like(rows))] * 2, 3)
    write_kvquant(folder / "kvquant", [layer] * LAYERS, 0.01)
    write_rotatekv(folder / "rotatekv", [torch.arange(HEADS * DIM)] * LAYERS, HEADS)
    files = {name: str(folder / name) for name in ("kvquant", "rotatekv")}
    rope = Rope(10_000.0 ** -(torch.arange(0, DIM, 2) / DIM))
    return {
        line: create_codec(line.format(**files)).bind(rope).without_tail()
        for line in LINES
    }
