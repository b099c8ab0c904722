"""Rows of a mixed forward, slot by slot, against lists written by hand."""

from types import SimpleNamespace

import pytest
import torch

from vericache_kernels.token_commit import EMIT, DraftTokenRows
from vericache_sglang.compression.budget import Budget
from vericache_sglang.errors import InvariantError
from vericache_sglang.kv.request import Parts, RequestState
from vericache_sglang.kv.staging import Span
from vericache_sglang.observability.request_stats import RequestStats
from vericache_sglang.runtime.forward.draft_tokens import DraftTokenBuffer
from vericache_sglang.runtime.forward.rows import MixedRows, build_forward
from vericache_sglang.sampling.profile import GREEDY_FAST
from vericache_sglang.scheduling.iteration_model import Work
from vericache_sglang.scheduling.plan import Draft, Plain, Residency, Verify, Wait

PROMPT = [10, 11, 12, 13, 14, 15, 16, 17]
KEPT = [50, 51, 52]
DECODE = [80, 81, 82, 83, 84, 85]
"""T = 8, n = 3; two decoded tokens are committed, so F = 10."""

SHARED = "shared"
"""On the device, beside draft KV that other requests list too."""

OWN = {
    None: [*PROMPT, *DECODE],
    Residency.DEVICE: [*PROMPT, *KEPT, *DECODE],
    SHARED: [*PROMPT, *DECODE],
    Residency.HOST: [*KEPT, *DECODE],
}
VERIFIED_OVER = {
    Residency.DEVICE: PROMPT,
    SHARED: PROMPT,
    Residency.HOST: [*KEPT, 100, 101, 102, 110, 111],
}
DRAFT_ROW, VERIFY_ROW = 7, 4
NOTHING_CODED = torch.zeros(1, 1, 0, dtype=torch.int32)


class Staged:
    """Two leased pieces, as a fragmented region hands them out."""

    def spans(self, rid):
        return (Span(100, 3), Span(110, 2))


class Absent:
    def spans(self, rid):
        raise InvariantError(f"{rid} is verified without its residual KV")


def own_row(layout, codes=()):
    """The own row; slots of codes come before the exact ones."""
    row = OWN[layout]
    at = row.index(KEPT[0]) if codes else 0
    return [*row[:at], *codes, *row[at:]]


def placement(layout, prefetches=None, codes=()):
    table = torch.zeros(8, 24, dtype=torch.int32)
    own = own_row(layout, codes)
    table[2, : len(own)] = torch.tensor(own, dtype=torch.int32)
    draft = [*codes, *KEPT]
    table[DRAFT_ROW, : len(draft)] = torch.tensor(draft, dtype=torch.int32)
    return SimpleNamespace(
        draft_reads=lambda budget: budget.exact + 10 * budget.coded,
        table=table,
        verify_rows=range(VERIFY_ROW, VERIFY_ROW + 2),
        prefetches=prefetches or Staged(),
    )


def state(layout=Residency.HOST, drafts=(), codes=()):
    own = own_row(layout, codes)
    kv = SimpleNamespace(req_pool_idx=2, kv_allocated_len=len(own))
    made = RequestState(
        req=SimpleNamespace(rid="r", kv=kv),
        prompt=8,
        verified=10,
        outputs=[5, 6, 7],
        profile=GREEDY_FAST,
        stops=frozenset(),
        stats=RequestStats(True, 8),
    )
    made.drafts = list(drafts)
    if layout is not None:
        chosen = torch.zeros(1, 1, 3, dtype=torch.int32)
        budget, coded = Budget(8, 3, 0, 0), NOTHING_CODED
        if codes:
            budget = Budget(8, 7, 0, 0, coded=4, code_slots=len(codes))
            coded = torch.zeros(1, 1, 4, dtype=torch.int32)
        residency = Residency.DEVICE if layout is SHARED else layout
        made.parts = Parts(budget, chosen, coded, residency, True)
        if layout is SHARED:
            made.parts.shared_slots = torch.tensor(KEPT)
        if layout is not Residency.HOST:
            made.parts.draft_row = DRAFT_ROW
    return made


def only(rows):
    (row,) = rows.rows
    return row


