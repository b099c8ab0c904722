"""Splitting and joining by an oracle of plain loops; the kernel by the reference.

The kernel runs in a process of its own, see ``kernel_device``: this file as a script.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_device import moved, report, run, unsynced

from vericache_kernels.split_segment import (
    Cut,
    bytes_moved,
    join_segment,
    split_segment,
)
from vericache_kernels.split_segment.ref import as_integers, join_entries, split_entries
from vericache_sglang.compression.budget import residual_indices
from vericache_sglang.kv.split_layers import join_layer, pick

SLOTS = 200
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e5m2,
]


@dataclass(frozen=True, eq=False)
class Case:
    """One layer before a split, and where its kept entries go.

    Attributes:
        pool: Keys and values, bits of any kind, NaN payloads among them.
        cut: Of a prompt at scattered slots.
        target: Slots for what is kept; some of them the prompt's own if ``shared``.
        shared: Above.
    """

    pool: tuple
    cut: Cut
    target: torch.Tensor
    shared: bool

    def pools(self):
        """Return the same pool twice; strides stay."""
        return moved(self.pool, "cpu"), self.pool

    def block(self):
        rest = self.cut.rest.shape[1]
        heads = self.cut.rest.shape[0]
        keys, values = (
            torch.zeros(rest, heads, side.shape[2], dtype=side.dtype)
            for side in self.pool
        )
        return keys, values


def any_bits(shape, dtype, random, gap):
    """Return random bytes as ``dtype``; with a gap every head has a neighbour."""
    slots, heads, dim = shape
    size = (slots, heads * (1 + gap), dim * dtype.itemsize)
    content = torch.randint(0, 256, size, generator=random, dtype=torch.uint8)
    return content.view(dtype)[:, :: 1 + gap]


@st.composite
def cases(draw, shared=None):
    seed = draw(st.integers(0, 2**31))
    random = torch.Generator().manual_seed(seed)
    dtype = draw(st.sampled_from(DTYPES))
    heads = draw(st.integers(1, 3))
    gap = draw(st.integers(0, 1))
    dims = draw(st.sampled_from([(8, 8), (16, 16), (24, 8), (1, 3), (64, 64)]))
    pool = tuple(any_bits((SLOTS, heads, dim), dtype, random, gap) for dim in dims)
    tokens = draw(st.integers(0, 90))
    kept = draw(st.integers(0, tokens))
    order = torch.stack([torch.randperm(tokens, generator=random)] * heads)
    for head in range(heads):
        order[head] = torch.randperm(tokens, generator=random)
    index = draw(st.sampled_from([torch.int32, torch.int64]))
    places = torch.randperm(SLOTS, generator=random)
    if shared is None:
        shared = draw(st.booleans())
    others = places[:tokens] if shared else places[tokens:]
    target = others[torch.randperm(len(others), generator=random)][:kept]
    halves = (order[:, :kept].to(index), order[:, kept:].to(index))
    cut = Cut(places[:tokens].clone(), *(half.contiguous() for half in halves))
    return Case(pool, cut, target.clone(), shared)


def whole(pool):
    """Return the pools with what lies between their heads."""
    return [side if side._base is None else side._base for side in pool]


def same_bits(one, other):
    return all(
        torch.equal(as_integers(a), as_integers(b))
        for a, b in zip(one, other, strict=True)
    )


def hand_oracle(case):
    """Entry by entry: what each slot of the pool, and the block, hold after a split."""
    cut, found = case.cut, []
    for side, part in zip(case.pool, case.block(), strict=True):
        before, pool = as_integers(side).tolist(), as_integers(side).tolist()
        block = as_integers(part).tolist()
        for head in range(cut.kept.shape[0]):
            for i, token in enumerate(cut.kept[head].tolist()):
                pool[int(case.target[i])][head] = before[int(cut.slots[token])][head]
            for i, token in enumerate(cut.rest[head].tolist()):
                block[i][head] = before[int(cut.slots[token])][head]
        found.append((pool, block))
    return found


@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_a_split_puts_every_entry_where_the_oracle_does(case):
    expected = hand_oracle(case)
    block = case.block()
    split_segment(case.pool, case.cut, case.target, block, in_place=case.shared)
    for side, part, (pool, rest) in zip(case.pool, block, expected, strict=True):
        assert as_integers(side).tolist() == pool
        assert as_integers(part).tolist() == rest


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_joining_brings_every_bit_back_and_touches_nothing_else(case):
    before, pool = case.pools()
    block = case.block()
    split_segment(pool, case.cut, case.target, block, in_place=case.shared)
    join_segment(pool, case.cut, case.target, block, in_place=case.shared)
    for side, old in zip(map(as_integers, pool), map(as_integers, before), strict=True):
        assert torch.equal(side[case.cut.slots], old[case.cut.slots])
        touched = torch.zeros(SLOTS, dtype=torch.bool)
        touched[case.cut.slots] = touched[case.target] = True
        assert torch.equal(side[~touched], old[~touched])


@settings(max_examples=40, deadline=None)
@given(case=cases(shared=False))
def test_the_engine_splits_and_joins_alike(case):
    cut = Cut(case.cut.slots, case.cut.kept.sort().values, case.cut.rest.sort().values)
    entries = [side[cut.slots] for side in case.pool]
    block = case.block()
    split_segment(case.pool, cut, case.target, block)
    kept = [pick(side, cut.kept.long()) for side in entries]
    assert same_bits([side[case.target] for side in case.pool], kept)
    rest = residual_indices(cut.kept.long(), len(cut.slots))
    assert same_bits(block, [pick(side, rest) for side in entries])
    joined = [
        join_layer(side, cut.kept.long(), part)
        for side, part in zip(kept, block, strict=True)
    ]
    join_segment(case.pool, cut, case.target, block)
    assert same_bits([side[cut.slots] for side in case.pool], joined)


def small(kept=2, rest=3, heads=2, dim=8, dtype=torch.bfloat16):
    """Return a call's arguments: a prompt at slots 0 and on, its target behind it."""
    pool = tuple(torch.zeros(20, heads, dim, dtype=dtype) for _ in range(2))
    order = torch.arange(kept + rest).expand(heads, -1)
    halves = (order[:, :kept].contiguous(), order[:, kept:].contiguous())
    block = tuple(torch.zeros(rest, heads, dim, dtype=dtype) for _ in range(2))
    cut = Cut(torch.arange(kept + rest), *halves)
    return pool, cut, torch.arange(10, 10 + kept), block


