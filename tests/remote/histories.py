"""Random histories of a drafter and two verifiers over a network that loses messages.

The world's truth is a function: token ``p`` of request ``rid`` is ``truth(rid, p)``. A
request ends after a number of tokens that only its owner knows.

``python tests/remote/histories.py COUNT FILE`` lives through more of them than
the tests do, and writes what happened in them.
"""

import json
import logging
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random

from msgspec.structs import replace

from vericache_sglang.observability.counters import Counters
from vericache_sglang.provenance import provenance
from vericache_sglang.remote.guests import Guests
from vericache_sglang.remote.messages import (
    Hello,
    Logprobs,
    WantedLogprobs,
    decode_to_drafter,
    decode_to_verifier,
    encode,
    pack,
    unpack,
)
from vericache_sglang.remote.owner import OwnedRequest, Owner

VOCABULARY = 1 << 20
HELLO = Hello(bytes(16), 1, "0.5.21", "0.1", "model", VOCABULARY, "same")
LEASE_S = 3.0
STEP_S = 0.05
REQUESTS = 4
ENDPOINTS = ("tcp://a", "tcp://b")
COUNTED = ("resends", "failovers", "stale", "relayed_tokens", "lease_expiries")


def truth(rid, position):
    """Return the output token of a request at a position."""
    return (rid * 7919 + position * 104729 + 13) % VOCABULARY


def logprobs(rid, first, end):
    """Return the log-probabilities of some output tokens of a request."""
    each = (Logprobs(-float(truth(rid, p)), ((), (p,))) for p in range(first, end))
    return tuple(each)


def agreed(rid, tokens, drafts):
    """Return how many drafts behind ``tokens`` are right."""
    right = [d == truth(rid, len(tokens) + i) for i, d in enumerate(drafts)]
    return (*right, False).index(False)


class Verifier:
    """A verifier's process, which may be killed and started again."""

    def __init__(self, dice):
        self._dice = dice
        self.counters = Counters()
        self.running = {}
        self.ends = dice.choice((0.0, 0.01))
        self.loses = dice.choice((0.0, 0.002))
        self.guests = Guests(
            *(HELLO, dice.choice((1, REQUESTS)), LEASE_S, self.counters),
            start=self._start,
            stop=lambda guest: self.running.pop((guest.drafter, guest.rid)),
        )

    def _start(self, instance, message):
        assert unpack(message.prompt)[0] == message.rid
        committed = list(unpack(message.committed))
        self.running[instance, message.rid] = committed
        return "", committed

    def step(self):
        """Compute some tokens of every guest; lose one now and then."""
        for guest in self.guests.running():
            tokens = self.running[guest.drafter, guest.rid]
            if self._dice.random() < self.loses:
                del self.running[guest.drafter, guest.rid]
                self.guests.lose(guest)
                continue
            count = self._dice.choice((0, 1, 1, 5))
            if guest.waits:
                drafts = guest.drafts(len(tokens)) if count else None
                count = 0 if drafts is None else 1 + agreed(guest.rid, tokens, drafts)
            for _ in range(count):
                tokens.append(truth(guest.rid, len(tokens)))
            # Too early, or too late: only the owner knows where a request ends.
            finished = self._dice.random() < self.ends
            if guest.logprobs is not None:
                first = guest.opened + len(guest.logprobs)
                guest.logprobs += logprobs(guest.rid, first, len(tokens))
            self.guests.advance(guest, tokens, finished)
            if finished:
                del self.running[guest.drafter, guest.rid]


