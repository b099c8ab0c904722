"""Rows of a mixed forward, slot by slot, against lists written by hand."""

from types import SimpleNamespace

import pytest
import torch

from vericache_sglang.compression.budget import Budget
from vericache_sglang.engine.rows import MixedRows
from vericache_sglang.engine.state import RequestState, TwoParts
from vericache_sglang.errors import InvariantError
from vericache_sglang.memory.staging import Span
from vericache_sglang.scheduling.plan import Draft, Plain, Verify, Wait

OWN = [50, 51, 52, 80, 81, 82, 83, 84, 85]
"""Three kept slots, then decode slots; two of them committed (F = 10, m = 5)."""


@pytest.fixture
def residence():
    table = torch.zeros(6, 20, dtype=torch.int32)
    table[2, : len(OWN)] = torch.tensor(OWN, dtype=torch.int32)
    return SimpleNamespace(table=table, shadow_rows=range(4, 6))


def state(drafts=(), span=None, split=True):
    req = SimpleNamespace(rid="r", kv=SimpleNamespace(req_pool_idx=2))
    made = RequestState(
        req=req,
        prompt=8,
        verified=10,
        pending=7,
        emitted=3,
        greedy=True,
        eligible=True,
        stops=frozenset(),
    )
    made.drafts = list(drafts)
    if split:
        made.parts = TwoParts(Budget(8, 3, 0, 0), None, True, span=span)
    return made


def test_a_draft_row_reads_kept_and_decode_slots(residence):
    rows = MixedRows(residence)
    assert rows.add(0, state(drafts=[11, 12]), Draft("r"))
    (row,) = rows.rows
    assert (row.table_row, row.prefix, row.position) == (2, 7, 12)
    assert row.tokens == [12]
    assert row.slots.tolist() == [84]


def test_the_first_draft_runs_the_pending_token(residence):
    rows = MixedRows(residence)
    rows.add(0, state(), Draft("r"))
    assert rows.rows[0].tokens == [7]
    assert rows.rows[0].slots.tolist() == [82]


def test_a_verify_row_lists_every_slot_once_and_writes_in_place(residence):
    rows = MixedRows(residence)
    rows.add(0, state(drafts=[11, 12], span=Span(100, 5)), Verify("r"))
    (row,) = rows.rows
    assert (row.table_row, row.prefix, row.position) == (4, 10, 10)
    assert row.tokens == [7, 11, 12]
    assert row.slots.tolist() == [82, 83, 84], "the drafts' own slots"
    listed = residence.table[4, : row.prefix + 3].tolist()
    staged = [100, 101, 102, 103, 104]
    assert listed == [50, 51, 52, *staged, 80, 81, 82, 83, 84]


def test_a_plain_row_is_the_request_s_own(residence):
    rows = MixedRows(residence)
    plain = state(split=False)
    plain.verified = 8
    rows.add(0, plain, Plain("r"))
    (row,) = rows.rows
    assert (row.table_row, row.prefix, row.position) == (2, 8, 8)
    assert row.slots.tolist() == [85]


def test_waiting_rows_are_left_out(residence):
    rows = MixedRows(residence)
    assert not rows.add(0, state(), Wait("r"))
    assert rows.rows == []


def test_each_verification_has_a_shadow_row_of_its_own(residence):
    rows = MixedRows(residence)
    for i in range(2):
        rows.add(i, state(drafts=[9], span=Span(100 + 5 * i, 5)), Verify("r"))
    assert [row.table_row for row in rows.rows] == [4, 5]
    assert rows.starts() == [0, 2]


def test_verifying_without_a_staged_complement_is_an_error(residence):
    with pytest.raises(InvariantError, match="r is verified without its complement"):
        MixedRows(residence).add(0, state(drafts=[9]), Verify("r"))
