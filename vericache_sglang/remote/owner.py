"""The drafter's side of the protocol: it owns requests, verifiers compute their tokens.

Only the owner commits tokens. A verdict counts if it is of the present attempt (epoch)
and verifier of a request, and only what lies behind the tokens that are there already,
so messages may be lost, repeated and reordered. What gets no answer is asked for again;
then the request moves to another verifier with the next epoch; then it returns to the
drafter, which prefills it with the tokens so far. For a request that it drafts for, the
drafter asks for the tokens behind its drafts, and its verifier computes no others. No
SGLang, no sockets, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from vericache_sglang.errors import MessageError
from vericache_sglang.remote.messages import (
    Busy,
    Close,
    Open,
    Prepare,
    Resend,
    Unknown,
    Verdict,
    VerifyDrafts,
    pack,
    unpack,
)
from vericache_sglang.remote.verifiers import KnownVerifier, State, rendezvous
from vericache_sglang.scheduling.ewma import Ewma

if TYPE_CHECKING:
    from collections.abc import MutableSequence, Sequence

    from vericache_sglang.observability.counters import Counters
    from vericache_sglang.remote.messages import (
        Hello,
        Logprobs,
        Measured,
        Message,
        ToDrafter,
        WantedLogprobs,
    )

LEAST_PAUSE_S = 0.1
"""Shortest time before tokens are asked for again, in seconds."""
PAUSES = 4
"""It is this many mean times between verdicts."""
MOST_EPOCHS = 6
"""Attempts of a request; then it returns to the drafter."""
TOKEN_WEIGHT = 0.03
"""Share of a new token in the mean time per token."""
FIRST_WEIGHT = 0.25
"""Share of a new request in the mean time to the first token."""
KEY_BYTES = 4 * 512
"""Beginning of a prompt that chooses its verifier: one segment."""


@dataclass(slots=True)
class OwnedRequest:
    """A request whose tokens a verifier computes.

    Attributes:
        rid: Its number.
        prompt: Its prompt, packed.
        params: Its sampling parameters, as ``Open`` carries them.
        tokens: Its output tokens; commits append to it.
        wanted: Log-probabilities that it wants.
        logprobs: Of the tokens that were committed; its user empties it.
        epoch: Attempt; 0: none yet.
        verifier: Index of the verifier.
        refused: Verifiers that were busy or failed in this request.
        opened: When it was opened, in seconds.
        answered: When the verifier last answered.
        leased: The same by ``KnownVerifier.clock``.
        asked: When it was last asked.
        pause: Time after which it is asked again, in seconds.
        finished: The verifier says that these are all tokens.
        verify: Last drafts that were to be verified in this attempt; None: the verifier
            computes tokens without any.
        decodes: The verifier's last answer in this attempt was of that kind.
    """

    rid: int
    prompt: bytes
    params: bytes
    tokens: MutableSequence[int]
    wanted: WantedLogprobs | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    epoch: int = 0
    verifier: int = -1
    refused: set[int] = field(default_factory=set)
    opened: float = 0.0
    answered: float = 0.0
    leased: float = 0.0
    asked: float = 0.0
    pause: float = LEAST_PAUSE_S
    finished: bool = False
    verify: VerifyDrafts | None = None
    decodes: bool = False

    @property
    def waits(self) -> bool:
        """Whether tokens are to come from the verifier."""
        return self.verify is None or self.verify.base == len(self.tokens)

    def asking(self) -> Resend | VerifyDrafts:
        """Return the message that asks for the tokens behind the present ones."""
        base = len(self.tokens)
        if self.verify is None:
            return Resend(self.rid, self.epoch, base)
        drafts = self.verify.drafts if self.waits else b""
        self.verify = VerifyDrafts(self.rid, self.epoch, base, drafts)
        return self.verify

    def opening(self) -> Open:
        """Return the message that begins the present attempt."""
        committed = pack(self.tokens)
        return Open(
            *(self.rid, self.epoch, self.prompt, self.params, committed, self.wanted)
        )


class Owner:
    """All requests of a drafter that verifiers compute.

    Args:
        endpoints: Addresses of the verifiers.
        hello: Introduces this drafter.
        lease_s: Time without an answer after which a request moves, in seconds.
        vocabulary: Number of token ids; others are malformed.
        counters: Counts resends, failovers, stale verdicts and tokens.

    Attributes:
        outbox: (index of a verifier, message) to send, in order; the caller empties it.
        committed: rid -> tokens that were appended; the caller empties it.
        returned: Requests that the drafter must compute; the caller empties it.
        token_s: Seconds per token of a request that a verifier decodes, its prefill not
            counted: of one that is alone, and of one beside others of this drafter; 0.0
            before the first one.
        first_s: Seconds from the opening of a request to its first token, likewise.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        hello: Hello,
        lease_s: float,
        vocabulary: int,
        counters: Counters,
    ) -> None:
        self.verifiers = [KnownVerifier(each, hello, lease_s) for each in endpoints]
        self._lease_s = lease_s
        self._vocabulary = vocabulary
        self._counters = counters
        self._requests: dict[int, OwnedRequest] = {}
        self._between = Ewma(0.0, least=0.0, most=lease_s)
        self.token_s, self.first_s = (
            [Ewma(0.0, least=0.0, most=most, weight=weight) for _ in range(2)]
            for most, weight in ((lease_s, TOKEN_WEIGHT), (inf, FIRST_WEIGHT))
        )
        self.outbox: list[tuple[int, Message]] = []
        self.committed: dict[int, int] = {}
        self.returned: list[int] = []

    def open(self, request: OwnedRequest, now: float) -> bool:
        """Send a new request to a verifier; return whether one takes requests."""
        self._requests[request.rid] = request
        request.opened = now
        if self._try_next(request, now):
            return True
        del self._requests[request.rid]
        return False

    def close(self, rid: int) -> None:
        """Drop a request: finished, aborted or returned. Unknown ones are ignored."""
        request = self._requests.pop(rid, None)
        if request is not None and request.epoch:
            self.outbox.append((request.verifier, Close(rid, request.epoch)))

    def verify(self, rid: int, drafts: Sequence[int], now: float) -> None:
        """Have drafts verified; until ``relay`` the verifier computes only these.

        Args:
            rid: An open request.
            drafts: Tokens behind the present ones, which may be wrong.
            now: In seconds.
        """
        request = self._requests[rid]
        base = len(request.tokens)
        request.verify = VerifyDrafts(rid, request.epoch, base, pack(drafts))
        request.decodes = False
        self._expect(request, now)
        self.outbox.append((request.verifier, request.verify))

    def prepare(self, rid: int, eta_s: float) -> None:
        """Announce drafts behind the present tokens.

        Args:
            rid: A request; one that is not open is ignored.
            eta_s: Time until they are expected, in seconds, >= 0.
        """
        request = self._requests.get(rid)
        if request is not None:
            base, eta_ms = len(request.tokens), round(1000 * eta_s)
            prepare = Prepare(rid, request.epoch, base, eta_ms)
            self.outbox.append((request.verifier, prepare))

    def relay(self, rid: int, tokens: MutableSequence[int], now: float) -> None:
        """Have all further tokens computed without drafts.

        Args:
            rid: A request; one that is not open is ignored.
            tokens: Its output tokens, from now on in this list.
            now: In seconds.
        """
        request = self._requests.get(rid)
        if request is None:
            return
        request.tokens, request.verify = tokens, None
        self._expect(request, now)
        self.outbox.append((request.verifier, request.asking()))

    def tokens(self, rid: int) -> MutableSequence[int] | None:
        """Return the output tokens of a request; None if it is not open."""
        request = self._requests.get(rid)
        return None if request is None else request.tokens

    def change(self, hello: Hello) -> None:
        """Become a drafter of other weights: requests return at the next tick."""
        for each in self.verifiers:
            each.change(hello)

    @property
    def measured(self) -> list[Measured]:
        """What the verifiers that serve have told of themselves."""
        return [
            each.measured
            for each in self.verifiers
            if each.state is State.SERVING and each.measured is not None
        ]

    def beats(self) -> list[Message]:
        """Return, for every verifier, what to send now and again."""
        live: list[list[int]] = [[] for _ in self.verifiers]
        for request in self._requests.values():
            live[request.verifier].append(request.rid)
        return [each.beat(live[i]) for i, each in enumerate(self.verifiers)]

    def receive(self, verifier: int, message: ToDrafter, at: float) -> None:
        """Take in a message of a verifier.

        Args:
            verifier: Its index.
            at: When it arrived, in seconds.

        Raises:
            MessageError: It has impossible tokens.
        """
        self.verifiers[verifier].receive(message, at)
        if not isinstance(message, Verdict | Unknown | Busy):
            return
        request = self._requests.get(message.rid)
        if request is None or message.epoch < request.epoch:
            self._counters.remote_stale += isinstance(message, Verdict)
            if isinstance(message, Verdict):
                self.outbox.append((verifier, Close(message.rid, message.epoch)))
        elif message.epoch > request.epoch or verifier != request.verifier:
            raise MessageError(f"request {message.rid} has no epoch {message.epoch}")
        elif isinstance(message, Verdict):
            self._take(request, message, at)
        else:
            if isinstance(message, Busy):
                request.refused.add(verifier)
                self.verifiers[verifier].rest(at + message.retry_ms / 1000)
            self._move(request, at)

    def _take(self, request: OwnedRequest, verdict: Verdict, at: float) -> None:
        """Commit what a verdict has beyond the present tokens."""
        tokens = unpack(verdict.tokens)
        if tokens and max(tokens) >= self._vocabulary:
            raise MessageError(f"token {max(tokens)} is not in the vocabulary")
        if len(verdict.logprobs) != (len(tokens) if request.wanted else 0):
            told = f"{len(verdict.logprobs)} log-probabilities"
            raise MessageError(f"{told} with {len(tokens)} tokens")
        waited, have = at - request.answered, len(request.tokens)
        self._between.observe(waited)
        self._begin_lease(request, max(at, request.answered))
        if verdict.base > have:  # an earlier one was lost
            self._ask(request, at)
            return
        request.pause = self._pause_s
        others = len(self._requests) > 1
        fresh = tokens[have - verdict.base :]
        if request.decodes and fresh:
            self.token_s[others].observe(waited / len(fresh), len(fresh))
        request.decodes = request.verify is None
        if fresh:
            if not have:
                self.first_s[others].observe(at - request.opened)
            request.tokens.extend(fresh)
            request.logprobs.extend(verdict.logprobs[have - verdict.base :])
            done = self.committed.get(request.rid, 0)
            self.committed[request.rid] = done + len(fresh)
            self._counters.remote_relayed_tokens += len(fresh)
        end = verdict.base + len(tokens)
        request.finished |= verdict.finished and end == len(request.tokens)

    def tick(self, now: float) -> None:
        """Ask again, move and return what has waited long enough."""
        for each in self.verifiers:
            each.tick(now)
        for request in list(self._requests.values()):
            verifier = self.verifiers[request.verifier]
            if request.finished and request.rid not in self.committed:
                # The verifier ended it earlier than its owner would.
                self._return(request)
            elif verifier.state is not State.SERVING:
                self._move(request, now)
            elif not request.waits:
                continue  # its next drafts are not there yet
            elif verifier.clock(now) - request.leased > self._lease_s:
                request.refused.add(request.verifier)
                self._move(request, now)
            elif now - max(request.answered, request.asked) > request.pause:
                request.pause = min(2 * request.pause, self._longest_pause_s)
                self._ask(request, now)

    @property
    def _longest_pause_s(self) -> float:
        """Longest time without asking for a sign of life, in seconds."""
        return self._lease_s / 2

    @property
    def _pause_s(self) -> float:
        """Time without an answer after which tokens are asked for again, in seconds."""
        usual_s = max(LEAST_PAUSE_S, PAUSES * self._between.value)
        return min(usual_s, self._longest_pause_s)

    def _expect(self, request: OwnedRequest, now: float) -> None:
        """Note that the verifier was asked for something new."""
        request.asked = now
        self._begin_lease(request, now)

    def _begin_lease(self, request: OwnedRequest, at: float) -> None:
        """Count silence from an answer, or from when one is expected."""
        request.answered = at
        request.leased = self.verifiers[request.verifier].clock(at)

    def _ask(self, request: OwnedRequest, now: float) -> None:
        """Ask for the tokens behind those that are there."""
        if now - request.asked < LEAST_PAUSE_S / 2:
            return  # for instance for every verdict behind a lost one
        request.asked = now
        self._counters.remote_resends += 1
        self.outbox.append((request.verifier, request.asking()))

    def _move(self, request: OwnedRequest, now: float) -> None:
        """Begin the next attempt, or return the request."""
        self.outbox.append((request.verifier, Close(request.rid, request.epoch)))
        self._counters.remote_failovers += 1
        if request.epoch >= MOST_EPOCHS or not self._try_next(request, now):
            self._return(request)

    def _return(self, request: OwnedRequest) -> None:
        self.close(request.rid)
        self.returned.append(request.rid)

    def _try_next(self, request: OwnedRequest, now: float) -> bool:
        """Open a request at the first verifier that takes it."""
        endpoints = [each.endpoint for each in self.verifiers]
        for index in rendezvous(request.prompt[:KEY_BYTES], endpoints):
            verifier = self.verifiers[index]
            if index in request.refused or not verifier.takes(now):
                continue
            request.epoch += 1
            request.verifier = index
            self._expect(request, now)
            request.pause = self._pause_s
            request.finished = request.decodes = False
            self.outbox.append((index, request.opening()))
            if request.verify is not None:
                self.outbox.append((index, request.asking()))
            return True
        return False