class History:
    """One history: everything that is random comes from ``seed``."""

    def __init__(self, seed):
        self.dice = Random(seed)
        self.now = 0.0
        self.wire = []  # (due, order, to_drafter, verifier, connection, bytes)
        self.loss = self.dice.choice((0.0, 0.05, 0.3))
        self.verifiers = [Verifier(self.dice) for _ in ENDPOINTS]
        # Its process sends heartbeats, and does nothing else.
        self.hanging = self.dice.choice((None, None, None, 0, 1))
        self.cut_until = [0.0 for _ in ENDPOINTS]
        self.finished = {}
        self.restarts = 0
        self._order = 0
        self._begin_drafter()

    def _begin_drafter(self):
        self.counters = Counters()
        instance = self.dice.randbytes(16)
        self.connection = instance  # one connection per process
        hello = replace(HELLO, instance=instance)
        self.owner = Owner(ENDPOINTS, hello, LEASE_S, VOCABULARY, self.counters)
        self.outputs, self.lengths, self.local = {}, {}, set()
        self.logprobs = {}
        self.drafting = {}  # rid -> output tokens before the last drafts
        self.verified = 0
        self.next_rid = 0

    def run(self):
        """Live through faults, then through peace; check all that must hold."""
        for _ in range(120):
            self._fault()
            self._submit()
            self._step()
        self.loss, self.cut_until = 0.0, [0.0 for _ in ENDPOINTS]
        for _ in range(int(20 * LEASE_S / STEP_S)):
            self._step()
            if not self.lengths and self._still():
                break
        assert self.lengths == {}, "every request finishes"
        assert self._still(), "no guest is left"
        return self

    def _still(self):
        return not any(
            each.running
            for which, each in enumerate(self.verifiers)
            if which != self.hanging
        )

    def _fault(self):
        which = self.dice.randrange(len(ENDPOINTS))
        chance = self.dice.random()
        if chance < 0.008:
            self.restarts += 1
            self.verifiers[which] = Verifier(self.dice)
        elif chance < 0.012:
            self.restarts += 1
            self._begin_drafter()
        elif chance < 0.02:
            self.cut_until[which] = self.now + self.dice.choice((0.5, 2.5, 5.0))

    def _submit(self):
        if len(self.lengths) >= REQUESTS or self.dice.random() > 0.2:
            return
        rid, self.next_rid = self.next_rid, self.next_rid + 1
        self.outputs[rid] = []
        self.lengths[rid] = self.dice.choice((1, 7, 40))
        wanted = WantedLogprobs(0, None) if rid % 2 else None
        request = OwnedRequest(rid, pack([rid]), b"", self.outputs[rid], wanted)
        self.logprobs[rid] = request.logprobs
        if not self.owner.open(request, self.now):
            self.local.add(rid)

    def _step(self):
        self.now += STEP_S
        self._deliver()
        self._commit()
        self.owner.tick(self.now)
        self._commit()
        self._draft()
        for rid in list(self.local):  # computed here, a token a step
            self.outputs[rid].append(truth(rid, len(self.outputs[rid])))
            self._check(rid)
        for which, verifier in enumerate(self.verifiers):
            if which != self.hanging or self.now < 2.0:
                verifier.step()
                verifier.guests.tick(self.now)
        self._send()

    def _draft(self):
        """Begin to draft for a request, send drafts, or leave it to its verifier."""
        for rid, output in self.outputs.items():
            if rid not in self.lengths or rid in self.local:
                self.drafting.pop(rid, None)
            elif rid not in self.drafting:
                if self.dice.random() < 0.05:
                    self._verify(rid, 0)
            elif self.dice.random() < 0.01:
                del self.drafting[rid]
                self.owner.relay(rid, output, self.now)
            elif len(output) > self.drafting[rid]:
                if self.dice.random() < 0.5:
                    self._verify(rid, self.dice.choice((0, 1, 4)))
                else:
                    self.owner.prepare(rid, self.dice.random())

    def _verify(self, rid, count):
        begin = self.drafting[rid] = len(self.outputs[rid])
        wrong = self.dice.choice((0, 1, 3, 9))
        drafts = [truth(rid, begin + i) + (i == wrong) for i in range(count)]
        self.verified += count
        self.owner.verify(rid, drafts, self.now)

    def _commit(self):
        for rid, tokens in self.owner.committed.items():
            assert tokens > 0
            self._check(rid)
        self.owner.committed.clear()
        for rid in self.owner.returned:
            if rid in self.lengths:
                self.local.add(rid)
        self.owner.returned.clear()

    def _check(self, rid):
        output = self.outputs[rid]
        assert output == [truth(rid, p) for p in range(len(output))], "a wrong token"
        if rid % 2 and rid not in self.local:
            assert (*self.logprobs[rid],) == logprobs(rid, 0, len(output))
        if len(output) >= self.lengths[rid]:
            del self.lengths[rid]
            self.local.discard(rid)
            self.owner.close(rid)

    def _send(self):
        beat = self.dice.random() < 0.2
        for which, message in self.owner.outbox:
            self._post(False, which, message)
        self.owner.outbox.clear()
        if beat:
            for which, message in enumerate(self.owner.beats()):
                self._post(False, which, message)
        for which, verifier in enumerate(self.verifiers):
            messages = verifier.guests.outbox[:]
            verifier.guests.outbox.clear()
            if beat:
                messages += verifier.guests.beats().items()
            for connection, message in messages:
                if connection == self.connection:
                    self._post(True, which, message)

    def _post(self, to_drafter, which, message):
        """Put a message on the wire, or lose it, or repeat it, or delay it."""
        if self.now < self.cut_until[which] or self.dice.random() < self.loss:
            return
        for _ in range(2 if self.dice.random() < self.loss else 1):
            due = self.now
            if self.dice.random() < self.loss:
                due += self.dice.random()
            self._order += 1
            place = (due, self._order, to_drafter, which, self.connection)
            self.wire.append((*place, encode(message)))

    def _deliver(self):
        due = sorted(each for each in self.wire if each[0] <= self.now)
        self.wire = [each for each in self.wire if each[0] > self.now]
        for _, _, to_drafter, which, connection, data in due:
            if not to_drafter:
                guests = self.verifiers[which].guests
                if which != self.hanging or self.now < 2.0:
                    guests.receive(connection, decode_to_verifier(data), self.now)
            elif connection == self.connection:
                self.owner.receive(which, decode_to_drafter(data), self.now)


def live(seeds):
    """Live through the histories of some seeds; return how often what happened.

    Raises:
        AssertionError: A wrong token, a request that does not end, a guest left over.
    """
    seen = Counter()
    for seed in seeds:
        history = History(seed).run()
        counted = [history.counters, *(each.counters for each in history.verifiers)]
        for key in COUNTED:
            seen[key] += sum(getattr(each, f"remote_{key}") for each in counted)
        seen["restarts"] += history.restarts
        seen["drafts"] += history.verified
        seen["histories"] += 1
    return seen


def main(count, file):
    seen, size = Counter(), 500
    parts = [range(i, min(i + size, int(count))) for i in range(0, int(count), size)]
    quiet = {"initializer": logging.disable, "initargs": (logging.WARNING,)}
    with ProcessPoolExecutor(os.cpu_count(), **quiet) as pool:
        for part in pool.map(live, parts):
            seen += part
    found = {**provenance([count, file], "python tests/remote/histories.py"), **seen}
    Path(file).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
