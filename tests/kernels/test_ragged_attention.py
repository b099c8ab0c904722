"""Attention of ragged rows: the reference by an oracle, the kernel by the reference.

The oracle is one query, one head and one key at a time, in float64. Triton's
interpreter runs in a process of its own, see ``interpreted_ragged.py``.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_kernels.compile_report import compile_build
from vericache_kernels.compile_report.builds import builds
from vericache_kernels.ragged_attention import RaggedRows, ragged_attention
from vericache_kernels.run_attention import attend_row, plan_row

SLOTS, H, D, WIDTH = 300, 2, 16, 80
SCALING = 0.25
TOLERANCE = 2e-6  # of the largest output; float32 rounding of a softmax average
SCRIPT = Path(__file__).with_name("interpreted_ragged.py")
NAN = float("nan")


class World:
    """Rows of a table that share no slot; all other slots hold NaN.

    Args:
        bounds: (queries, begin, end) of each row.
        group: Query heads of a KV head.
        spare: Tokens that belong to no row.
    """

    def __init__(self, bounds, group=2, spare=0, seed=0):
        random = torch.Generator().manual_seed(seed)
        self.k = torch.full((SLOTS, H, D), NAN)
        self.v = torch.full((SLOTS, H, D), NAN)
        self.table = torch.zeros(len(bounds) + 2, WIDTH, dtype=torch.int32)
        where = torch.randperm(len(bounds) + 2, generator=random)[: len(bounds)]
        free = (torch.randperm(SLOTS - 1, generator=random) + 1).tolist()
        for index, (_, begin, end) in zip(where.tolist(), bounds, strict=True):
            for entry in range(begin, end):
                slot = free.pop()
                self.table[index, entry] = slot
                self.k[slot] = torch.randn(H, D, generator=random)
                self.v[slot] = torch.randn(H, D, generator=random)
        self.bounds = bounds
        counts, begins, ends = zip(*bounds, strict=True)
        self.rows = RaggedRows(
            self.table,
            where,
            torch.tensor([0, *counts]).cumsum(0),
            torch.tensor(begins),
            torch.tensor(ends),
        )
        self.q = torch.randn(sum(counts) + spare, group * H, D, generator=random)

    def attend(self, **changes):
        rows = replace(self.rows, **changes)
        most = max(1, *(n for n, _, _ in self.bounds))
        return ragged_attention(
            self.q, (self.k, self.v), rows, SCALING, most_queries=most
        )

    def oracle(self):
        """Return what every token attends to, or zeros where it sees nothing."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        token = 0
        for index, (n, begin, end) in zip(
            self.rows.row.tolist(), self.bounds, strict=True
        ):
            for i in range(n):
                seen = range(begin, end - n + i + 1)
                slots = [int(self.table[index, entry]) for entry in seen]
                for head in range(self.q.shape[1]):
                    out[token, head] = self.one(token, head, slots)
                token += 1
        return out

    def one(self, token, head, slots):
        own = head // (self.q.shape[1] // H)
        query = self.q[token, head].double()
        scores = [
            SCALING * sum(float(a) * float(b) for a, b in zip(query, key, strict=True))
            for key in (self.k[slot, own] for slot in slots)
        ]
        total = torch.zeros(D, dtype=torch.float64)
        if scores:
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            for weight, slot in zip(weights, slots, strict=True):
                total += weight / sum(weights) * self.v[slot, own].double()
        return total


def error(actual, expected):
    return float((actual.double() - expected).abs().max() / expected.abs().max())


ROW = st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 11)).map(
    # Queries, first entry, and at least as many entries as queries.
    lambda row: (row[0], row[1], row[1] + max(row[0], row[2]))
)


@settings(max_examples=25, deadline=None)
@given(
    bounds=st.lists(ROW, min_size=1, max_size=4),
    group=st.integers(1, 3),
    spare=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_the_reference_equals_one_query_head_and_key_at_a_time(
    bounds, group, spare, seed
):
    world = World(bounds, group, spare, seed)
    out, expected = world.attend(), world.oracle()
    assert out.shape == world.q.shape
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)


def test_a_query_in_front_of_its_row_s_first_entry_gives_zeros():
    world = World([(4, 3, 5), (1, 0, 6)])
    out = world.attend()
    assert not out[:2].any()
    assert error(out, world.oracle()) < TOLERANCE


