"""Runs ``packed_attention`` over a table of cases; prints its errors.

A process of its own, see ``kernel_device``. For every case the kernel is compared with
``attend_packed``, both over the draft parts of a real codec.
"""

import math
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from kernel_device import INTERPRETED, moved, report

from vericache_kernels.packed_attention import (
    DecodedStep,
    ExactRows,
    KIVIStep,
    KVQuantStep,
    PackedRows,
    RotateKVStep,
    SplitPlanesStep,
    attend_packed,
    packed_attention,
)
from vericache_kernels.run_attention import plan_row
from vericache_sglang.compression.codecs.base import Codec
from vericache_sglang.compression.codecs.kivi import KIVI
from vericache_sglang.compression.codecs.kvquant import KVQuant
from vericache_sglang.compression.codecs.kvquant_tables import KVQuantTables
from vericache_sglang.compression.codecs.rope import Rope
from vericache_sglang.compression.codecs.rotatekv import RotateKV
from vericache_sglang.compression.codecs.rotatekv_tables import RotateKVTables
from vericache_sglang.compression.codecs.split_planes import SplitPlanes
from vericache_sglang.compression.codecs.turboquant import TurboQuant

SLOTS = 700
POSITIONS = 2000
ALIGN = 16
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Tokens of each row's segments, and its exact slots.
RAGGED = (((64, 40), 5), ((), 3), ((7, 33, 1), 20))
SHORT = (((40, 7), 2), ((), 1))
NOTHING_EXACT = (((64,), 0), ((16, 33), 0))
ONE_BLOCK = (((64,), 1),)
GROUPS = (((64, 32), 4), ((), 2), ((32, 32), 40))
SPARSE = (((9,), 2), ((), 0))


@dataclass(frozen=True)
class Case:
    """One call of the kernel.

    Attributes:
        codec: As ``codec_of`` reads it.
        rows: Above.
        dtype: Of queries and KV.
        dim: D.
        heads: H, KV heads.
        group: Query heads of a KV head.
        queries: N.
        splits: Programs a row and KV head.
    """

    codec: tuple
    rows: tuple = RAGGED
    dtype: torch.dtype = FP32
    dim: int = 32
    heads: int = 2
    group: int = 2
    queries: int = 1
    splits: int = 2


CASES = {
    "E3M1-ragged": Case(("split", 3, 1)),
    "E3M1-long-exact-part": Case(("split", 3, 1), (((9,), 270),), heads=1),
    "E3M2": Case(("split", 3, 2), SHORT),
    "E4M3": Case(("split", 4, 3), SHORT),
    "E3M0": Case(("split", 3, 0), SHORT),
    "E5M1-7-bits": Case(("split", 5, 1), SPARSE),
    "E2M0-3-bits": Case(("split", 2, 0), SPARSE),
    "E1M0-2-bits": Case(("split", 1, 0), SPARSE),
    "E3M1-bf16": Case(("split", 3, 1), SHORT, dtype=BF16),
    "E3M1-fp16": Case(("split", 3, 1), SHORT, dtype=FP16),
    "E3M2-nothing-exact": Case(("split", 3, 2), NOTHING_EXACT, splits=4),
    "E3M1-one-block": Case(("split", 3, 1), ONE_BLOCK, splits=1),
    "E3M1-block-16": Case(("split", 3, 1, 16), NOTHING_EXACT, group=1),
    "E3M1-block-96": Case(("split", 3, 1, 96), GROUPS, heads=1, group=5),
    "E3M1-D64": Case(("split", 3, 1), ONE_BLOCK, dim=64),
    "E3M1-D128-G8": Case(("split", 3, 1), ONE_BLOCK, dim=128, heads=1, group=8),
    "E3M1-three-queries": Case(("split", 3, 1), (((40,), 5), ((64,), 3)), queries=3),
    "KIVI-2": Case(("kivi", 2, 32), GROUPS),
    "KIVI-4": Case(("kivi", 4, 32), GROUPS, splits=4),
    "KIVI-3-group-16": Case(("kivi", 3, 16), GROUPS),
    "KIVI-2-bf16": Case(("kivi", 2, 32), GROUPS, dtype=BF16, dim=64),
    "KIVI-4-fp16": Case(("kivi", 4, 32), GROUPS, dtype=FP16),
    "KIVI-4-sixteen-queries": Case(("kivi", 4, 32), (((64,), 20),), queries=16),
    "KIVI-2-three-queries": Case(("kivi", 2, 32), (((32,), 5),), queries=3),
    "KVQuant-2": Case(("kvquant", 2, 0.02), SPARSE),
    "KVQuant-4": Case(("kvquant", 4, 0.05), NOTHING_EXACT),
    "KVQuant-3-no-places": Case(("kvquant", 3, 0.0), ONE_BLOCK),
    "KVQuant-4-bf16-wide": Case(
        ("kvquant", 4, 0.0125), SPARSE, dtype=BF16, dim=128, heads=4, group=1
    ),
    "RotateKV-2": Case(("rotatekv", 2, 32, 2), NOTHING_EXACT),
    "RotateKV-3": Case(("rotatekv", 3, 64, 2), SPARSE, heads=4),
    "RotateKV-4": Case(("rotatekv", 4, 128, 4), SPARSE, heads=4),
    "RotateKV-4-bf16": Case(("rotatekv", 4, 64, 1), ONE_BLOCK, dtype=BF16),
    "decoded": Case(("turboquant", 4), RAGGED, splits=4),
    "decoded-bf16": Case(("turboquant", 3), SPARSE, dtype=BF16, dim=64, heads=4),
    "decoded-three-queries": Case(("turboquant", 2), (((32,), 5),), queries=3),
}
FIRST = (
    *("E3M1-ragged", "E3M1-long-exact-part", "E3M1-bf16", "E5M1-7-bits"),
    *("KIVI-2-three-queries", "KIVI-4-fp16", "KVQuant-2", "RotateKV-3", "decoded"),
)
"""One of each kind: the default tests run these where Triton interprets them."""

