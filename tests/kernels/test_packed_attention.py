"""Attention over packed codes: the reference by an oracle, the kernel by the reference.

The oracle is a dense softmax in float64 over ``codec.decode``. The kernel runs in a
process of its own, see ``run_packed.py``.
"""

import weakref

import pytest
import run_packed
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_device import CUT_TOLERANCE, INTERPRETED, TOLERANCE, asked, cases, run

from vericache_kernels.packed_attention import (
    DecodedStep,
    ExactRows,
    KIVIStep,
    PackedRows,
    RotateKVStep,
    SplitPlanesStep,
    attend_packed,
    packed_attention,
)
from vericache_kernels.run_attention import attend_row, plan_row
from vericache_sglang.compression.codecs.kivi import KIVI
from vericache_sglang.compression.codecs.split_planes import SplitPlanes
from vericache_sglang.compression.codecs.turboquant import TurboQuant

SLOTS, H, D = 900, 2, 16
CLOSE = 3e-6  # of the largest output; float32 rounding of a softmax average
CODECS = [SplitPlanes(3, 1), KIVI(2, 16, 0), KIVI(4, 16, 16), TurboQuant(4)]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def buffers():
    return normal(SLOTS, H, D, seed=1), normal(SLOTS, H, D, seed=2)


def coded(codec, tokens, seed):
    draft, _ = codec.encode(normal(H, tokens, D, seed=seed), normal(H, tokens, D))
    return draft


def segments_of(decoded):
    return [lambda pair=pair: pair for pair in decoded]


def oracle(q, decoded, k_buffer, v_buffer, row, scaling):
    """One query and one head at a time, all it sees in one softmax, float64."""
    n, heads, _ = q.shape
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(n):
        seen = row[: max(0, len(row) - n + i + 1)]
        for head in range(heads):
            own = head // (heads // H)
            keys = torch.cat([*(k[own] for k, _ in decoded), k_buffer[seen, own]])
            values = torch.cat([*(v[own] for _, v in decoded), v_buffer[seen, own]])
            weights = (keys.double() @ q[i, head].double() * scaling).softmax(0)
            out[i, head] = weights @ values.double()
    return out


def error(actual, expected):
    return float((actual.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.identity)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("lengths", "row"),
    [
        ([64], [7, 8, 9]),
        ([512, 48], list(range(30, 400))),
        ([32, 16, 80], [5, 300, 6, 301, 2, 899]),
        ([], [1, 2, 3, 4]),
    ],
    ids=["one-segment", "long-exact-part", "scattered-slots", "nothing-coded"],
)
def test_the_reference_equals_a_dense_softmax_over_what_the_codec_decodes(
    codec, n, lengths, row
):
    parts = [coded(codec, tokens, seed) for seed, tokens in enumerate(lengths)]
    q, scaling = normal(n, 3 * H, D, seed=5), 0.25
    k_buffer, v_buffer = buffers()
    out = attend_packed(
        q,
        [lambda part=part: codec.decode(part) for part in parts],
        k_buffer,
        v_buffer,
        plan_row(torch.tensor(row), n),
        scaling,
    )
    decoded = [codec.decode(part) for part in parts]
    assert out.is_contiguous()
    expected = oracle(q, decoded, k_buffer, v_buffer, row, scaling)
    assert error(out, expected) < CLOSE


@given(
    lengths=st.lists(st.integers(0, 90), max_size=5),
    exact=st.integers(0, 40),
    n=st.integers(1, 4),
    group=st.integers(1, 3),
)
def test_any_lengths_equal_the_oracle_in_any_order(lengths, exact, n, group):
    exact = max(exact, n) if exact else 0
    decoded = [
        (normal(H, tokens, D, seed=i), normal(H, tokens, D, seed=50 + i))
        for i, tokens in enumerate(lengths)
    ]
    q = normal(n, group * H, D, seed=99)
    row = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(exact))[:exact]
    plan = plan_row(row, n) if exact else None
    if not exact and not sum(lengths):
        with pytest.raises(ValueError, match="the row is empty"):
            attend_packed(q, segments_of(decoded), *buffers(), None, 0.25)
        return
    expected = oracle(q, decoded, *buffers(), row.tolist(), 0.25)
    for order in (decoded, decoded[::-1]):
        out = attend_packed(q, segments_of(order), *buffers(), plan, 0.25)
        assert error(out, expected) < CLOSE


def test_a_row_without_codes_is_run_attention_bit_for_bit():
    plan = plan_row(torch.arange(40, 300), 2)
    q = normal(2, 4, D)
    out = attend_packed(q, [], *buffers(), plan, 0.25)
    assert torch.equal(out, attend_row(q, *buffers(), plan, 0.25))


def test_one_segment_is_decoded_at_a_time_and_in_order():
    alive, calls = [], []

    def segment(i):
        def decode():
            assert all(reference() is None for reference in alive)
            keys, values = normal(H, 8, D, seed=i), normal(H, 8, D)
            alive[:] = [weakref.ref(keys), weakref.ref(values)]
            calls.append(i)
            return keys, values

        return decode

    attend_packed(normal(1, H, D), (segment(i) for i in range(4)), *buffers(), None, 1)
    assert calls == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_broken_draft_reaches_the_heads_that_read_it_and_no_other(bad, which, n):
    pair = normal(H, 20, D, seed=1), normal(H, 20, D, seed=2)
    q = normal(n, 2 * H, D, seed=3)
    plan = plan_row(torch.arange(30, 60), n)
    sound = attend_packed(q, [lambda: pair], *buffers(), plan, 0.25)
    pair[which][0, 4] = bad
    out = attend_packed(q, [lambda: pair], *buffers(), plan, 0.25)
    assert out.shape == sound.shape
    assert torch.equal(out[:, 2:], sound[:, 2:])
    assert not torch.equal(out[:, :2], sound[:, :2])