def ran(rows, request):
    """What one row runs, given what the host has heard."""
    draft_tokens = DraftTokenBuffer(8, 8, "cpu")
    draft_tokens.put([request])
    inputs = rows.inputs(draft_tokens)
    return inputs.tokens.tolist(), inputs.slots.tolist()


SPLIT = [Residency.HOST, Residency.DEVICE, SHARED]


@pytest.mark.parametrize("layout", SPLIT)
def test_a_draft_row_reads_kept_and_decode_slots(layout):
    world, request = placement(layout), state(layout, drafts=[11, 12])
    rows = MixedRows(world)
    assert rows.add(0, request, Draft("r"))
    row = only(rows)
    assert (row.prefix, row.position) == (7, 12)
    assert ran(rows, request) == ([12], [84])
    listed = world.table[row.table_row, : row.prefix + 1].tolist()
    assert listed == [*KEPT, 80, 81, 82, 83, 84]


def test_decode_slots_allocated_later_reach_the_draft_row():
    world, request = placement(Residency.DEVICE), state(Residency.DEVICE)
    request.req.kv.kv_allocated_len = len(OWN[Residency.DEVICE]) - 3
    MixedRows(world).add(0, request, Draft("r"))
    request.req.kv.kv_allocated_len += 3
    request.drafts = [11, 12]
    rows = MixedRows(world)
    rows.add(0, request, Draft("r"))
    row = only(rows)
    assert world.table[row.table_row, row.prefix].item() == 84


def test_the_first_draft_runs_the_pending_token():
    rows, request = MixedRows(placement(Residency.HOST)), state()
    rows.add(0, request, Draft("r"))
    assert ran(rows, request) == ([7], [82])


@pytest.mark.parametrize("layout", SPLIT)
def test_a_verify_row_lists_every_slot_once_and_writes_in_place(layout):
    world, request = placement(layout), state(layout, drafts=[11, 12])
    rows = MixedRows(world)
    rows.add(0, request, Verify("r"))
    row = only(rows)
    assert (row.prefix, row.position) == (10, 10)
    assert ran(rows, request) == ([7, 11, 12], [82, 83, 84]), "the drafts' own slots"
    listed = world.table[row.table_row, : row.prefix + 3].tolist()
    assert listed == [*VERIFIED_OVER[layout], 80, 81, 82, 83, 84]


@pytest.mark.parametrize("layout", [None, SHARED])
def test_a_plain_row_is_the_request_s_own(layout):
    rows, request = MixedRows(placement(layout)), state(layout)
    rows.add(0, request, Plain("r"))
    row = only(rows)
    assert (row.table_row, row.prefix, row.position) == (2, 10, 10)
    assert ran(rows, request) == ([7], [82])


@pytest.mark.parametrize("layout", SPLIT)
@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_a_draft_follows_a_verification_nobody_has_heard_of(layout, accepted):
    world, request = placement(layout), state(layout, drafts=[11, 12])
    draft_tokens = DraftTokenBuffer(8, 8, "cpu")
    draft_tokens.put([request])
    verified = MixedRows(world)
    verified.add(0, request, Verify("r"))
    target = [*[11, 12][:accepted], *[90, 91, 92][: 3 - accepted]]
    first, batch_index = torch.tensor([0, 3]), torch.tensor([2])
    draft_tokens.commit(
        DraftTokenRows(batch_index, first, torch.tensor([EMIT])), torch.tensor(target)
    )
    request.launch_emission(3)

    rows = MixedRows(world)
    rows.add(0, request, Draft("r"))
    inputs = rows.inputs(draft_tokens)
    assert inputs.tokens.tolist() == [target[accepted]], "the new pending token"
    assert inputs.positions.tolist() == [11 + accepted]
    assert inputs.slots.tolist() == [83 + accepted]
    row, length = only(rows), 3 + 3 + accepted
    assert inputs.prefixes.tolist() == [length]
    assert inputs.bounds == [3 + 3 + 2], "as if both drafts had been accepted"
    listed = world.table[row.table_row, : length + 1].tolist()
    assert listed == [*KEPT, *DECODE[: 4 + accepted]]

    request.record_emission(target[: accepted + 1], 3)
    assert (request.pending_max, request.committed_in_flight) == (0, 0)
    reported = MixedRows(world)
    reported.add(0, request, Draft("r"))
    again = reported.inputs(draft_tokens)
    assert again.slots.tolist() == inputs.slots.tolist()
    assert again.positions.tolist() == inputs.positions.tolist()
    assert again.prefixes.tolist() == inputs.prefixes.tolist()


