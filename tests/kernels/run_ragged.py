"""Runs ``ragged_attention`` over a table of cases; prints what it finds.

A process of its own, see ``kernel_device``. Every case is compared with the reference
in float32, so the kernel's rounding is all there is to see.
"""

import sys
import warnings
from dataclasses import dataclass, replace

import torch
from kernel_device import INTERPRETED, moved, report, unsynced

from vericache_kernels.ragged_attention import (
    RaggedRows,
    ragged_attention,
    ragged_attention_ref,
)

SLOTS, WIDTH = 600, 160
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN = float("nan")

MIXED = ((1, 0, 40), (5, 0, 70), (1, 3, 4), (0, 0, 1), (3, 0, 3))
"""Queries, first entry and one past the last of each row."""
LONG = ((1, 0, 150), (9, 7, 120))
BLOCKS = (
    (7, 0, 9),
    (13, 0, 13),
    (0, 0, 0),
    (20, 0, 21),
    (1, 0, 5),
    (4, 0, 4),
    (7, 0, 7),
)
DRAFTS = ((1, 0, 33), (1, 0, 32), (1, 0, 1), (1, 5, 5))


@dataclass(frozen=True)
class Case:
    """One call of the kernel.

    Attributes:
        rows: Above.
        dtype: Of queries and KV.
        dim: D.
        heads: H, KV heads.
        group: Query heads of a KV head.
        splits: Programs a row and KV head.
        most: Most queries of a row; 0: as many as there are.
        spare: Tokens behind those of the rows.
        wide: Queries and KV are views into larger tensors.
        index: Dtype of the places.
    """

    rows: tuple = MIXED
    dtype: torch.dtype = FP32
    dim: int = 32
    heads: int = 2
    group: int = 2
    splits: int = 2
    most: int = 0
    spare: int = 0
    wide: bool = False
    index: torch.dtype = torch.int32


CASES = {
    "mixed": Case(),
    "mixed-one-split": Case(splits=1, spare=3),
    "mixed-bf16": Case(dtype=BF16, index=torch.int64),
    "mixed-fp16": Case(dtype=FP16, spare=2),
    "mixed-wide": Case(wide=True, splits=4),
    "mixed-more-queries-allowed": Case(most=20, heads=1),
    "mixed-fewer-queries-allowed": Case(most=1, heads=1, group=7),
    "many-blocks": Case(BLOCKS, heads=1, group=5, splits=1),
    "many-rows": Case(((1, 0, 3),) * 17 + ((8, 0, 8),), group=5, heads=1, splits=1),
    "long-blocks": Case(LONG, group=4, splits=4),
    "long-blocks-bf16-D128": Case(LONG, BF16, 128, 1, 4),
    "long-fp16-D64-G8": Case(LONG, FP16, 64, 1, 8, splits=8),
    "long-odd-group": Case(LONG, heads=1, group=7, splits=4),
    "drafts": Case(DRAFTS, group=1, splits=16),
    "drafts-fp32-D128": Case(DRAFTS, dim=128, heads=1),
    "drafts-D16": Case(DRAFTS, BF16, 16, splits=4),
}
FIRST = (
    *("mixed", "mixed-bf16", "mixed-fp16", "many-blocks", "long-blocks"),
    *("long-fp16-D64-G8", "drafts-D16"),
)
"""One of each kind: the default tests run these where Triton interprets them."""


@dataclass(frozen=True)
class Batch:
    """What the kernel is given."""

    q: torch.Tensor
    kv: tuple
    rows: RaggedRows
    case: Case

    def launch(self):
        """Run the kernel where the batch is."""
        most = self.case.most or max(n for n, _, _ in self.case.rows)
        return ragged_attention(
            *(self.q, self.kv, self.rows, self.case.dim**-0.5),
            most_queries=most,
            splits=self.case.splits,
        )

    def kernel(self):
        """Run the kernel on the device; return what it gave on the CPU."""
        batch = moved(self)
        with unsynced():
            out = batch.launch()
        assert out.is_contiguous()
        return out.cpu()

    def reference(self):
        floats = tuple(buffer.float() for buffer in self.kv)
        q = self.q.float()
        return ragged_attention_ref(q, floats, self.rows, self.case.dim**-0.5)


