"""A model's attention modules on the device, as selectors and codecs know of them."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from known_kv import DIM, HEADS, LAYERS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding.factory import get_rope
from torch import nn

from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.compression.codecs import kvquant_tables, rotatekv_tables
from vericache_sglang.compression.kvzap_weights import (
    AffineLayer,
    Scorer,
    write_weights,
)
from vericache_sglang.runtime.model_services import ModelServices

QUERY_HEADS, WIDTH, LENGTH = 2 * HEADS, 24, 1024


class QueriesOnly(RadixAttention):
    """Attention that computes nothing."""

    def forward(self, q, k, v, forward_batch):
        return q


class Attention(nn.Module):
    """An attention module as SGLang's models have it; queries are its input's."""

    def __init__(self, layer, rotary):
        super().__init__()
        self.attn = QueriesOnly(QUERY_HEADS, DIM, DIM**-0.5, HEADS, layer)
        self.rotary_emb = rotary
        self.o_proj = nn.Linear(QUERY_HEADS * DIM, WIDTH, bias=False, device="cuda")

    def forward(self, positions, hidden_states, batch):
        count = len(hidden_states)
        queries = torch.randn(count, QUERY_HEADS * DIM, device="cuda")
        keys = torch.randn(count, HEADS * DIM, device="cuda")
        return self.attn(queries, keys, keys, batch)


class DeviceModel(nn.Module):
    """Attention modules whose rotary table is on the device."""

    def __init__(self):
        super().__init__()
        rotary = get_rope(DIM, DIM, LENGTH, 10_000, True, None, torch.float32)
        rotary.cos_sin_cache = rotary.cos_sin_cache.to("cuda")
        self.layers = nn.ModuleList([Attention(i, rotary) for i in range(LAYERS)])

    def run(self, batch):
        """Run every layer over a batch's tokens."""
        count = len(batch.positions)
        for layer in self.layers:
            hidden = torch.randn(count, WIDTH, device="cuda")
            layer(batch.positions, hidden_states=hidden, batch=batch)

    def services(self):
        """Return what compressors are told of it."""
        config = SimpleNamespace(
            hidden_size=WIDTH, get_total_num_kv_heads=lambda: HEADS
        )
        runner = SimpleNamespace(model=self, model_config=config, tp_rank=0, tp_size=1)
        made = ModelServices(runner, SimpleNamespace(model_path="a model"))
        made.encode = lambda text: [1, 2, 3]
        return made


@cache
def files(folder):
    """Write what methods are calibrated with; returns their options by name."""
    folder = Path(folder)
    random = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=random)

    columns = HEADS * DIM
    kvzap = folder / "kvzap"
    scorers = [
        Scorer(AffineLayer(drawn(HEADS, WIDTH), drawn(HEADS))) for _ in range(LAYERS)
    ]
    write_weights(kvzap, scorers, {})
    books = [drawn(4).sort().values for _ in range(2)]
    layer = kvquant_tables.LayerTables(
        -1 - drawn(columns).abs(), 1 + drawn(columns).abs(), *books
    )
    kvquant_tables.write_tables(folder / "kvquant", [layer] * LAYERS, 0.01)
    order = torch.randperm(columns, generator=random)
    rotatekv_tables.write_tables(folder / "rotatekv", [order] * LAYERS, HEADS)
    return {
        "kvzap": f"weights={kvzap}",
        "kvzip": "chunk=16",
        "kvquant": f"tables={folder / 'kvquant'},sinks=0",
        "rotatekv": f"tables={folder / 'rotatekv'},group={DIM}",
        "kivi": f"group={DIM},window={DIM}",
        "split-planes": f"exponent_bits=2,mantissa_bits=0,block={DIM}",
    }


def compressor(line, folder, services):
    """Build a compressor of methods' names, with options that fit the tiny shapes."""
    options = files(str(folder))
    parts = [
        f"{name}:{options[name]}" if name in options else name
        for name in line.split("+")
    ]
    return create_compressor("+".join(parts), 0).bind(services)
