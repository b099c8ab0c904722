"""The protocol of drafters and verifiers, without sockets, SGLang or a clock."""

import logging

import pytest
from histories import ENDPOINTS, HELLO, LEASE_S, VOCABULARY, live, logprobs
from msgspec.structs import replace

from vericache_sglang.errors import MessageError
from vericache_sglang.observability.counters import Counters
from vericache_sglang.remote.guests import Guest, Guests
from vericache_sglang.remote.messages import (
    CHANGED,
    Busy,
    Close,
    Heartbeat,
    Measured,
    Open,
    Prepare,
    Refuse,
    Resend,
    Unknown,
    Verdict,
    VerifyDrafts,
    Welcome,
    decode_to_drafter,
    encode,
    pack,
)
from vericache_sglang.remote.owner import MOST_EPOCHS, OwnedRequest, Owner
from vericache_sglang.remote.verifiers import (
    BEAT_S,
    DEAD_S,
    PATIENCE,
    STILL_S,
    rendezvous,
)


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    "seeds", [range(400), pytest.param(range(400, 1_500), marks=pytest.mark.extended)]
)
def test_random_histories_commit_the_right_tokens_and_leave_no_guest(seeds):
    """``python tests/remote/histories.py`` lives through more."""
    seen = live(seeds)
    assert seen.pop("histories") == len(seeds)
    assert min(seen.values()) > len(seeds) // 10, seen


class Host:
    """A verifier's side with one welcomed drafter, ``b"c"``."""

    def __init__(self, most=2):
        self.started, self.stopped = [], []
        self.guests = Guests(
            *(HELLO, most, LEASE_S, Counters()), start=self._start, stop=self._stop
        )
        self.tell(HELLO)
        assert self.said() == [Welcome()]

    def _start(self, instance, message):
        if message.params:
            raise MessageError("bad parameters")
        self.started.append((message.rid, message.epoch))
        return "name", [7, 8]

    def _stop(self, guest):
        self.stopped.append((guest.rid, guest.epoch))

    def tell(self, *messages):
        for message in messages:
            self.guests.receive(b"c", message, 0.0)

    def said(self):
        messages = [message for _, message in self.guests.outbox]
        self.guests.outbox.clear()
        return messages


def test_tokens_are_told_with_their_log_probabilities_alone():
    """A verifier's list of tokens may be longer: log-probabilities are read later."""
    guest = Guest(bytes(16), 1, 1, "name", [7, 8], 2)
    guest.tokens, guest.logprobs = [7, 8, 5, 6, 4], [*logprobs(1, 2, 4)]
    for asked, base, tokens in ((0, 2, [5, 6]), (3, 3, [6]), (5, 4, [])):
        told = logprobs(1, base, 4)
        assert guest.verdict(asked) == Verdict(1, 1, base, pack(tokens), False, told)
    guest.logprobs = None
    assert guest.verdict(1) == Verdict(1, 1, 1, pack([8, 5, 6, 4]), False)


def opening(rid=1, epoch=1, params=b""):
    return Open(rid, epoch, pack([1, 2]), params, pack([7, 8]))