def test_waiting_rows_are_left_out():
    rows = MixedRows(placement(Residency.HOST))
    assert not rows.add(0, state(), Wait("r"))
    assert rows.rows == []


def test_each_verification_has_a_shadow_row_of_its_own():
    rows = MixedRows(placement(Residency.HOST))
    for i in range(2):
        rows.add(i, state(drafts=[9]), Verify("r"))
    assert [row.table_row for row in rows.rows] == [4, 5]
    assert rows.starts() == [0, 2]


def test_work_counts_tokens_slots_and_their_products():
    rows = MixedRows(placement(Residency.HOST))
    rows.add(0, state(drafts=[11]), Draft("r"))  # 1 token over 7 slots
    rows.add(1, state(drafts=[9]), Verify("r"))  # 2 tokens over 12 slots
    assert rows.work() == Work(tokens=3, reads=7 + 12, products=7 + 24)


def test_verifying_without_a_staged_residual_is_an_error():
    rows = MixedRows(placement(Residency.HOST, Absent()))
    with pytest.raises(InvariantError, match="r is verified without its residual KV"):
        rows.add(0, state(drafts=[9]), Verify("r"))


CODES = [40, 41]
"""Slots of 4 packed tokens; 1 token is dropped, so 5 are staged."""

PACKED = pytest.mark.parametrize("layout", [Residency.HOST, Residency.DEVICE])


@PACKED
def test_a_packed_draft_row_begins_with_its_codes(layout):
    world, request = placement(layout, codes=CODES), state(layout, [11, 12], CODES)
    rows = MixedRows(world)
    assert rows.add(0, request, Draft("r"))
    row = only(rows)
    assert row.packed is request
    assert (row.prefix, row.position) == (9, 12)
    assert ran(rows, request) == ([12], [84])
    listed = world.table[row.table_row, : row.prefix + 1].tolist()
    assert listed == [*CODES, *KEPT, 80, 81, 82, 83, 84]


@PACKED
def test_a_verification_lists_no_codes(layout):
    world, request = placement(layout, codes=CODES), state(layout, [11, 12], CODES)
    rows = MixedRows(world)
    rows.add(0, request, Verify("r"))
    row = only(rows)
    assert row.packed is None
    assert (row.prefix, row.position) == (10, 10)
    assert ran(rows, request)[1] == [82, 83, 84]
    listed = world.table[row.table_row, : row.prefix + 3].tolist()
    assert listed == [*VERIFIED_OVER[layout], 80, 81, 82, 83, 84]


def test_a_budget_without_packed_tokens_is_an_ordinary_row():
    rows = MixedRows(placement(Residency.HOST))
    rows.add(0, state(), Draft("r"))
    assert only(rows).packed is None


def test_decoding_codes_is_work():
    rows = MixedRows(placement(Residency.HOST, codes=CODES))
    rows.add(0, state(Residency.HOST, [11], CODES), Draft("r"))
    # 3 exact, 4 packed that cost 10 each here, 2 decoded, 1 drafted, and its own.
    assert rows.work() == Work(tokens=1, reads=47, products=47)
    rows.add(1, state(Residency.HOST, [9], CODES), Verify("r"))
    assert rows.work() == Work(tokens=3, reads=47 + 12, products=47 + 24)


def test_a_row_longer_than_the_context_is_never_run():
    """SGLang's page tables have as many columns; longer rows would write the next."""
    world, request = placement(Residency.HOST), state(drafts=[11, 12])
    rows = MixedRows(world)
    rows.add(0, request, Verify("r"))
    draft_tokens = DraftTokenBuffer(8, 8, "cpu")
    draft_tokens.put([request])
    runner = SimpleNamespace(model_config=SimpleNamespace(context_len=12))
    batch = SimpleNamespace(device="cpu")
    with pytest.raises(InvariantError, match="a block-table row of 13 KV slots"):
        build_forward(batch, rows.inputs(draft_tokens), runner)
