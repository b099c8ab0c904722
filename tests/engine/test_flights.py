"""Flights land in order, whoever asks, and nothing lands twice."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.engine.conclusion import Conclusion
from vericache_sglang.engine.flights import Flight, Flights, Passenger
from vericache_sglang.engine.sampling.profile import BARE
from vericache_sglang.engine.state import RequestState
from vericache_sglang.observability.request_stats import RequestStats

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
        pending=7,
        outputs=[5, 6, 7],
        profile=BARE,
        eligible=True,
        stops=frozenset([99]),
        longest=3,
        figures=RequestStats(True, 3),
        late=True,
    )
    state.drafts = list(drafts)
    return state


def flight(*runs, decode=True):
    """A flight whose passengers are numbers; ``None`` emits nothing and drafts 40."""
    tokens = torch.zeros(len(runs), STRIDE, dtype=torch.int64)
    counts, passengers = [], []
    for i, run in enumerate(runs):
        told = [40] if run is None else run
        tokens[i, : len(told)] = torch.tensor(told)
        counts.append(0 if run is None else len(run))
        passengers.append(Passenger(i, i, -1 if run is None else len(run) - 1, 0))
    result = SimpleNamespace(
        next_token_ids=tokens.flatten(),
        accept_lens=torch.tensor(counts),
        copy_done=None,
    )
    return Flight(result, STRIDE, passengers, decode)


def recorded():
    told, counted = [], []
    flights = Flights(
        lambda passenger, tokens: told.append((passenger.at, tokens)) or True,
        lambda counts, discarded: counted.append(counts()),
    )
    return flights, told, counted


def test_results_of_ended_requests_are_reported_as_discarded():
    """The iteration's observers must count what the counters count, and no more."""
    reported = []
    flights = Flights(
        lambda passenger, tokens: passenger.at != 1,
        lambda counts, discarded: reported.append((counts(), discarded)),
    )
    flights.launch(flight([1, 2], [3, 4, 5], None))
    flights.land_all()
    assert reported == [([2, 3, 0], frozenset({1}))]


def test_a_flight_tells_every_passenger_its_tokens():
    flights, told, counted = recorded()
    flights.launch(flight([1, 2, 3], None, [4]))
    assert told == []
    flights.land_all()
    assert told == [(0, [1, 2, 3]), (1, [40]), (2, [4])]
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
    flights, told, counted = recorded()
    launched = flight([1, 2], None)
    flights.launch(launched)
    Copy(launched.result)
    flights.land_all()
    assert told == [(0, [1, 2]), (1, [40])]
    assert counted == [[2, 0]]


def test_a_report_lands_the_oldest_decode_and_the_prefills_before_it():
    flights, told, counted = recorded()
    flights.launch(flight([1], decode=False))
    flights.launch(flight([2]))
    flights.launch(flight([3], decode=False))
    flights.launch(flight([4]))
    flights.land_reported()
    assert told == [(0, [1]), (0, [2])]
    assert counted == [[1]], "a prefill is no iteration"
    flights.land_reported()
    assert [tokens for _, tokens in told] == [[1], [2], [3], [4]]


def test_a_report_of_what_has_landed_lands_nothing_newer():
    flights, told, _ = recorded()
    flights.launch(flight([1]))
    flights.land_all()  # a move was made
    flights.launch(flight([2]))
    flights.land_reported()
    assert [tokens for _, tokens in told] == [[1]]
    flights.land_reported()
    assert [tokens for _, tokens in told] == [[1], [2]]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(["launch", "report", "wait", "all"]), max_size=30))
def test_whoever_asks_flights_land_once_and_in_order(history):
    flights, told, _ = recorded()
    launched = 0
    for what in history:
        if what == "launch":
            flights.land_all_but_last()
            flights.launch(flight([launched]))
            launched += 1
            assert len(flights) <= 2
        elif what == "report":
            flights.land_reported()
        elif what == "wait":
            flights.land_all_but_last()
            assert len(flights) <= 1
        else:
            flights.land_all()
            assert len(flights) == 0
    flights.land_all()
    assert [tokens for _, tokens in told] == [[i] for i in range(launched)]


class Runtime:
    def __init__(self):
        self.told = []

    def launched(self, rid, drafted):
        self.told.append(("launched", rid, drafted))

    def verified(self, rid, drafted, emitted):
        self.told.append(("verified", rid, drafted, emitted))

    def stop_drafted(self, rid):
        self.told.append(("stop drafted", rid))


def world(*states):
    runtime, ended, rounds = Runtime(), [], []
    residence = SimpleNamespace(
        reloads=SimpleNamespace(end=ended.append),
        counters=SimpleNamespace(note_round=lambda *round: rounds.append(round)),
    )
    living = {state.rid: state for state in states}
    return Conclusion(residence, runtime, living), runtime, ended, living


def test_a_verification_counts_what_is_certain_at_once_and_the_rest_when_it_lands():
    state = request(drafts=[11, 12])
    conclusion, runtime, ended, _ = world(state)
    passenger = conclusion.launch(state, 0, verifies=True, emits=True)
    assert (state.verified, state.loose, state.emitted, state.drafted) == (11, 2, 4, 0)
    assert ended == ["r"], "its staging is free for the next"
    conclusion.land(passenger, [11, 50])
    assert (state.verified, state.loose, state.emitted) == (12, 0, 5)
    assert (state.outputs, state.pending) == ([5, 6, 7, 11, 50], 50)
    assert runtime.told == [("launched", "r", 2), ("verified", "r", 2, 2)]


def test_a_draft_of_an_earlier_round_is_forgotten():
    state = request()
    conclusion, runtime, _, _ = world(state)
    drafted = conclusion.launch(state, 0, verifies=False, emits=False)
    assert state.drafted == 1
    verified = conclusion.launch(state, 0, verifies=True, emits=True)
    conclusion.land(drafted, [99])
    conclusion.land(verified, [99, 50])
    assert (state.drafts, state.drafted) == ([], 0)
    assert ("stop drafted", "r") not in runtime.told
    stopped = conclusion.launch(state, 0, verifies=False, emits=False)
    conclusion.land(stopped, [99])
    assert runtime.told[-1] == ("stop drafted", "r")
    assert state.drafts == [99]


def test_what_lands_after_its_request_has_left_is_nothing():
    state = request(drafts=[11])
    conclusion, runtime, _, living = world(state)
    passenger = conclusion.launch(state, 0, verifies=True, emits=True)
    living["r"] = request()  # it was retracted, and is here again
    conclusion.land(passenger, [11, 50])
    assert living["r"].outputs == [5, 6, 7]
    assert runtime.told == [("launched", "r", 1)]


def test_what_lands_after_its_host_copy_was_lost_is_nothing():
    state = request()
    conclusion, runtime, _, _ = world(state)
    passenger = conclusion.launch(state, 0, verifies=False, emits=False)
    state.lost = True  # the runtime knows it no more, and the draft ends it
    conclusion.land(passenger, [99])
    assert runtime.told == []