def test_a_row_is_what_run_attention_makes_of_its_slots():
    world = World([(1, 0, 60), (6, 5, 70), (1, 0, 1)])
    out, start = world.attend(), 0
    for index, (n, begin, end) in zip(
        world.rows.row.tolist(), world.bounds, strict=True
    ):
        plan = plan_row(world.table[index, begin:end], n)
        q = world.q[start : start + n]
        expected = attend_row(q, world.k, world.v, plan, SCALING)
        assert error(out[start : start + n], expected.double()) < TOLERANCE
        start += n


@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("which", ["k", "v"])
def test_what_a_query_does_not_see_may_be_anything(which, bad):
    world = World([(1, 0, 20), (4, 0, 30)])
    sound = world.attend()
    slot = world.table[int(world.rows.row[1]), 28]
    getattr(world, which)[slot] = bad
    out = world.attend()
    assert torch.equal(out[:3], sound[:3])
    assert not out[3:].isfinite().all(-1).any()


def test_layers_may_read_ranges_of_their_own():
    world = World([(1, 2, 40), (3, 0, 30)])
    begin = torch.stack([world.rows.begin, world.rows.begin + 7])
    rows = replace(world.rows, begin=begin)
    assert rows.at(0).begin.data_ptr() == begin.data_ptr(), "a view"
    shorter = World([(1, 9, 40), (3, 7, 30)])
    shorter.k, shorter.v, shorter.q = world.k, world.v, world.q
    shorter.table, shorter.rows = world.table, rows.at(1)
    assert error(shorter.attend(), shorter.oracle()) < TOLERANCE
    assert world.rows.at(5) is world.rows
    with pytest.raises(IndexError):
        rows.at(2)