@pytest.mark.parametrize(
    ("messages", "stopped", "said"),
    [
        ([opening(), opening()], [], []),
        ([opening(epoch=2), opening(epoch=1)], [], []),
        ([opening(), opening(epoch=2)], [(1, 1)], []),
        ([opening(epoch=2), Close(1, 1)], [], []),
        ([opening(), Close(1, 1), Close(1, 1)], [(1, 1)], []),
        ([opening(), Resend(1, 1, 1)], [], [Verdict(1, 1, 1, pack([8]), False)]),
        ([opening(), Resend(1, 1, 9)], [], [Verdict(1, 1, 2, b"", False)]),
        (
            [opening(), VerifyDrafts(1, 1, 0, b"")],
            [],
            [Verdict(1, 1, 0, pack([7, 8]), False)],
        ),
        ([opening(), VerifyDrafts(1, 1, 2, b"")], [], []),
        (
            [opening(), *[VerifyDrafts(1, 1, 2, pack([9]))] * 2],
            [],
            [Verdict(1, 1, 2, b"", False)],
        ),
        ([opening(), VerifyDrafts(1, 2, 2, b"")], [], [Unknown(1, 2)]),
        ([opening(), Prepare(1, 1, 2, 500)], [], []),
        ([opening(), Prepare(1, 2, 2, 500)], [], [Unknown(1, 2)]),
        ([opening(), Resend(1, 2, 0)], [], [Unknown(1, 2)]),
        ([Resend(3, 1, 0)], [], [Unknown(3, 1)]),
        ([opening(), *[Heartbeat(5, ())] * 5], [], []),
        ([opening(), Heartbeat(5, ()), Heartbeat(6, (1,)), Heartbeat(7, ())], [], []),
        ([opening(), Heartbeat(5, ()), Heartbeat(6, ())], [(1, 1)], []),
        (
            [opening(1), opening(2), opening(3)],
            [],
            [Busy(3, 1, 500, "2 guests are here")],
        ),
    ],
)
def test_what_a_verifier_does(messages, stopped, said):
    host = Host()
    host.tell(*messages)
    assert (host.stopped, host.said()) == (stopped, said)
    assert len(host.started) == len(set(host.started)), "nothing begins twice"
    assert len(host.guests) == len(host.started) - len(stopped)


def test_a_request_that_cannot_begin_is_malformed():
    host = Host()
    with pytest.raises(MessageError, match="bad parameters"):
        host.tell(opening(params=b"x"))
    assert host.said() == [Busy(1, 1, 0, "bad parameters")]
    host.tell(opening())
    assert host.started == [(1, 1)]


@pytest.mark.parametrize(
    "field", [n for n in HELLO.__struct_fields__ if n != "instance"]
)
def test_an_altered_hello_is_refused_and_logged_on_both_sides(field, caplog):
    logging.disable(logging.NOTSET)
    altered = 2 if isinstance(getattr(HELLO, field), int) else "other"
    hello = replace(HELLO, **{field: altered})
    host = Host()
    host.guests.receive(b"d", hello, 0.0)
    host.guests.receive(b"d", hello, 0.0)
    refusal, _ = host.said()
    assert isinstance(refusal, Refuse)
    assert f"{field} is {altered!r}, here {getattr(HELLO, field)!r}" in refusal.reason
    host.guests.receive(b"d", opening(), 0.0)
    assert host.started == []
    owner = Owner(ENDPOINTS, hello, LEASE_S, VOCABULARY, Counters())
    owner.receive(0, refusal, 0.0)
    owner.receive(0, refusal, 0.1)
    assert not owner.open(OwnedRequest(1, b"", b"", []), 0.1)
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 2, "each side says it once"
    assert all(field in error for error in errors)


def drafting(*serving, tokens=()):
    """Return an owner whose verifiers serve at time 0, with request 1 open."""
    owner = Owner(ENDPOINTS, HELLO, LEASE_S, VOCABULARY, Counters())
    for each in serving:
        owner.receive(each, Welcome(), 0.0)
    request = OwnedRequest(1, pack([1, 2]), b"", list(tokens))
    opened = owner.open(request, 0.0)
    return owner, request, opened


def sent(owner):
    messages = owner.outbox[:]
    owner.outbox.clear()
    return messages


def test_a_drafter_without_verifiers_computes_by_itself():
    owner, _, opened = drafting()
    assert not opened
    assert owner.outbox == []


def test_the_ladder_asks_again_then_moves_then_returns_with_all_tokens():
    owner, request, _ = drafting(0, 1)
    first = request.verifier
    assert sent(owner) == [(first, Open(1, 1, pack([1, 2]), b"", b""))]
    owner.receive(first, Verdict(1, 1, 0, pack([5, 6]), False), 0.01)
    for now in (0.2, 0.5, 1.0, 1.9):  # the pause doubles
        owner.tick(now)
    asked = sent(owner)
    assert asked[0] == (first, Resend(1, 1, 2))
    assert 2 <= len(asked) <= 4
    owner.receive(1 - first, Heartbeat(1, ()), 2.2)
    owner.tick(0.01 + DEAD_S + 0.2)
    assert sent(owner)[-1] == (
        1 - first,
        Open(1, 2, pack([1, 2]), b"", pack([5, 6])),
    )
    owner.receive(first, Verdict(1, 1, 2, pack([9]), False), 2.3)
    assert request.tokens == [5, 6], "a verdict of the first attempt is stale"
    owner.receive(1 - first, Busy(1, 2, 500, ""), 2.4)
    assert owner.returned == [1]
    assert request.tokens == [5, 6]


