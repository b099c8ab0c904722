"""In-flight forwards are recorded in order, and none is recorded twice."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.kv.request import RequestState
from vericache_sglang.observability.request_stats import RequestStats
from vericache_sglang.runtime.in_flight import (
    InFlightForward,
    InFlightQueue,
    PendingRow,
)
from vericache_sglang.runtime.result_recorder import ResultRecorder
from vericache_sglang.sampling.profile import GREEDY_FAST
from vericache_sglang.scheduling.plan import RowResult

STRIDE = 4


def request(rid="r", drafts=()):
    state = RequestState(
        req=SimpleNamespace(
            rid=rid,
            kv=SimpleNamespace(req_pool_idx=2),
            sampling_params=SimpleNamespace(max_new_tokens=100),
        ),
        prompt=8,
        verified=10,
        outputs=[5, 6, 7],
        profile=GREEDY_FAST,
        stops=frozenset([99]),
        stats=RequestStats(True, 3),
        asynchronous=True,
    )
    state.drafts = list(drafts)
    return state


def entry(*runs, decode=True):
    """A forward whose requests are numbers; a tuple is drafted and emits nothing."""
    tokens = torch.full((len(runs), STRIDE), -1, dtype=torch.int64)
    counts, pending_rows = [], []
    for i, run in enumerate(runs):
        emits = isinstance(run, list)
        tokens[i, : len(run)] = torch.tensor(run)
        counts.append(len(run) if emits else 0)
        pending_rows.append(PendingRow(i, i, [], STRIDE, emits))
    result = SimpleNamespace(
        next_token_ids=tokens.flatten(),
        accept_lens=torch.tensor(counts),
        copy_done=None,
    )
    return InFlightForward(result, STRIDE, pending_rows, decode)


def recorded():
    told, counted = [], []
    in_flight = InFlightQueue(
        lambda rows, runs: told.extend(
            (row.at, tokens) for row, tokens in zip(rows, runs, strict=True)
        ),
        lambda counts, discarded: counted.append(counts()),
    )
    return in_flight, told, counted


def test_results_of_ended_requests_are_reported_as_discarded():
    """The iteration's observers must count what the counters count, and no more."""
    reported = []
    in_flight = InFlightQueue(
        lambda rows, runs: frozenset({rows[1].at}),
        lambda counts, discarded: reported.append((counts(), discarded)),
    )
    in_flight.launch(entry([1, 2], [3, 4, 5], (40,)))
    in_flight.record_all()
    assert reported == [([2, 3, 0], frozenset({1}))]


def test_every_request_of_a_forward_gets_its_tokens():
    in_flight, told, counted = recorded()
    in_flight.launch(entry([1, 2, 3], (40, 41), [4]))
    assert told == []
    in_flight.record_all()
    assert told == [(0, [1, 2, 3]), (1, [40, 41]), (2, [4])]
    assert counted == [[3, 0, 1]]


class Copy:
    """SGLang's copy of a result: tensors on the host, filled when it has ended."""

    def __init__(self, result):
        self.result, self.tokens = result, result.next_token_ids
        self.counts = result.accept_lens
        result.next_token_ids = torch.full_like(self.tokens, -7)
        result.accept_lens = torch.zeros_like(self.counts)
        result.copy_done = self

    def synchronize(self):
        self.result.next_token_ids.copy_(self.tokens)
        self.result.accept_lens.copy_(self.counts)


def test_what_is_still_being_copied_is_waited_for():
    in_flight, told, counted = recorded()
    launched = entry([1, 2], (40,))
    in_flight.launch(launched)
    Copy(launched.result)
    in_flight.record_all()
    assert told == [(0, [1, 2]), (1, [40])]
    assert counted == [[2, 0]]


def test_a_report_records_the_oldest_decode_and_the_prefills_before_it():
    in_flight, told, counted = recorded()
    in_flight.launch(entry([1], decode=False))
    in_flight.launch(entry([2]))
    in_flight.launch(entry([3], decode=False))
    in_flight.launch(entry([4]))
    in_flight.record_reported()
    assert told == [(0, [1]), (0, [2])]
    assert counted == [[1]], "a prefill is no iteration"
    in_flight.record_reported()
    assert [tokens for _, tokens in told] == [[1], [2], [3], [4]]


def test_a_report_of_what_is_recorded_records_nothing_newer():
    in_flight, told, _ = recorded()
    in_flight.launch(entry([1]))
    in_flight.record_all()  # a move was made
    in_flight.launch(entry([2]))
    in_flight.record_reported()
    assert [tokens for _, tokens in told] == [[1]]
    in_flight.record_reported()
    assert [tokens for _, tokens in told] == [[1], [2]]


@pytest.mark.parametrize("recorded_first", [False, True])
def test_a_dropped_decode_is_replaced_in_its_report(recorded_first):
    in_flight, told, _ = recorded()
    in_flight.launch(entry([1]))
    in_flight.launch(entry([2], decode=False))
    before = in_flight.launched
    in_flight.drop(before)
    assert len(in_flight) == 2, "nothing was launched since"
    in_flight.launch(entry([3]))
    if recorded_first:
        in_flight.record_all()
    in_flight.drop(before)
    in_flight.launch(entry([4]))
    in_flight.record_reported()
    in_flight.record_reported()
    dropped = [[3]] if recorded_first else []
    assert [tokens for _, tokens in told] == [[1], [2], *dropped, [4]]


