"""A verifier's rows of guests whose drafter drafts: they wait, or verify its drafts."""

from types import SimpleNamespace

import pytest

from vericache_sglang.kv.request import RequestState
from vericache_sglang.observability.counters import Counters
from vericache_sglang.observability.request_stats import RequestStats
from vericache_sglang.remote.guests import Guest
from vericache_sglang.remote.messages import Measured
from vericache_sglang.runtime.forward.draft_tokens import DraftTokenBuffer
from vericache_sglang.runtime.hosting import Hosting
from vericache_sglang.sampling.grammar import MOST_DRAFTS
from vericache_sglang.sampling.profile import GREEDY_FAST, Profile, SamplingRule
from vericache_sglang.scheduling.estimates import Estimates
from vericache_sglang.scheduling.ewma import Ewma
from vericache_sglang.scheduling.iteration_model import Coefficients, IterationModel
from vericache_sglang.scheduling.network import WINDOW_S, NetworkRings
from vericache_sglang.scheduling.plan import Plain, Verify, Wait

MOST, OWN, PROMPT = 4, 1, 10
NOW = 100.01
FULL = [7, 8, 9]
LONG = [7] * (MOST_DRAFTS + 9)
ROOM = {"most": len(LONG), "allocated": 1000, "longest": 1000}


def row(asked, *, allocated=40, longest=50, most=MOST, **own):
    """Return the action of a guest with two output tokens, and its state.

    Args:
        own: Attributes of its state.
    """
    req = SimpleNamespace(
        return_logprob=False,
        rid="g",
        kv=SimpleNamespace(req_pool_idx=OWN, kv_allocated_len=allocated),
        sampling_params=SimpleNamespace(max_new_tokens=longest),
        origin_input_ids=[0] * PROMPT,
        output_ids=[5, 6],
        to_finish=None,
        grammar=None,
    )
    usual = {
        "profile": GREEDY_FAST,
        "stats": RequestStats(enabled=False, draft_length=most),
        "asynchronous": True,
    }
    state = RequestState(
        req=req,
        prompt=PROMPT,
        verified=PROMPT + 1,
        outputs=[5, 6],
        stops=frozenset(),
        **{**usual, **own},
    )
    guest = Guest(bytes(16), 1, 1, "g", [5, 6], 2, waits=True, asked=asked)
    hosting = hosting_of({"g": guest}, "cached", most=most)
    found = hosting.actions({3: state}, 0)
    return found.get(3), state, hosting.draft_tokens


@pytest.mark.parametrize("token_s", [2e-5, float("inf"), None])
def test_a_verifier_tells_what_it_was_measured_to_take(token_s):
    hosting = hosting_of({}, "cached")
    hosting._guests = SimpleNamespace(drafters=2)
    hosting._scheduler.max_total_num_tokens = 1000
    hosting._stored_part = Ewma(0.5, least=0.0, most=1.0)
    hosting.estimates = Estimates(
        iteration=IterationModel(Coefficients(0.1, 0.2, 1e-3, 1e-4))
    )
    hosting.estimates.observe_prefill(2000, 4.0)
    hosting.stored = token_s and SimpleNamespace(token_s=token_s)
    load_s = 1e-5 if token_s == 2e-5 else 0.0
    told = Measured(2, 1000, 0.1, 0.2, 1e-3, 1e-4, 2e-3, load_s)
    assert hosting._measured() == told


def hosting_of(waiting, guest_kv, queue=(), full=False, most=MOST):
    """Return the role of a verifier; its scheduler has a queue and nothing else."""
    hosting = Hosting.__new__(Hosting)
    hosting._most_drafts, hosting._guest_kv = most, guest_kv
    hosting._waiting, hosting._stateless = waiting, {}
    hosting._return_s = Ewma(0.5, least=0.0, most=9.0)
    hosting._rings = NetworkRings(1000)
    hosting._rings.advance(NOW)
    hosting.transport = SimpleNamespace(now=lambda: NOW)
    hosting._counters = Counters()
    hosting.draft_tokens = DraftTokenBuffer(2, most, "cpu")
    queue = list(queue)

    def add(req, *, is_retracted):
        if not hosting.take(None, req, is_retracted):
            queue.append(req)

    hosting._scheduler = SimpleNamespace(
        waiting_queue=queue,
        running_batch=SimpleNamespace(batch_is_full=full),
        _add_request_to_queue=add,
    )
    return hosting