@pytest.mark.parametrize(
    ("runs", "moved_s"),
    [(True, LEASE_S), (False, STILL_S + PATIENCE * (LEASE_S - STILL_S))],
)
def test_a_lease_runs_slower_while_a_scheduler_stands_still(runs, moved_s):
    """A long forward ends; what a running scheduler does not answer is forgotten."""
    owner, request, _ = drafting(0, 1)
    first, step = request.verifier, BEAT_S / 2
    for i in range(1, 1000):
        owner.receive(first, Heartbeat(i if runs else 1, ()), i * step)
        owner.receive(1 - first, Heartbeat(i, ()), i * step)
        owner.tick(i * step)
        if request.verifier != first:
            break
    assert moved_s - LEASE_S / 3 < i * step < moved_s + LEASE_S / 3
    assert owner.returned == []


def test_what_comes_behind_a_long_forward_is_committed():
    owner, request, _ = drafting(0)
    for i in range(1, 40):
        owner.receive(0, Heartbeat(1, ()), i * BEAT_S)
        owner.tick(i * BEAT_S)
    late = 40 * BEAT_S
    assert late > 3 * LEASE_S
    owner.receive(0, Heartbeat(2, ()), late)
    owner.tick(late)
    owner.receive(0, Verdict(1, 1, 0, pack([5]), False), late + 0.1)
    assert (request.tokens, owner.returned) == ([5], [])


def test_a_request_that_waits_in_a_verifier_s_queue_asks_for_signs_of_life():
    """However rarely verdicts come: here nearly once a lease, then none for three."""
    owner, request, _ = drafting(0)
    at, step = 0.0, LEASE_S / 20
    for _ in range(20):
        at += 0.9 * LEASE_S
        owner.receive(0, Verdict(1, 1, len(request.tokens), pack([5]), False), at)
    owner.open(OwnedRequest(2, pack([3, 4]), b"", []), at)
    sent(owner)
    for i in range(1, 60):
        owner.receive(0, Heartbeat(i, ()), at + i * step)
        owner.tick(at + i * step)
        if (0, Resend(2, 1, 0)) in sent(owner):
            owner.receive(0, Verdict(2, 1, 0, b"", False), at + i * step)
    assert 2 not in owner.returned


def test_the_time_per_token_is_that_of_requests_that_verifiers_decode():
    owner, request, _ = drafting(0)
    assert owner.token_s[False].value == 0.0
    owner.receive(0, Verdict(1, 1, 0, pack([5]), False), 3.0)
    assert owner.token_s[False].value == 0.0, "a prefill is not counted"
    assert owner.first_s[False].value == 3.0, "but in the time to the first token"
    owner.receive(0, Verdict(1, 1, 1, pack([6, 7]), False), 3.5)
    assert owner.token_s[False].value == 0.25
    owner.verify(1, [8], 4.0)
    owner.receive(0, Verdict(1, 1, 3, pack([8, 9]), False), 9.0)
    owner.relay(1, request.tokens, 9.0)
    owner.receive(0, Verdict(1, 1, 5, pack([5]), False), 14.0)
    assert owner.token_s[False].value == 0.25, "nor what was asked for behind drafts"
    owner.receive(0, Verdict(1, 1, 6, pack([5]), False), 15.25)
    assert 0.25 < owner.token_s[False].value < 1.25
    assert owner.first_s[False].value == 3.0


MEASURED = Measured(2, 1000, 0.25, *[0.5] * 5)