SINGLE = {
    "E3M1": ("split", 3, 1),
    "E2M2": ("split", 2, 2),
    "KVQuant": ("kvquant", 3, 0.1),
}
"""Codecs whose values are compared alone; KIVI has no group of one token."""


def rope_of(case):
    """Return the codec's rotation and the kernel's table of it."""
    half = case.dim // 2
    frequencies = 100.0 ** -(torch.arange(half) / half)
    angles = torch.arange(POSITIONS)[:, None] * frequencies
    table = torch.cat([angles.cos(), angles.sin()], dim=1) * 1.25
    return Rope(frequencies, 1.25), table


def codec_of(case, random) -> tuple[Codec, object, dict]:
    """Return the codec, the kernel's record of it and its tables."""
    kind, *numbers = case.codec
    if kind == "split":
        return SplitPlanes(*numbers), SplitPlanesStep(*numbers), {}
    if kind == "kivi":
        bits, group = numbers
        return KIVI(bits, group, window=0), KIVIStep(bits, group), {}
    if kind == "turboquant":
        return TurboQuant(*numbers), DecodedStep(), {}
    rope, table = rope_of(case)
    columns = case.heads * case.dim
    if kind == "kvquant":
        bits, cap = numbers
        low = -1 - torch.rand(1, columns, generator=random)
        high = 1 + torch.rand(1, columns, generator=random)
        books = torch.randn(2, 1, 2**bits, generator=random).sort().values
        tables = KVQuantTables(Path("t"), "t", 0.01, low, high, *books)
        codec = KVQuant(tables, cap, sinks=0).bind(rope)
        flat = [(high + low) / 2, (high - low) / 2, *books]
        extra = {"tables": torch.cat([part[0] for part in flat]), "rope": table}
        places = math.ceil(cap * columns - 1e-9)
        return codec, KVQuantStep(bits, places), extra
    bits, group, rotated = numbers
    order = torch.randperm(columns, generator=random)
    tables = RotateKVTables(Path("t"), "t", rotated, order[None])
    clip = 0.8 if bits == 2 else 1.0
    codec = RotateKV(tables, bits, group, clip).bind(rope)
    extra = {"order": order.argsort().to(torch.int32), "rope": table}
    return codec, RotateKVStep(bits, group, rotated), extra


def tensors_of(part, codec, step):
    """Return what the kernel reads of a draft part, by name."""
    if isinstance(step, DecodedStep):
        return dict(zip(step.fields, codec.decode(part), strict=True))
    return part.tensors


def arena(parts, fields):
    """Lay fields of draft parts end to end; return bytes and offsets [parts, fields].

    Gaps and ends are 0xFF: what must not be read is NaN, or far away.
    """
    pieces, offsets, size = [], [], 0
    for part in parts:
        row = []
        for name in fields:
            content = part[name].contiguous().view(torch.uint8).flatten()
            gap = -len(content) % ALIGN + ALIGN
            row.append(size)
            pieces += [content, torch.full((gap,), 0xFF, dtype=torch.uint8)]
            size += len(content) + gap
        offsets.append(row)
    empty = torch.empty(0, dtype=torch.uint8)
    return torch.cat([empty, *pieces]), torch.tensor(offsets, dtype=torch.int64)


def offsets_from(counts):
    """Return [0, first count, sum of the first two, ...] int32."""
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def floats(pair):
    """Return keys and values in float32."""
    return pair[0].float(), pair[1].float()


@dataclass(frozen=True)
class Batch:
    """What the kernel is given, and the same for the reference.

    Attributes:
        codec: Of the draft parts.
        rows: Draft parts and exact slots of each row.
        arguments: Of ``packed_attention``, in order.
    """

    codec: Codec
    rows: list
    arguments: tuple

    def kernel(self, splits):
        return packed_attention(*moved(self.arguments), splits=splits).cpu()