def batch_of(case) -> Batch:
    """Make the batch of a case: no two rows share a slot, the other slots are NaN."""
    random = torch.Generator().manual_seed(sum(map(ord, str(case))))
    extra = 8 if case.wide else 0
    shape = (SLOTS, case.heads + bool(extra), case.dim + extra)
    kv = [torch.full(shape, NAN, dtype=case.dtype) for _ in range(2)]
    kv = tuple(buffer[:, : case.heads, : case.dim] for buffer in kv)
    table = torch.zeros(20, WIDTH, dtype=torch.int32)
    where = torch.randperm(20, generator=random)[: len(case.rows)]
    free = torch.randperm(SLOTS - 1, generator=random) + 1
    for index, (_, begin, end) in zip(where.tolist(), case.rows, strict=True):
        slots, free = free[: end - begin], free[end - begin :]
        table[index, begin:end] = slots.int()
        for buffer in kv:
            entries = torch.randn(len(slots), *buffer.shape[1:], generator=random)
            buffer[slots] = entries.to(case.dtype)
    counts, begins, ends = zip(*case.rows, strict=True)
    first = torch.tensor([0, *counts]).cumsum(0).to(case.index)
    tokens, heads = sum(counts) + case.spare, case.heads * case.group
    q = torch.randn(tokens, heads * case.dim + extra * 2, generator=random)
    q = q[:, : heads * case.dim].to(case.dtype)
    q = q if case.wide else q.contiguous()
    begin, end = (torch.tensor(bound).to(case.index) for bound in (begins, ends))
    rows = RaggedRows(table, where.to(case.index), first, begin, end)
    return Batch(q.unflatten(1, (heads, case.dim)), kv, rows, case)


def compare(case) -> float:
    """Return the kernel's largest error over the largest number of the reference."""
    batch = batch_of(case)
    out, expected = batch.kernel(), batch.reference()
    assert out.shape == batch.q.shape
    assert out.dtype == case.dtype
    assert not out[len(out) - case.spare :].any()
    error = (out.double() - expected.double()).abs().max()
    return float(error / expected.double().abs().max())


def alone() -> bool:
    """Say whether every row has to the bit what it has without the others."""
    batch = batch_of(Case(LONG + MIXED, most=9, group=3))
    whole, rows, same = batch.kernel(), batch.rows, []
    for r in range(len(rows.row)):
        tokens = slice(int(rows.first[r]), int(rows.first[r + 1]))
        one = RaggedRows(
            rows.table,
            rows.row[r : r + 1],
            rows.first[r : r + 2] - rows.first[r],
            rows.begin[r : r + 1],
            rows.end[r : r + 1],
        )
        out = replace(batch, q=batch.q[tokens].contiguous(), rows=one).kernel()
        same.append(torch.equal(out, whole[tokens]))
    return all(same)


def unmoved(case, counts) -> bool:
    """Say whether a token's result stays, to the bit, when later ones follow it.

    Args:
        case: One row of queries, as many as ``counts`` ends with.
        counts: Queries at the row's beginning that are asked alone.
    """
    batch, found = batch_of(case), []
    rows, most = batch.rows, counts[-1]
    for n in counts:
        first = torch.tensor([0, n], dtype=torch.int32)
        part = replace(rows, first=first, end=rows.end - most + n)
        found.append(replace(batch, q=batch.q[:n], rows=part).kernel())
    return all(
        torch.equal(short, found[-1][:n])
        for n, short in zip(counts, found, strict=True)
    )


def hidden() -> list:
    """Return which of a row's 5 tokens change where the third of them is not finite.

    By what is not finite, and where: its key, its value.
    """
    found = []
    for bad in (NAN, float("inf")):
        for which in (0, 1):
            batch = batch_of(Case(((1, 0, 30), (5, 0, 40)), heads=1))
            sound = batch.kernel()
            slot = batch.rows.table[int(batch.rows.row[1]), 37]
            batch.kv[which][slot] = bad
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # numpy names what is tried here
                broken = batch.kernel()
            same = (sound == broken).all(-1).all(-1)
            found.append([bad != bad, which, (~same).nonzero().flatten().tolist()])
    return found


def layers() -> list:
    """Return the errors of two layers with ranges of their own, and how they differ."""
    errors = []
    batch = batch_of(Case(((1, 4, 90), (4, 0, 60))))
    begin = torch.stack([batch.rows.begin, batch.rows.begin + 33])
    rows = replace(batch.rows, begin=begin)
    for layer in range(2):
        own = replace(batch, rows=rows.at(layer))
        errors.append(float((own.kernel() - own.reference()).abs().max()))
    first, second = (replace(batch, rows=rows.at(i)).kernel() for i in range(2))
    return [*errors, float((first - second).abs().max())]


if __name__ == "__main__":
    found = {name: compare(CASES[name]) for name in sys.argv[1:] or CASES}
    checks = {"alone": alone, "hidden": hidden, "layers": layers}
    found |= {name: check() for name, check in checks.items()}
    # A length as they are served, where nothing interprets it.
    longest = Case(((33, 2, 150),), BF16, 128, 1, 4, splits=16, most=33)
    short = Case(((9, 2, 120),), most=9, heads=1, splits=4)
    tried = [(short, (1, 2, 5, 9))] if INTERPRETED else [(longest, (1, 2, 8, 32, 33))]
    found["unmoved"] = [unmoved(*each) for each in tried]
    report(found)
