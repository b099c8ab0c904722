"""Entries by head: by plain loops, by the engine's splitting, the kernel by all bits.

The kernel runs in a process of its own, see ``kernel_device``: this file as a script.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_device import moved, report, run, unsynced

from vericache_kernels.head_entries import bytes_moved, pick_entries, put_entries
from vericache_kernels.head_entries.ref import as_integers, pick_rows, put_rows
from vericache_sglang.kv.split_layers import pick, put

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2]


@st.composite
def cases(draw):
    """Draw a layer of any bits, NaN payloads among them, an index and maybe slots."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(DTYPES))
    heads, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 60))
    gap, room = draw(st.integers(0, 1)), draw(st.integers(0, 20))
    dims = draw(st.sampled_from([(8, 8), (24, 8), (1, 3), (64, 64), (16,)]))
    layer = []
    for dim in dims:
        size = (tokens + room, heads * (1 + gap), dim * dtype.itemsize)
        content = torch.randint(0, 256, size, generator=random, dtype=torch.uint8)
        layer.append(content.view(dtype)[:, :: 1 + gap] if gap else content.view(dtype))
    count = draw(st.integers(0, tokens))
    order = [torch.randperm(tokens, generator=random)[:count] for _ in range(heads)]
    index = torch.stack(order).to(draw(st.sampled_from([torch.int32, torch.int64])))
    slots = None
    if draw(st.booleans()):
        slots = torch.randperm(tokens + room, generator=random)[:tokens].clone()
    return layer, index, slots


def bits(sides):
    return [as_integers(side).tolist() for side in sides]


def by_hand(layer, index, slots):
    """Return [n][H][D] bits of each side, and where each row lies in the layer."""
    heads, count = index.shape
    named = [[int(index[h, i]) for h in range(heads)] for i in range(count)]
    if slots is not None:
        named = [[int(slots[token]) for token in row] for row in named]
    rows = [
        [[side[entry][h] for h, entry in enumerate(row)] for row in named]
        for side in bits(layer)
    ]
    return rows, named


@given(case=cases())
def test_entries_are_those_the_index_names(case):
    rows, _ = by_hand(*case)
    picked = pick_entries(*case)
    assert bits(picked) == rows
    assert all(side.is_contiguous() for side in picked)
    assert [side.dtype for side in picked] == [side.dtype for side in case[0]]


@given(case=cases())
def test_putting_brings_them_back_and_touches_nothing_else(case):
    layer, index, slots = case
    before, (_, named) = bits(layer), by_hand(*case)
    picked = pick_entries(*case)
    other = [side ^ 85 for side in map(as_integers, picked)]
    changed = [side.view(own.dtype) for side, own in zip(other, layer, strict=True)]
    put_entries(layer, index, changed, slots)
    for side, old, rows in zip(bits(layer), before, other, strict=True):
        for i, row in enumerate(named):
            for head, entry in enumerate(row):
                assert side[entry][head] == rows[i, head].tolist()
                side[entry][head] = old[entry][head]
        assert side == old
    put_entries(layer, index, picked, slots)
    assert bits(layer) == before


@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_the_engine_picks_and_puts_the_same(case):
    layer, index, _ = case
    for side, rows in zip(layer, pick_entries(layer, index), strict=True):
        assert torch.equal(as_integers(rows), as_integers(pick(side, index.long())))
        blank = torch.zeros_like(as_integers(side)).view(side.dtype)
        expected = blank.clone()
        put(expected, index.long(), rows)
        put_entries([blank], index.t().clone().t(), [rows.mT.clone().mT])
        assert torch.equal(as_integers(blank), as_integers(expected))


def test_bytes_moved_are_those_of_entries_and_indices():
    layer = [torch.zeros(9, 2, 8).half(), torch.zeros(9, 2, 4).half()]
    index = torch.zeros(2, 5).int()
    # 10 entries of 12 numbers of 2 bytes, both ways; 10 tokens named; 9 slots.
    assert bytes_moved(layer, index) == 10 * 24 * 2 + 40
    assert bytes_moved(layer, index, torch.arange(9)) == 10 * 24 * 2 + 40 + 72


SIDE, INDEX = torch.zeros(9, 2, 8), torch.zeros(2, 3).int()


@pytest.mark.parametrize(
    ("layer", "index", "slots", "message"),
    [
        ([], INDEX, None, "one or two sides, got 0"),
        ([SIDE] * 3, INDEX, None, "one or two sides, got 3"),
        ([SIDE], INDEX[0], None, r"index must be \[H, n\]"),
        ([SIDE], INDEX.float(), None, "index must be .* torch.float32"),
        ([SIDE], torch.zeros(3, 3).int(), None, r"a side must be \[T, 3, D\]"),
        ([SIDE, SIDE.mT], INDEX, None, r"a side must be \[T, 2, D\], contiguous"),
        ([SIDE], INDEX, torch.arange(9, device="meta"), "on several devices"),
    ],
    ids=["none", "three", "flat", "dtype", "heads", "side", "device"],
)
def test_misfits_are_refused(layer, index, slots, message):
    with pytest.raises(ValueError, match=message):
        pick_entries(layer, index, slots)
    with pytest.raises(ValueError, match=message):
        put_entries(layer, index, [torch.zeros(3, 2, 8) for _ in layer], slots)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "1 sides, rows of 0"),
        ([torch.zeros(4, 2, 8)], r"rows must be \(3, 2, 8\)"),
        ([torch.zeros(3, 2, 8).half()], "rows are torch.float16"),
    ],
    ids=["none", "count", "dtype"],
)
def test_rows_that_do_not_fit_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        put_entries([SIDE], INDEX, rows)


def test_the_kernel_equals_the_reference():
    seen = run(__file__)
    assert min(seen.values()) >= 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_kernel_reads_page_locked_memory_over_the_link():
    layer = [torch.randn(9, 2, 8).pin_memory(), torch.randn(9, 2, 4).pin_memory()]
    index, slots = torch.tensor([[0, 2, 3], [1, 2, 4]]), torch.tensor([8, 1, 0, 5, 3])
    found = pick_entries(layer, index.cuda(), slots.cuda())
    expected = pick_rows(layer, index, slots)
    assert bits(side.cpu() for side in found) == bits(expected)


SEEN = {"one": 0, "two": 0, "slots": 0, "strided": 0}


@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=cases())
def kernel_equals_reference(case):
    from vericache_kernels.head_entries.triton_impl import launch

    layer, index, slots = moved(case)
    expected = pick_rows(*case)
    rows = [torch.empty_like(side, device=index.device) for side in expected]
    with unsynced():
        launch(layer, index, rows, slots, put=False)
    assert bits(moved(rows, "cpu")) == bits(expected)
    for side in (*rows, *expected):
        as_integers(side).bitwise_xor_(85)
    with unsynced():
        launch(layer, index, rows, slots, put=True)
    put_rows(case[0], case[1], expected, case[2])
    assert bits(moved(layer, "cpu")) == bits(case[0])
    SEEN["one" if len(layer) == 1 else "two"] += 1
    SEEN["slots"] += slots is not None
    SEEN["strided"] += not layer[0].is_contiguous()


if __name__ == "__main__":
    kernel_equals_reference()
    report(SEEN)