@given(st.lists(st.sampled_from(["launch", "report", "wait", "all"]), max_size=30))
def test_forwards_are_recorded_once_and_in_order(history):
    in_flight, told, _ = recorded()
    launched = 0
    for what in history:
        if what == "launch":
            in_flight.record_all_but_newest()
            in_flight.launch(entry([launched]))
            launched += 1
            assert len(in_flight) <= 2
        elif what == "report":
            in_flight.record_reported()
        elif what == "wait":
            in_flight.record_all_but_newest()
            assert len(in_flight) <= 1
        else:
            in_flight.record_all()
            assert len(in_flight) == 0
    in_flight.record_all()
    assert [tokens for _, tokens in told] == [[i] for i in range(launched)]


class Runtime:
    def __init__(self):
        self.told, self.proposals = [], []

    def report(self, results):
        self.told.extend(results)


def world(*states):
    runtime, ended, rounds = Runtime(), [], []
    placement = SimpleNamespace(
        prefetches=SimpleNamespace(end=ended.append),
        counters=SimpleNamespace(
            note_cycle=lambda *round: rounds.append(round),
            note_proposals=lambda *counts: runtime.proposals.append(counts),
        ),
    )
    living = {state.rid: state for state in states}
    return ResultRecorder(placement, runtime, living), runtime, ended, living


def test_a_verification_counts_what_is_certain_at_once_and_the_rest_with_its_result():
    state = request(drafts=[11, 12])
    recorder, runtime, ended, _ = world(state)
    pending_row = recorder.launch(state, 0, queries=3, verifies=True)
    assert (state.verified, state.pending_max, state.emitted, state.drafted) == (
        11,
        2,
        4,
        0,
    )
    assert ended == ["r"], "its staging is free for the next"
    recorder.record([pending_row], [[11, 50]])
    assert (state.verified, state.pending_max, state.emitted) == (12, 0, 5)
    assert (state.outputs, state.pending) == ([5, 6, 7, 11, 50], 50)
    assert runtime.told == [RowResult("r", drafted=2, emitted=2)]


def test_a_draft_of_an_earlier_round_is_verified_and_ends_nothing():
    state = request()
    recorder, runtime, _, _ = world(state)
    drafted = recorder.launch(state, 0, emits=False)
    assert state.drafted == 1
    verified = recorder.launch(state, 0, queries=2, verifies=True)
    recorder.record([drafted], [[99]])
    recorder.record([verified], [[99, 50]])
    assert (state.drafts, state.drafted) == ([], 0)
    assert runtime.told == [RowResult("r", drafted=1, emitted=2)]
    stopped = recorder.launch(state, 0, emits=False)
    recorder.record([stopped], [[99]])
    assert runtime.told[1:] == [RowResult("r", drafted=1, ended=True)]
    assert state.drafts == [99]


@pytest.mark.parametrize("agreed", [0, 1, 2])
def test_proposals_are_counted_once_they_are_reported(agreed):
    """A draft row with two proposals, and a verification before it is reported."""
    state = request(drafts=[11])
    recorder, runtime, _, _ = world(state)
    tokens = [12, 13, 14][: agreed + 1]
    drafted = recorder.launch(state, 0, queries=3, emits=False)
    assert (state.drafted, state.drafted_max) == (2, 4)
    late = recorder.launch(state, 0, queries=state.drafted_max + 1, verifies=True)
    recorder.record([drafted], [tokens])
    assert runtime.told == [], "its cycle has ended"
    assert (state.verified, state.pending_max, state.drafted_max) == (11, 4, 0)
    recorder.record([late], [[11, *tokens, 50]])
    assert state.verified == 10 + 2 + agreed + 1
    assert state.pending_max == 0
    assert runtime.told == [
        RowResult(
            "r", drafted=2 + agreed, emitted=3 + agreed, proposed=4 - (2 + agreed)
        )
    ]
    assert runtime.proposals == []
    again = recorder.launch(state, 0, queries=3, emits=False, proposals=2)
    recorder.record([again], [tokens])
    assert runtime.proposals == [("draft", 2, agreed)]
    assert (state.stats.inner_proposed, state.stats.inner_accepted) == (2, agreed)
    assert runtime.told[1:] == [RowResult("r", drafted=agreed + 1, proposed=2)]
    assert (state.drafted, state.drafted_max) == (agreed + 1, agreed + 1)


def test_results_of_a_request_that_left_are_dropped():
    state = request(drafts=[11])
    recorder, runtime, _, living = world(state)
    pending_row = recorder.launch(state, 0, queries=2, verifies=True)
    living["r"] = request()  # it was retracted, and is here again
    assert recorder.record([pending_row], [[11, 50]]) == {0}
    assert living["r"].outputs == [5, 6, 7]
    assert runtime.told == []


def test_results_of_a_request_whose_host_copy_was_lost_are_dropped():
    state = request()
    recorder, runtime, _, _ = world(state)
    pending_row = recorder.launch(state, 0, emits=False)
    state.lost = True  # the runtime knows it no more, and the draft ends it
    recorder.record([pending_row], [[99]])
    assert runtime.told == []


def test_a_lost_report_delays_no_later_one():
    """As after an error in taking it: other ranks have counted it."""
    in_flight, told, _ = recorded()
    in_flight.launch(entry([1]))
    in_flight.settle()
    in_flight.launch(entry([2]))
    in_flight.record_reported()
    assert [tokens for _, tokens in told] == [[1], [2]]