def batch_of(case) -> Batch:
    """Make the batch of a case: random KV, other tokens' NaN around it."""
    random = torch.Generator().manual_seed(sum(map(ord, str(case))))
    codec, step, extra = codec_of(case, random)

    def normal(*size):
        sizes = torch.randn(size[-1], generator=random).exp()
        numbers = torch.randn(*size, generator=random) * sizes
        numbers[torch.rand(size, generator=random) < 0.05] = 0
        return numbers.to(case.dtype)

    shape = (SLOTS, case.heads, case.dim)
    k_buffer, v_buffer = normal(*shape), normal(*shape)
    k_buffer[0] = v_buffer[0] = float("nan")  # what masked loads must not bring in
    positions, places, rows = [], [], []
    free = torch.randperm(SLOTS - 1, generator=random).add(1).to(torch.int32)
    for segments, exact in case.rows:
        own = []
        for tokens in segments:
            size = (case.heads, tokens)
            where = torch.randint(0, POSITIONS, size, generator=random)
            size = (*size, case.dim)
            draft, _ = codec.encode(normal(*size), normal(*size), positions=where)
            own.append(draft)
            places.append(sum(map(len, positions)) + torch.arange(case.heads) * tokens)
            positions.append(where.to(torch.int32).flatten())
        rows.append((own, free[:exact]))
        free = free[exact:]
    parts = [part for own, _ in rows for part in own]
    half = step.fields.index(next(f for f in step.fields if f.startswith("value")))
    fields = [tensors_of(part, codec, step) for part in parts]
    key_bytes, key_offsets = arena(fields, step.fields[:half])
    value_bytes, value_offsets = arena(fields, step.fields[half:])
    counts = [part.part_shape.tokens for part in parts]
    packed = PackedRows(
        key_bytes,
        value_bytes,
        torch.cat([key_offsets, value_offsets], dim=1),
        torch.tensor(counts, dtype=torch.int32),
        offsets_from([len(own) for own, _ in rows]),
        positions=torch.cat(positions),
        places=torch.stack(places),
        **extra,
    )
    exact = ExactRows(
        k_buffer,
        v_buffer,
        torch.cat([slots for _, slots in rows]),
        offsets_from([len(slots) for _, slots in rows]),
    )
    heads = case.heads * case.group
    q = normal(len(rows), case.queries, heads, case.dim) * 0.5
    return Batch(codec, rows, (q, packed, exact, step, case.dim**-0.5))


def compare(case) -> float:
    """Return the kernel's largest error over the largest number of the reference."""
    batch = batch_of(case)
    q, _, exact, _, scaling = batch.arguments
    out = batch.kernel(case.splits)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert out.isfinite().all()
    worst = 0.0
    for row, (own, slots) in enumerate(batch.rows):
        if not own and not len(slots):
            expected = torch.zeros(q[row].shape)
        else:
            # In float32, so that the kernel's rounding is all there is to see.
            expected = attend_packed(
                q[row].float(),
                [lambda part=part: floats(batch.codec.decode(part)) for part in own],
                *floats((exact.k_buffer, exact.v_buffer)),
                plan_row(slots, case.queries) if len(slots) else None,
                scaling,
            )
        error = (out[row].double() - expected.double()).abs().max()
        worst = max(worst, float(error / expected.double().abs().max().clamp(min=1)))
    return worst


def single(codec, dtype) -> bool:
    """Say whether a lone token's value comes out as the codec decodes it, to the bit.

    Its weight is one, so attention adds no rounding of its own.
    """
    batch = batch_of(Case(codec, (((1,), 0),) * 3, dtype))
    out = batch.kernel(1)
    return all(
        torch.equal(
            out[row, 0].view(2, 2, -1)[:, 0], batch.codec.decode(own[0])[1][:, 0]
        )
        for row, (own, _) in enumerate(batch.rows)
    )


def spread(case, bad) -> list:
    """Return which rows and query heads change when one draft turns bad.

    The first row's first head gets steps of ``bad`` for its keys.
    """
    batch = batch_of(case)
    sound = batch.kernel(case.splits)
    packed, step = batch.arguments[1], batch.arguments[3]
    at = int(packed.offsets[0, step.fields.index("key_step")])
    step_bytes = torch.full((case.dim,), bad, dtype=case.dtype).view(torch.uint8)
    packed.key_bytes[at : at + len(step_bytes)] = step_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy names what is tried here
        broken = batch.kernel(case.splits)
    changed = (sound != broken).any(-1).any(1)
    return changed.nonzero().tolist()


def exact(name, dtype) -> bool:
    """Say whether a lone value is decoded to the bit.

    The interpreter cuts what KVQuant rounds to bfloat16. A GPU multiplies and adds in
    one step: KVQuant's values have a rounding less, and a weight of one may be a last
    place of float32 off.
    """
    if INTERPRETED:
        return name != "KVQuant" or dtype != BF16
    return name != "KVQuant" and dtype != FP32


if __name__ == "__main__":
    found = {name: compare(CASES[name]) for name in sys.argv[1:] or CASES}
    found["spread"] = [
        spread(Case(("kivi", 2, 32), GROUPS), bad) for bad in (math.nan, math.inf)
    ]
    found["single"] = {
        f"{name}-{dtype}": single(codec, dtype)
        for name, codec in SINGLE.items()
        for dtype in (FP32, FP16, BF16)
        if exact(name, dtype)
    }
    report(found)
