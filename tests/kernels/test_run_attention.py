"""Attention over slot runs against a float64 oracle that walks query by query."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_kernels.run_attention import (
    attend_row,
    plan_row,
    run_attention,
    run_slots,
    slot_runs,
)

SLOTS = 6000
TOLERANCE = 2e-6  # of the largest output; float32 rounding of a softmax average


def hand_oracle(q, k_buffer, v_buffer, row, scaling):
    """One query and one head at a time, over exactly the entries it may see."""
    n, heads, dim = q.shape
    group = heads // k_buffer.shape[1]
    out = torch.zeros(n, heads, dim, dtype=torch.float64)
    for i in range(n):
        seen = row[: len(row) - n + i + 1]
        for head in range(heads):
            keys = k_buffer[seen, head // group].double()
            scores = keys @ q[i, head].double() * scaling
            weights = (scores - scores.max()).exp()
            values = v_buffer[seen, head // group].double()
            out[i, head] = weights @ values / weights.sum()
    return out


def buffers(kv_heads=2, dim=16, seed=0):
    random = torch.Generator().manual_seed(seed)
    return (
        torch.randn(SLOTS, kv_heads, dim, generator=random),
        torch.randn(SLOTS, kv_heads, dim, generator=random),
    )


def queries(n, heads=4, dim=16, seed=1):
    return torch.randn(n, heads, dim, generator=torch.Generator().manual_seed(seed))


def error(actual, expected):
    return float((actual.double() - expected).abs().max() / expected.abs().max())


ROWS = {
    "one-run": [(17, 900)],
    "one-entry": [(5, 1)],
    "long-runs-out-of-order": [(3000, 400), (10, 700), (5000, 150)],
    "short-runs": [(100 + 3 * i, 2) for i in range(60)],
    "single-slots-after-a-long-run": [
        *[(20, 600)],
        *[(2000 + 7 * i, 1) for i in range(90)],
    ],
    "pages": [(16 * (300 - i), 16) for i in range(40)],
    "longer-than-a-part": [(1, 4500), (5500, 200)],
}


@pytest.mark.parametrize("runs", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("n", [1, 2, 17, 65])
def test_equals_the_oracle(runs, n):
    row = [slot for start, length in runs for slot in range(start, start + length)]
    n = min(n, len(row))
    k_buffer, v_buffer = buffers()
    q = queries(n)
    out = run_attention(q, k_buffer, v_buffer, runs, 0.25)
    assert out.shape == q.shape
    assert out.is_contiguous()
    assert error(out, hand_oracle(q, k_buffer, v_buffer, row, 0.25)) < TOLERANCE


@pytest.mark.parametrize("n", [1, 2, 33, 160, 161, 300])
@pytest.mark.parametrize("prefix", [0, 1, 130], ids=["prefill", "one", "some"])
def test_every_length_of_the_causal_part(n, prefix):
    k_buffer, v_buffer = buffers()
    q = queries(n)
    out = run_attention(q, k_buffer, v_buffer, [(40, prefix + n)], 0.25)
    row = list(range(40, 40 + prefix + n))
    assert error(out, hand_oracle(q, k_buffer, v_buffer, row, 0.25)) < TOLERANCE


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(1, 1, 8), (8, 1, 64), (6, 2, 32), (4, 4, 128)]
)
@pytest.mark.parametrize("n", [1, 9, 170])
def test_head_groups(heads, kv_heads, dim, n):
    k_buffer, v_buffer = buffers(kv_heads, dim)
    q = queries(n, heads, dim)
    runs = [(300, 250), (7, n + 3)]
    row = [*range(300, 550), *range(7, 10 + n)]
    out = run_attention(q, k_buffer, v_buffer, runs, dim**-0.5)
    assert error(out, hand_oracle(q, k_buffer, v_buffer, row, dim**-0.5)) < TOLERANCE


def test_strided_buffers_are_read_as_they_are():
    wide, other = buffers(kv_heads=6)
    k_buffer, v_buffer = wide[:, 1:3], other[:, ::3]
    q = queries(5)
    out = run_attention(q, k_buffer, v_buffer, [(50, 700)], 0.25)
    row = list(range(50, 750))
    assert error(out, hand_oracle(q, k_buffer, v_buffer, row, 0.25)) < TOLERANCE


@given(data=st.data())
def test_any_row_any_queries(data):
    length = data.draw(st.integers(1, 300))
    row = data.draw(st.permutations(range(length)))
    cut = data.draw(st.integers(0, length))
    row = [slot + 1000 for slot in sorted(row[:cut])] + list(row[cut:])
    n = data.draw(st.integers(1, min(length, 40)))
    k_buffer, v_buffer = buffers(seed=length)
    q = queries(n, seed=cut)
    out = attend_row(q, k_buffer, v_buffer, plan_row(torch.tensor(row), n), 0.25)
    assert error(out, hand_oracle(q, k_buffer, v_buffer, row, 0.25)) < TOLERANCE


@pytest.mark.parametrize("n", [2, 33, 200])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["k", "v", "both"])
def test_what_a_query_may_not_see_does_not_reach_it(n, bad, which):
    k_buffer, v_buffer = buffers()
    q = queries(n)
    row = list(range(60, 400 + n))
    expected = hand_oracle(q, k_buffer, v_buffer, row, 0.25)
    poisoned = [n // 2, n - 1] if n > 2 else [1]
    for entry in poisoned:
        slot = row[len(row) - n + entry]
        if which != "v":
            k_buffer[slot, 0] = bad
        if which != "k":
            v_buffer[slot, 0] = bad
    out = run_attention(q, k_buffer, v_buffer, slot_runs(torch.tensor(row)), 0.25)
    clean = poisoned[0]
    assert error(out[:clean], expected[:clean]) < TOLERANCE
    # Heads 2 and 3 read KV head 1, which is sound; head 0 must not hide its fault.
    assert error(out[:, 2:], expected[:, 2:]) < TOLERANCE
    assert not out[clean:, 0].isfinite().all()


def test_slots_outside_the_row_are_never_read():
    k_buffer, v_buffer = buffers()
    runs = [(200, 300), (1000, 5), (900, 7)]
    expected = run_attention(queries(4), k_buffer, v_buffer, runs, 0.25)
    inside = torch.zeros(SLOTS, dtype=torch.bool)
    inside[run_slots(runs)] = True
    k_buffer[~inside] = v_buffer[~inside] = float("nan")
    assert torch.equal(
        run_attention(queries(4), k_buffer, v_buffer, runs, 0.25), expected
    )


def test_bfloat16_stays_bfloat16():
    k_buffer, v_buffer = (buffer.bfloat16() for buffer in buffers())
    q = queries(3).bfloat16()
    out = run_attention(q, k_buffer, v_buffer, [(10, 500), (900, 3)], 0.25)
    row = [*range(10, 510), *range(900, 903)]
    assert out.dtype == torch.bfloat16
    assert error(out, hand_oracle(q, k_buffer, v_buffer, row, 0.25)) < 2e-2


@given(st.lists(st.integers(0, 40), max_size=60))
def test_slot_runs_are_maximal_and_complete(slots):
    runs = slot_runs(torch.tensor(slots, dtype=torch.int32))
    walked = [slot for start, length in runs for slot in range(start, start + length)]
    assert walked == slots
    assert run_slots(runs).tolist() == slots
    for (start, length), (following, _) in pairwise(runs):
        assert start + length != following, "two runs that are one"


@pytest.mark.parametrize("queries_asked", [0, 11])
def test_queries_that_are_not_in_the_row_are_refused(queries_asked):
    with pytest.raises(ValueError, match="do not fit a row of 10"):
        plan_row(torch.arange(10), queries_asked)


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (torch.zeros(2, 4, 16), "2 rows, the plan 3"),
        (torch.zeros(3, 4, 8), "head dims differ"),
        (torch.zeros(3, 3, 16), "3 heads do not share 2"),
        (torch.zeros(3, 4, 16, dtype=torch.bfloat16), "q is torch.bfloat16"),
        (torch.zeros(3, 4, 16, device="meta"), "runs on the CPU"),
    ],
    ids=["queries", "head-dim", "groups", "dtype", "device"],
)
def test_misfits_are_refused(q, message):
    with pytest.raises(ValueError, match=message):
        attend_row(q, *buffers(), plan_row(torch.arange(20), 3), 0.25)
