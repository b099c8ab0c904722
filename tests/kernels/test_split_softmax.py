"""Merging the splits of a softmax: by plain numbers, and the kernel by the reference.

The kernel runs in a process of its own, see ``kernel_device``: this file as a script.
"""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_device import TOLERANCE, moved, report, run, unsynced

from vericache_kernels.split_softmax import merge_splits_ref

NAN, NOTHING = math.nan, -math.inf
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@st.composite
def splits(draw, splits=(1, 2, 4, 16), dims=(1, 4, 16)):
    """Draw splits, some of which saw nothing: their averages are NaN."""
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 3)))
    shape += (draw(st.sampled_from(splits)),)
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    out = torch.randn(*shape, draw(st.sampled_from(dims)), generator=random)
    lse = torch.randn(shape, generator=random) * draw(st.sampled_from([1, 40]))
    nothing = torch.rand(shape, generator=random) < draw(st.sampled_from([0, 0.5, 1]))
    total = draw(st.none() | st.integers(0, shape[0]))
    return (
        out.masked_fill(nothing[..., None], NAN),
        lse.masked_fill(nothing, NOTHING),
        total,
    )


def by_hand(out, lse, total):
    """One head at a time, in float64 and without subtracting the largest exponent."""
    merged = torch.zeros(*out.shape[:2], out.shape[3], dtype=torch.float64)
    for token in range(len(out) if total is None else total):
        for head in range(out.shape[1]):
            masses = [2.0 ** float(each) for each in lse[token, head]]
            for split, mass in enumerate(masses):
                if mass:
                    share = out[token, head, split].double() * (mass / sum(masses))
                    merged[token, head] += share
    return merged


@given(case=splits())
def test_splits_are_weighed_by_their_masses(case):
    out, lse, total = case
    merged = merge_splits_ref(out, lse, torch.float32, total)
    torch.testing.assert_close(merged.double(), by_hand(*case), rtol=0, atol=3e-6)


def test_a_row_in_one_piece_is_what_its_splits_make():
    scores = torch.randn(3, 2, 40, generator=torch.Generator().manual_seed(0))
    values = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    parts = [(scores[..., i::4], values[i::4]) for i in range(4)]
    out = torch.stack([part.softmax(-1) @ seen for part, seen in parts], dim=2)
    lse = torch.stack([part.logsumexp(-1) for part, _ in parts], -1) / math.log(2)
    merged = merge_splits_ref(out, lse, torch.float32)
    torch.testing.assert_close(merged, scores.softmax(-1) @ values)


def test_a_mass_that_is_no_number_spoils_its_head_alone():
    out, lse = torch.ones(1, 2, 2, 3), torch.zeros(1, 2, 2)
    lse[0, 1, 0] = NAN
    merged = merge_splits_ref(out, lse, torch.bfloat16)
    assert merged.dtype == torch.bfloat16
    assert merged[0, 0].tolist() == [1, 1, 1]
    assert merged[0, 1].isnan().all()


def test_the_kernel_equals_the_reference():
    seen = run(__file__)
    for dtype in DTYPES:
        assert seen[str(dtype)] < TOLERANCE[dtype]
    assert seen["counted"] > 5


SEEN = dict.fromkeys(map(str, DTYPES), 0.0) | {"counted": 0}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(case=splits(dims=(16, 32)), dtype=st.sampled_from(DTYPES))
def kernel_equals_reference(case, dtype):
    from vericache_kernels.split_softmax.triton_impl import merge

    out, lse, total = case
    count = None if total is None else torch.tensor([total])
    result = torch.full((*out.shape[:2], out.shape[3]), NAN, dtype=dtype)
    call = moved((out, lse, result, count))
    with unsynced():
        merge(*call)
    expected = merge_splits_ref(out, lse, torch.float32, total)
    error = (call[2].cpu().float() - expected).abs().max()
    assert error.isfinite()
    largest = expected.abs().max().clamp(min=1)
    SEEN[str(dtype)] = max(SEEN[str(dtype)], float(error / largest))
    SEEN["counted"] += total is not None


if __name__ == "__main__":
    kernel_equals_reference()
    report(SEEN)
