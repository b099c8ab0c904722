"""Attention of ragged rows: the reference by an oracle, the kernel by the reference.

The oracle is one query, one head and one key at a time, in float64. The kernel runs in
a process of its own, see ``run_ragged.py``.
"""

import math
from dataclasses import replace

import pytest
import run_ragged
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_device import TOLERANCE, asked, cases, moved, needs_gpu, run

from vericache_kernels.ragged_attention import RaggedRows, ragged_attention
from vericache_kernels.run_attention import attend_row, plan_row

SLOTS, H, D, WIDTH = 300, 2, 16, 80
SCALING = 0.25
CLOSE = 2e-6  # of the largest output; float32 rounding of a softmax average
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
    assert error(out, world.oracle()) < CLOSE


def test_a_row_is_what_run_attention_makes_of_its_slots():
    world = World([(1, 0, 60), (6, 5, 70), (1, 0, 1)])
    out, start = world.attend(), 0
    for index, (n, begin, end) in zip(
        world.rows.row.tolist(), world.bounds, strict=True
    ):
        plan = plan_row(world.table[index, begin:end], n)
        q = world.q[start : start + n]
        expected = attend_row(q, world.k, world.v, plan, SCALING)
        assert error(out[start : start + n], expected.double()) < CLOSE
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
    assert error(shorter.attend(), shorter.oracle()) < CLOSE
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


# -- the kernel ----------------------------------------------------------------


@pytest.fixture(scope="module")
def seen(request):
    """Return what the script saw of the kernel: errors by case, and its checks."""
    return run(run_ragged.__file__, *asked(request))


@pytest.mark.parametrize("name", cases(run_ragged.CASES, run_ragged.FIRST))
def test_the_kernel_equals_the_reference(seen, name):
    assert seen[name] < TOLERANCE[run_ragged.CASES[name].dtype]


def test_in_the_kernel_a_row_depends_on_itself_alone_to_the_bit(seen):
    assert seen["alone"] is True


def test_in_the_kernel_later_queries_do_not_move_a_token_by_a_bit(seen):
    assert seen["unmoved"] == [True]


def test_in_the_kernel_only_queries_that_see_it_change_with_a_bad_entry(seen):
    # Tokens 3 to 5 are the third query of the second row, and those behind it.
    assert seen["hidden"] == [
        [is_nan, which, [3, 4, 5]] for is_nan in (True, False) for which in (0, 1)
    ]


def test_in_the_kernel_layers_may_read_ranges_of_their_own(seen):
    first, second, apart = seen["layers"]
    assert max(first, second) < TOLERANCE[torch.float32]
    assert apart > 0.01


@needs_gpu
def test_a_captured_graph_serves_other_rows_of_its_size():
    case = run_ragged.Case(
        ((1, 0, 40), (5, 0, 70), (2, 3, 9)), torch.bfloat16, 64, most=5
    )
    live = moved(run_ragged.batch_of(case))
    live.launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = live.launch()
    for rows in (((5, 0, 33), (1, 4, 90), (2, 0, 2)), ((3, 0, 60), (5, 0, 5))):
        other = moved(run_ragged.batch_of(replace(case, rows=rows)))
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
        assert torch.equal(out[:tokens], other.launch())
        assert not out[tokens:].any()