def other(**changes):
    """Return the arguments of a call of which something is not as it must be."""
    world = World([(1, 0, 20), (3, 0, 30)])
    named = {"q": world.q, "k": world.k, "v": world.v, "scaling": SCALING}
    named |= {"most": 3, "splits": 4}
    rows = replace(
        world.rows,
        **{name: new for name, new in changes.items() if name not in named},
    )
    named |= {name: new for name, new in changes.items() if name in named}
    return named, rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(4, 3, D)}, "query heads or head dim do not fit"),
        ({"q": torch.zeros(4, 4, 32)}, "query heads or head dim do not fit"),
        ({"q": torch.zeros(4, 4 * D)}, r"q must be \[T, Hq, D\]"),
        ({"q": torch.zeros(4, 4, D, dtype=torch.float16)}, "q is torch.float16, K"),
        ({"q": torch.zeros(4, D, 4).mT}, "q must be contiguous in heads and D"),
        ({"v": torch.zeros(SLOTS + 1, H, D)}, "K and V buffers differ"),
        ({"v": torch.zeros(H, SLOTS, D).transpose(0, 1)}, "K and V buffers differ"),
        ({"scaling": 0.0}, "scaling must be positive, got 0.0"),
        ({"scaling": NAN}, "scaling must be positive, got nan"),
        ({"most": 0}, "most_queries must be at least 1, got 0"),
        ({"splits": 12}, "splits must be a power of two, got 12"),
        ({"first": torch.tensor([0, 1])}, "rows.first does not fit 2 rows"),
        ({"begin": torch.zeros(3, dtype=torch.int32)}, "rows.begin does not fit"),
        ({"end": torch.ones(2, 2, dtype=torch.int32)}, "rows.end does not fit"),
        ({"row": torch.zeros(2)}, "rows.row must be int32 or int64"),
        ({"table": torch.zeros(9, dtype=torch.int32)}, "rows.table does not fit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused_by_name(changes, message):
    named, rows = other(**changes)
    with pytest.raises(ValueError, match=message):
        ragged_attention(
            named["q"],
            (named["k"], named["v"]),
            rows,
            named["scaling"],
            most_queries=named["most"],
            splits=named["splits"],
        )


def test_a_head_dim_the_kernel_cannot_multiply_is_refused_everywhere():
    q, kv = torch.zeros(1, 2, 24), torch.zeros(4, 2, 24)
    one = torch.zeros(1, dtype=torch.int32)
    rows = RaggedRows(
        torch.zeros(1, 4, dtype=torch.int32), one, one.new_zeros(2), one, one
    )
    with pytest.raises(ValueError, match="D must be a power of two from 16 to 128"):
        ragged_attention(q, (kv, kv), rows, SCALING, most_queries=1)


# -- the kernel, interpreted ---------------------------------------------------


def script():
    spec = importlib.util.spec_from_file_location("interpreted_ragged", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    before = os.environ.get("TRITON_INTERPRET")
    spec.loader.exec_module(module)  # sets the variable, for itself
    if before is None:
        del os.environ["TRITON_INTERPRET"]
    return module


SCRIPT_MODULE = script()
CASES = SCRIPT_MODULE.CASES


def tolerance(name):
    """Bounds are those of one rounding of the output and of the weights."""
    dtype = CASES[name].dtype
    return {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]


@pytest.fixture(scope="module")
def interpreted():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_reference(interpreted, name):
    assert interpreted[name] < tolerance(name)


def test_in_the_kernel_a_row_depends_on_itself_alone_to_the_bit(interpreted):
    assert interpreted["alone"] is True


def test_in_the_kernel_later_queries_do_not_move_a_token_by_a_bit(interpreted):
    assert interpreted["unmoved"] is True


def test_in_the_kernel_only_queries_that_see_it_change_with_a_bad_entry(interpreted):
    # Tokens 3 to 5 are the third query of the second row, and those behind it.
    assert interpreted["hidden"] == [
        [is_nan, which, [3, 4, 5]] for is_nan in (True, False) for which in (0, 1)
    ]


def test_in_the_kernel_layers_may_read_ranges_of_their_own(interpreted):
    first, second, apart = interpreted["layers"]
    assert max(first, second) < 2e-6
    assert apart > 0.01


@pytest.mark.parametrize(
    "name", ["ragged rows of 33", "merge of splits of ragged rows"]
)
def test_the_kernels_compile_for_a_gpu_without_spilling(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    figures = compile_build(builds()[name], 90)
    assert figures.spill_bytes == figures.stack_bytes == 0
    assert figures.programs >= 3


# -- the kernel on a GPU -------------------------------------------------------

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def on_device(batch):
    """Return a batch of the script on the GPU."""
    rows = RaggedRows(
        *(
            getattr(batch.rows, name).cuda()
            for name in ("table", "row", "first", "begin", "end")
        )
    )
    kv = tuple(buffer.cuda() for buffer in batch.kv)
    return replace(batch, q=batch.q.cuda(), kv=kv, rows=rows)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_the_kernel_equals_the_reference(name):
    batch = SCRIPT_MODULE.batch_of(CASES[name])
    expected = batch.reference().double()
    out = on_device(batch).kernel().cpu().double()
    assert float((out - expected).abs().max() / expected.abs().max()) < tolerance(name)


@pytest.mark.gpu
@on_gpu
def test_on_a_gpu_later_queries_do_not_move_a_token_by_a_bit():
    case = SCRIPT_MODULE.Case(
        ((33, 2, 150),), torch.bfloat16, 128, 2, 4, splits=16, most=33
    )
    batch = on_device(SCRIPT_MODULE.batch_of(case))
    whole = batch.kernel()
    for n in (1, 2, 8, 32):
        first = torch.tensor([0, n], dtype=torch.int32).cuda()
        rows = replace(batch.rows, first=first, end=batch.rows.end - 33 + n)
        short = replace(batch, q=batch.q[:n].contiguous(), rows=rows)
        assert torch.equal(short.kernel(), whole[:n])


@pytest.mark.gpu
@on_gpu
def test_on_a_gpu_a_captured_graph_serves_other_rows_of_its_size():
    case = SCRIPT_MODULE.Case(
        ((1, 0, 40), (5, 0, 70), (2, 3, 9)), torch.bfloat16, 64, most=5
    )
    live = on_device(SCRIPT_MODULE.batch_of(case))
    live.kernel()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = live.kernel()
    for rows in (((5, 0, 33), (1, 4, 90), (2, 0, 2)), ((3, 0, 60), (5, 0, 5))):
        other = on_device(SCRIPT_MODULE.batch_of(replace(case, rows=rows)))
        tokens, count = len(other.q), len(rows)
        live.q[:tokens].copy_(other.q)
        for own, new in zip(live.kv, other.kv, strict=True):
            own.copy_(new)
        live.rows.table.copy_(other.rows.table)
        live.rows.first.fill_(tokens)
        live.rows.first[: count + 1].copy_(other.rows.first)
        for name in ("row", "begin", "end"):
            getattr(live.rows, name)[:count].copy_(getattr(other.rows, name))
        graph.replay()
        assert torch.equal(out[:tokens], other.kernel())
        assert not out[tokens:].any()