@pytest.mark.parametrize(
    ("asked", "more", "action", "drafts"),
    [
        ((2, FULL), {}, Verify, FULL),
        ((2, [*FULL, 1, 2, 3]), {}, Verify, [*FULL, 1]),
        ((2, FULL), {"longest": 4}, Verify, [7]),
        ((2, FULL), {"longest": 3}, Plain, []),
        ((2, FULL), {"longest": 2}, None, []),
        ((2, []), {}, Plain, []),
        ((2, FULL), {"profile": Profile(SamplingRule.REJECTION)}, Plain, []),
        ((2, LONG), ROOM, Verify, LONG),
        ((2, LONG), {**ROOM, "cursor": object()}, Verify, LONG[:MOST_DRAFTS]),
        (None, {}, Wait, []),
        ((1, FULL), {}, Wait, []),
        ((2, FULL), {"committed_in_flight": 1}, Wait, []),
        ((2, FULL), {"allocated": PROMPT + 1 + MOST}, Wait, []),
        ((2, FULL), {"stats": RequestStats(True, MOST)}, None, []),
    ],
    ids=[
        *(
            "verifies",
            "more than it may",
            "near the end",
            "at the end",
            "ended",
            "one token",
        ),
        *(
            "rejection",
            "many",
            "many with a grammar",
            "nothing asked",
            "an old question",
            "in flight",
        ),
        *("no slots yet", "drafted for here"),
    ],
)
def test_what_a_guest_s_row_does(asked, more, action, drafts):
    done, state, buffer = row(asked, **more)
    assert (type(done) if done else None) is action
    assert state.drafts == drafts
    if action is Verify:
        columns = buffer._draft_tokens.tokens[OWN, : len(drafts) + 1]
        assert columns.tolist() == [6, *drafts]
    if action is Wait:
        assert state.req.vericache_room == 2 * (MOST + 1)


@pytest.mark.parametrize(
    ("guest_kv", "queue", "full", "leaves"),
    [
        ("cached", ["other"], True, []),
        ("stateless", [], False, ["a", "b"]),
        ("auto", [], True, []),
        ("auto", ["other"], False, []),
        ("auto", ["other"], True, ["b"]),
    ],
)
def test_which_guests_leave_their_kv(guest_kv, queue, full, leaves):
    states, waiting = {}, {}
    rows = [("a", 20, None), ("b", 30, (1, FULL)), ("c", 40, (2, FULL))]
    for i, (rid, length, asked) in enumerate(rows):
        _, state, _ = row(None)
        state.req.rid, state.verified = rid, length
        states[i] = state
        waiting[rid] = Guest(bytes(16), i, 1, rid, [5, 6], 2, waits=True, asked=asked)
    hosting_of(waiting, guest_kv, queue, full).actions(states, 1)
    assert [each.rid for each in states.values() if each.lost] == leaves


@pytest.mark.parametrize(
    "change",
    [
        {"committed_in_flight": 1},
        {"tokens": [5]},
        {"to_finish": "an abort"},
    ],
)
def test_a_guest_with_unreported_tokens_keeps_its_kv(change):
    unreported = change.get("committed_in_flight", 0)
    _, state, _ = row(None, committed_in_flight=unreported)
    state.req.output_ids = change.get("tokens", [5, 6])
    state.req.to_finish = change.get("to_finish")
    guest = Guest(bytes(16), 1, 1, "g", [5, 6], 2, waits=True)
    hosting_of({"g": guest}, "stateless").actions({0: state}, 0)
    assert not state.lost


@pytest.mark.parametrize(
    "event",
    ["drafts", "drafts announced", "a drafter that drafts no more", "abort"],
)
def test_a_stateless_guest_is_queued_for_its_drafts_and_its_end(event):
    _, state, _ = row(None)
    req = state.req
    guest = Guest(bytes(16), 1, 1, "g", [5, 6], 2, waits=True, asked=(1, FULL))
    hosting = hosting_of({"g": guest}, "stateless")
    queue = hosting._scheduler.waiting_queue
    hosting._scheduler._add_request_to_queue(req, is_retracted=True)
    assert (queue, [*hosting.in_flight]) == ([], [req])
    hosting._readmit()
    assert queue == []
    if event == "drafts":
        guest.asked = (2, FULL)
    elif event == "drafts announced":
        guest.expected = (2, NOW + 0.4)
    elif event == "abort":
        req.to_finish = "abort"
    else:
        hosting._waiting = {}
    hosting._readmit()
    pass_time(hosting, WINDOW_S)
    hosting._readmit()
    assert (queue, [*hosting.in_flight]) == ([req], [])
    assert hosting._counters.remote_prepared == (event == "drafts announced")
    # Its prefill decides nothing: drafts are verified behind its last token.
    assert (req.output_ids, req.vericache_known) == ([5], (1, 6, None))