def test_bytes_moved_are_those_of_entries_and_indices():
    pool, cut, _, _ = small()
    # 2 heads * 5 tokens, keys and values of 8 numbers of 2 bytes, read and written;
    # 10 tokens named and 7 slots, 8 bytes each.
    assert bytes_moved(pool, cut) == 10 * 32 * 2 + 80 + 56


@pytest.mark.parametrize("move", [split_segment, join_segment])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.arange(3)}, r"2 kept entries, slots for \(3,\)"),
        ({"block": small(rest=4)[3]}, r"block's keys must be \(3, 2, 8\)"),
        ({"block": small(dim=16)[3]}, r"block's keys must be \(3, 2, 8\)"),
        ({"block": small(dtype=torch.float16)[3]}, "keys: the block is torch.float16"),
        ({"pool": small(heads=3)[0]}, r"pool's keys must be \[slots, 2, D\]"),
        ({"pool": (small()[0][0], small()[0][1].mT)}, "pool's values must be"),
        ({"target": torch.arange(2, device="meta")}, "on several devices"),
        (
            {"cut": Cut(torch.arange(5), small()[1].kept, small()[1].rest.int())},
            r"cut.rest \(2, 3\) torch.int32",
        ),
    ],
    ids=["target", "rest", "dim", "dtype", "heads", "values", "device", "indices"],
)
def test_misfits_are_refused(move, change, message):
    names = ("pool", "cut", "target", "block")
    arguments = dict(zip(names, small(), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        move(*arguments.values())


def test_an_element_no_integer_has_the_size_of_is_refused():
    with pytest.raises(ValueError, match=r"complex128 has 16 bytes"):
        as_integers(torch.zeros(1, dtype=torch.complex128))


def test_the_kernel_equals_the_reference():
    seen = run(__file__)
    assert seen["shared"] >= 5
    assert seen["apart"] >= 5


SEEN = {"shared": 0, "apart": 0}


@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=cases())
def kernel_equals_reference(case):
    from vericache_kernels.split_segment.triton_impl import launch_join, launch_split

    expected, wanted = moved(case.pool, "cpu"), case.block()
    call = moved((case.pool, case.cut, case.target, case.block()))
    pool, _, _, block = call
    for launch, reference in (
        (launch_split, split_entries),
        (launch_join, join_entries),
    ):
        with unsynced():
            launch(*call, in_place=case.shared)
        reference(expected, case.cut, case.target, wanted)
        assert same_bits(moved(whole(pool), "cpu"), whole(expected))
        assert same_bits(moved(block, "cpu"), wanted)
    SEEN["shared" if case.shared else "apart"] += 1


if __name__ == "__main__":
    kernel_equals_reference()
    report(SEEN)