def test_a_drafter_knows_what_the_verifiers_that_serve_it_have_measured():
    owner, _, _ = drafting(0, 1)
    assert owner.measured == []
    owner.receive(0, Heartbeat(1, (), MEASURED), 0.1)
    owner.receive(0, Heartbeat(2, ()), 0.2)
    assert owner.measured == [MEASURED], "a heartbeat without any says nothing new"
    owner.receive(1, Heartbeat(2, ()), 0.1 + DEAD_S)
    owner.tick(0.3 + DEAD_S)
    assert owner.measured == []


def test_a_verifier_counts_the_drafters_that_have_requests_there():
    host = Host()
    assert host.guests.drafters == 0
    host.tell(opening(1), opening(2))
    assert host.guests.drafters == 1
    (beat,) = host.guests.beats(MEASURED).values()
    assert decode_to_drafter(encode(beat)) == beat == Heartbeat(1, (), MEASURED)


@pytest.mark.parametrize("value", [-1.0, 61.0, float("inf"), float("nan"), "1"])
def test_impossible_measurements_are_malformed(value):
    beat = Heartbeat(1, (), replace(MEASURED, prompt_s=value))
    with pytest.raises(MessageError):
        decode_to_drafter(encode(beat))


def test_a_verifier_that_keeps_forgetting_is_left_at_last():
    owner, _, _ = drafting(0)
    for epoch in range(1, MOST_EPOCHS + 1):
        assert owner.returned == []
        owner.receive(0, Unknown(1, epoch), 0.1)
    assert owner.returned == [1]
    assert sent(owner)[-1] == (0, Close(1, MOST_EPOCHS))


@pytest.mark.parametrize(
    ("verdict", "tokens"),
    [
        (Verdict(1, 1, 2, pack([5]), False), [3, 4, 5]),
        (Verdict(1, 1, 0, pack([3, 4, 5]), False), [3, 4, 5]),
        (Verdict(1, 1, 0, pack([3]), False), [3, 4]),
        (Verdict(1, 1, 3, pack([6]), False), [3, 4]),
        (Verdict(2, 1, 2, pack([5]), False), [3, 4]),
    ],
    ids=["next", "overlapping", "old", "gap", "another request"],
)
def test_only_tokens_behind_the_present_ones_are_committed(verdict, tokens):
    owner, request, _ = drafting(0, tokens=[3, 4])
    owner.receive(0, verdict, 0.1)
    assert request.tokens == tokens
    assert owner.committed == ({1: 1} if len(tokens) == 3 else {})


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(1, 1, 0, b"abc", False),
        Verdict(1, 1, 0, pack([VOCABULARY]), False),
        Verdict(1, 2, 0, pack([5]), False),
    ],
    ids=["bytes", "token", "epoch"],
)
def test_impossible_verdicts_are_malformed(verdict):
    owner, request, _ = drafting(0)
    with pytest.raises(MessageError):
        owner.receive(0, verdict, 0.1)
    assert request.tokens == []


def test_a_guest_waits_for_its_owner_s_drafts():
    host = Host()
    host.tell(opening())
    (guest,) = host.guests.running()
    assert not guest.waits
    host.tell(VerifyDrafts(1, 1, 1, pack([9])))
    assert (guest.waits, guest.drafts(2)) == (True, None)
    host.tell(VerifyDrafts(1, 1, 2, pack([9])), VerifyDrafts(1, 1, 1, b""))
    assert guest.drafts(2) is None, "an old one has come late; it is asked again"
    host.tell(VerifyDrafts(1, 1, 2, pack([9])))
    assert list(guest.drafts(2)) == [9]
    assert guest.drafts(3) is None, "they were for another place"
    with pytest.raises(MessageError, match="vocabulary"):
        host.tell(VerifyDrafts(1, 1, 2, pack([VOCABULARY])))
    host.tell(Resend(1, 1, 2))
    assert not guest.waits