@pytest.mark.parametrize(
    ("base", "in_s", "expected"),
    [(2, 0.4, True), (2, 0.6, False), (2, -0.9, True), (2, -1.1, False), (1, 0, False)],
)
@pytest.mark.parametrize("short", [False, True])
def test_a_guest_has_its_kv_while_drafts_are_expected(base, in_s, expected, short):
    """They are expected for a second, from the time that it takes to bring KV back.

    Requests that wait for memory come first.
    """
    guest = Guest(bytes(16), 1, 1, "g", [5, 6], 2, waits=True)
    guest.expected = base, NOW + in_s
    _, state, _ = row(None)
    others = ["other"] if short else []
    expected = expected and not short
    hosting = hosting_of({"g": guest}, "stateless", others, full=short)
    hosting.actions({0: state}, 0)
    assert state.lost is not expected
    hosting._scheduler._add_request_to_queue(state.req, is_retracted=True)
    hosting._readmit()
    pass_time(hosting, WINDOW_S)
    hosting._readmit()
    assert (state.req in hosting._scheduler.waiting_queue) is expected


def pass_time(hosting, seconds):
    now = hosting.transport.now() + seconds
    hosting.transport.now = lambda: now
    hosting._rings.advance(now)


@pytest.mark.parametrize(
    ("slots", "starts_s"),
    [(1000, [1.05, 1.55]), (PROMPT + 2 + MOST, [1.0, 1.55]), (PROMPT, [])],
    ids=["the link is shared", "slots for one", "no slots"],
)
def test_the_return_of_kv_is_reserved_on_the_link_and_in_the_pool(slots, starts_s):
    """Two guests' drafts are expected in 2 s, their KV takes 0.5 s to bring back."""
    waiting = {}
    hosting = hosting_of(waiting, "stateless")
    hosting._rings.resize(slots)
    for name in "ab":
        _, state, _ = row(None)
        state.req.rid = name
        waiting[name] = Guest(bytes(16), ord(name), 1, name, [5, 6], 2, waits=True)
        waiting[name].expected = 2, NOW + 2.0
        hosting._scheduler._add_request_to_queue(state.req, is_retracted=True)
    queue, seen = hosting._scheduler.waiting_queue, {}
    for window in range(100):
        hosting._readmit()
        for req in queue:
            seen.setdefault(req.rid, window * WINDOW_S)
        pass_time(hosting, WINDOW_S)
    assert sorted(seen.values()) == pytest.approx(starts_s)


def test_a_reservation_ends_with_the_row_and_with_the_guest():
    _, state, _ = row(None)
    guest = Guest(bytes(16), 1, 1, "g", [5, 6], 2, waits=True)
    guest.expected = 2, NOW + 0.5
    hosting = hosting_of({"g": guest}, "stateless")
    hosting._scheduler.tree_cache = SimpleNamespace(
        evictable_size=lambda: 400,
        token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 600),
    )
    hosting._scheduler._add_request_to_queue(state.req, is_retracted=True)
    for reserved in (True, True, False):
        hosting._readmit()
        assert (hosting._rings.starts_s("g") is not None) is reserved
        pass_time(hosting, WINDOW_S)
        if not hosting._stateless:
            hosting.actions({0: state}, 0)
        hosting._reserve(hosting.transport.now())
    assert hosting._rings.free() == 1000


def test_the_time_to_bring_kv_back_is_measured_to_the_row():
    _, state, _ = row(None)
    guest = Guest(bytes(16), 1, 1, "g", [5, 6], 2, waits=True)
    hosting = hosting_of({"g": guest}, "cached")
    hosting._scheduler._add_request_to_queue(state.req, is_retracted=True)
    guest.asked = (2, FULL)
    hosting._readmit()
    hosting.transport.now = lambda: NOW + 3.0
    hosting.actions({}, 0)
    for later in (3.0, 4.0):
        hosting.transport.now = lambda later=later: NOW + later
        hosting.actions({0: state}, 0)
        assert hosting._return_s.value == 3.0


def test_a_guest_that_is_retracted_with_drafts_is_queued_at_once():
    _, state, _ = row(None)
    guest = Guest(bytes(16), 1, 1, "g", [5, 6], 2, waits=True, asked=(2, FULL))
    hosting = hosting_of({"g": guest}, "cached")
    hosting._scheduler._add_request_to_queue(state.req, is_retracted=True)
    assert hosting._scheduler.waiting_queue == [state.req]
    assert state.req.vericache_known == (1, 6, None)