def test_a_query_does_not_see_a_later_one_that_is_not_finite():
    decoded = normal(H, 20, D, seed=1), normal(H, 20, D, seed=2)
    q, (k_buffer, v_buffer) = normal(3, 2 * H, D, seed=3), buffers()
    row = list(range(50, 90))
    expected = oracle(q, [decoded], k_buffer, v_buffer, row, 0.25)
    k_buffer[88] = v_buffer[88] = float("nan")
    plan = plan_row(torch.tensor(row), 3)
    out = attend_packed(q, [lambda: decoded], k_buffer, v_buffer, plan, 0.25)
    assert error(out[:1], expected[:1]) < CLOSE
    assert out[1:].isnan().all()


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (torch.zeros(H, 4, D), torch.zeros(H, 5, D)),
        (torch.zeros(H, 4, D), torch.zeros(H, 4, D, dtype=torch.bfloat16)),
        (torch.zeros(H + 1, 4, D), torch.zeros(H + 1, 4, D)),
        (torch.zeros(4, D), torch.zeros(4, D)),
    ],
    ids=["tokens", "dtype", "heads", "dims"],
)
def test_a_segment_that_does_not_fit_is_refused(keys, values):
    with pytest.raises(ValueError, match=r"a segment's (keys|values) must be \[2, t"):
        attend_packed(normal(1, H, D), [lambda: (keys, values)], *buffers(), None, 0.25)


def tolerance(name):
    """Return the bound of a case; split planes have nothing but the output to cut.

    A rotation is a sum of products of rounded numbers before it is rounded itself:
    an H200 says 1.14e-2 of RotateKV.
    """
    dtype = run_packed.CASES[name].dtype
    rounds = INTERPRETED or name.startswith("RotateKV")
    if rounds and dtype == torch.bfloat16 and not name.startswith("E"):
        return CUT_TOLERANCE
    return TOLERANCE[dtype]


@pytest.fixture(scope="module")
def seen(request):
    """Return what the script saw of the kernel: errors by case, and its checks."""
    return run(run_packed.__file__, *asked(request))


@pytest.mark.parametrize("name", cases(run_packed.CASES, run_packed.FIRST))
def test_the_kernel_equals_the_reference(seen, name):
    assert seen[name] < tolerance(name)


def test_a_broken_draft_stays_in_its_row_and_kv_head_on_the_device(seen):
    # Row 0; query heads 0 and 1 read KV head 0.
    assert seen["spread"] == [[[0, 0], [0, 1]]] * 2


def test_a_lone_value_is_decoded_to_the_bit(seen):
    assert len(seen["single"]) == (8 if INTERPRETED else 4)
    assert all(seen["single"].values()), seen["single"]


def rows_of(step, heads=H, **changes):
    fields = {
        "key_bytes": torch.zeros(16, dtype=torch.uint8),
        "value_bytes": torch.zeros(16, dtype=torch.uint8),
        "offsets": torch.zeros(1, len(step.fields), dtype=torch.int64),
        "tokens": torch.zeros(1, dtype=torch.int32),
        "first": torch.tensor([0, 1], dtype=torch.int32),
    }
    slots = torch.zeros(1, dtype=torch.int32)
    buffer = torch.zeros(4, heads, D)
    first = torch.tensor([0, 1], dtype=torch.int32)
    exact = ExactRows(buffer, buffer.clone(), slots, first)
    return PackedRows(**(fields | changes)), exact


@pytest.mark.parametrize(
    ("step", "changes", "q", "message"),
    [
        (SplitPlanesStep(3, 1), {}, (1, 1, 3, D), "does not fit KV"),
        (SplitPlanesStep(3, 1), {}, (1, 1, 4, D + 1), "does not fit KV"),
        (SplitPlanesStep(3, 1), {}, (2, 1, 4, D), "2 rows of queries, 1 of segments"),
        (
            SplitPlanesStep(3, 1),
            {"offsets": torch.zeros(1, 3, dtype=torch.int64)},
            (1, 1, 4, D),
            r"offsets must be \(1, 4\)",
        ),
        (KIVIStep(2, 32), {}, (1, 1, 4, D), "group must be a power of two"),
        (SplitPlanesStep(3, 1, 24), {}, (1, 1, 4, D), "multiple of 16 tokens, got 24"),
        (RotateKVStep(2), {}, (1, 1, 4, D), "needs packed.positions"),
        (
            DecodedStep(),
            {"places": torch.zeros(1, 1).long()},
            (1, 1, 4, D),
            r"places must be \(1, 2\)",
        ),
    ],
    ids=["heads", "dim", "rows", "offsets", "group", "block", "tables", "places"],
)
def test_misfits_are_refused_before_the_kernel_runs(
    monkeypatch, step, changes, q, message
):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=message):
        packed_attention(torch.zeros(q), *rows_of(step, **changes), step, 0.25)


def test_the_cpu_is_refused_by_name():
    step = SplitPlanesStep(3, 1)
    with pytest.raises(ValueError, match="runs on a GPU, q is on cpu"):
        packed_attention(torch.zeros(1, 1, 4, D), *rows_of(step), step, 0.25)