def test_drafts_are_announced_with_their_place_and_time():
    owner, request, _ = drafting(0, tokens=[3, 4])
    owner.prepare(1, 0.25)
    announced = Prepare(1, 1, 2, 250)
    assert sent(owner)[1:] == [(request.verifier, announced)]
    owner.prepare(9, 0.25)
    assert sent(owner) == [], "that request is not open"
    host = Host()
    host.tell(opening(), announced)
    (guest,) = host.guests.running()
    assert not guest.waits, "its owner may never send them"
    assert guest.expected == (2, 0.25)


def test_guests_are_verified_in_the_order_in_which_they_were_asked():
    host = Host()
    host.tell(opening(1), opening(2))
    for rid in (2, 1, 2, 2):
        host.tell(VerifyDrafts(rid, 1, 2, pack([rid])))
    assert [guest.rid for guest in host.guests.running()] == [2, 1]
    host.tell(VerifyDrafts(2, 1, 2, pack([9])))
    assert [guest.rid for guest in host.guests.running()] == [1, 2]


def test_drafts_are_asked_for_again_and_move_with_their_request():
    owner, request, _ = drafting(0, tokens=[3])
    first = request.verifier
    owner.verify(1, [4, 5], 0.0)
    asked = VerifyDrafts(1, 1, 1, pack([4, 5]))
    assert sent(owner)[1:] == [(first, asked)]
    owner.tick(0.2)
    assert sent(owner) == [(first, asked)]
    owner.receive(first, Unknown(1, 1), 0.3)
    *_, opened, again = sent(owner)
    assert opened == (first, Open(1, 2, pack([1, 2]), b"", pack([3])))
    assert again == (first, VerifyDrafts(1, 2, 1, pack([4, 5])))
    owner.receive(first, Verdict(1, 2, 1, pack([4, 9]), False), 0.4)
    owner.tick(1.0)
    assert sent(owner) == [], "its next drafts are not there yet"
    owner.receive(first, Verdict(1, 2, 5, pack([7]), False), 1.1)
    assert sent(owner) == [(first, VerifyDrafts(1, 2, 3, b""))], "some were lost"
    tokens = [3, 4, 9]
    owner.relay(1, tokens, 1.2)
    assert sent(owner) == [(first, Resend(1, 2, 3))]
    owner.receive(first, Verdict(1, 2, 3, pack([6]), False), 1.3)
    assert tokens == [3, 4, 9, 6]


def test_a_request_that_its_verifier_ends_too_early_returns():
    owner, request, _ = drafting(0)
    owner.receive(0, Verdict(1, 1, 0, pack([5]), True), 0.1)
    owner.tick(0.1)
    assert owner.returned == [], "its owner has not looked at the token yet"
    owner.committed.clear()
    owner.tick(0.1)
    assert (owner.returned, request.tokens) == ([1], [5])


def test_new_weights_part_a_server_from_its_peers():
    changed = replace(HELLO, fingerprint=CHANGED)
    host = Host()
    host.tell(opening())
    host.guests.change(changed)
    assert host.stopped == [(1, 1)]
    host.tell(opening(2))
    assert host.said() == [], "it has to say hello again"
    host.tell(HELLO)
    assert isinstance(host.said()[0], Refuse)
    owner, _, _ = drafting(0)
    owner.change(changed)
    owner.tick(0.1)
    assert owner.returned == [1]
    assert owner.beats() == [changed] * 2


def test_a_guest_that_the_verifier_has_ended_is_unknown():
    host = Host()
    host.tell(opening())
    (guest,) = host.guests.running()
    host.guests.lose(guest)
    assert host.said() == [Unknown(1, 1)]
    assert len(host.guests) == 0
    assert host.stopped == []


def test_a_lost_verifier_moves_only_its_own_prompts():
    endpoints = [f"tcp://10.0.0.{i}:1" for i in range(4)]
    for key in (bytes([n]) for n in range(50)):
        order = rendezvous(key, endpoints)
        assert sorted(order) == [0, 1, 2, 3]
        left = rendezvous(key, endpoints[:3])
        assert left == [i for i in order if i != 3]
    firsts = {rendezvous(bytes([n]), endpoints)[0] for n in range(50)}
    assert firsts == {0, 1, 2, 3}
