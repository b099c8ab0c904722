"""Which codecs a kernel decodes, with which numbers and tables; others torch does."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")

from vericache_kernels.packed_attention import (
    DecodedStep,
    KIVIStep,
    KVQuantStep,
    RotateKVStep,
    SplitPlanesStep,
)
from vericache_sglang.attention import codec_steps
from vericache_sglang.attention.codec_steps import codec_step, rope_table
from vericache_sglang.compression.codecs.kivi import KIVI
from vericache_sglang.compression.codecs.kvquant import KVQuant
from vericache_sglang.compression.codecs.kvquant_tables import KVQuantTables
from vericache_sglang.compression.codecs.rope import Rope
from vericache_sglang.compression.codecs.rotatekv import RotateKV
from vericache_sglang.compression.codecs.rotatekv_tables import RotateKVTables
from vericache_sglang.compression.codecs.split_planes import SplitPlanes
from vericache_sglang.compression.codecs.turboquant import TurboQuant
from vericache_sglang.kv.geometry import KVGeometry

pytestmark = pytest.mark.sglang

LAYERS, HEADS, DIM, POSITIONS = 2, 4, 16, 40
COLUMNS = HEADS * DIM
GEOMETRY = KVGeometry(
    layers=LAYERS,
    kv_heads=HEADS,
    head_dim=DIM,
    v_head_dim=DIM,
    element_bytes=4,
    page_size=1,
)
ROPE = Rope(100.0 ** -(torch.arange(DIM // 2) / DIM), 1.25)
CPU = torch.device("cpu")


def kvquant(**more):
    books = torch.randn(2, LAYERS, 8).sort().values
    low = -torch.rand(LAYERS, COLUMNS)
    return KVQuant(KVQuantTables(Path("t"), "t", 0.01, low, 1 - low, *books), **more)


def rotatekv(heads=HEADS, **more):
    order = torch.stack([torch.randperm(COLUMNS) for _ in range(LAYERS)])
    return RotateKV(RotateKVTables(Path("t"), "t", heads, order), group=32, **more)


def turned_in_pairs(keys, positions, inverse=False):
    """Turn neighbours together, as GPT-J does."""
    order = torch.arange(DIM).view(2, -1).t().flatten()
    turned = ROPE(keys[..., order.argsort()], positions)
    return turned[..., order]


@pytest.mark.parametrize(
    ("codec", "step"),
    [
        (KIVI(2, 16, 0), KIVIStep(2, 16)),
        (SplitPlanes(2, 1, 32), SplitPlanesStep(2, 1, 32)),
        (kvquant(cap=0.05, rope=ROPE), KVQuantStep(3, 4)),
        (rotatekv(bits=3, rope=ROPE), RotateKVStep(3, 32, HEADS)),
        # What no kernel does, for one reason or another.
        (TurboQuant(4), DecodedStep()),
        (KIVI(2, 8, 0), DecodedStep()),
        (SplitPlanes(2, 1, 24), DecodedStep()),
        (kvquant(), DecodedStep()),
        (kvquant(rope=turned_in_pairs), DecodedStep()),
        (kvquant(rope=Rope(ROPE.frequencies[:4])), DecodedStep()),
        (rotatekv(heads=3, rope=ROPE), DecodedStep()),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_codec_has_the_step_of_its_parameters_or_none(codec, step):
    assert codec_step(codec, GEOMETRY, POSITIONS, CPU).step == step


def test_tables_are_those_of_every_layer():
    codec = kvquant(rope=ROPE)
    made = codec_step(codec, GEOMETRY, POSITIONS, CPU)
    for layer in range(LAYERS):
        scale, tables = codec.tables.key_scale(layer), codec.tables
        books = tables.key_books[layer], tables.value_books[layer]
        assert torch.equal(made.tables[layer], torch.cat([*scale, *books]))
    codec = rotatekv(rope=ROPE)
    made = codec_step(codec, GEOMETRY, POSITIONS, CPU)
    for found, order in zip(made.order.long(), codec.tables.order, strict=True):
        assert torch.equal(found[order], torch.arange(COLUMNS))


@pytest.mark.parametrize("at_once", [7, 100])
def test_the_rotation_is_read_off_what_it_turns(monkeypatch, at_once):
    monkeypatch.setattr(codec_steps, "AT_ONCE", at_once)
    table = rope_table(ROPE, POSITIONS, DIM, CPU)
    keys = torch.randn(1, POSITIONS, DIM)
    left, right = keys.chunk(2, dim=-1)
    cosine, sine = table.chunk(2, dim=-1)
    turned = [left * cosine - right * sine, right * cosine + left * sine]
    wanted = ROPE(keys, torch.arange(POSITIONS))
    assert torch.allclose(torch.cat(turned, dim=-1), wanted, atol=1e-6)
