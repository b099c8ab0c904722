"""The verifier's side of the protocol: guests are copies of requests that others own.

A guest may be dropped at any time, as its owner has every token that it was told. It
ends when its owner closes it, leaves it out of two heartbeats, or has been silent for
the length of a lease. One that its owner drafts for waits for the drafts, until its
owner asks for tokens without any. No SGLang, no sockets, no clock.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vericache_sglang.errors import MessageError, quoted
from vericache_sglang.remote.messages import (
    Busy,
    Close,
    Heartbeat,
    Hello,
    Open,
    Prepare,
    Refuse,
    Unknown,
    Verdict,
    VerifyDrafts,
    Welcome,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vericache_sglang.observability.counters import Counters
    from vericache_sglang.remote.messages import (
        Logprobs,
        Measured,
        Message,
        Resend,
        ToVerifier,
    )

logger = logging.getLogger(__name__)

RETRY_MS = 500
"""Time for which a verifier without a free place asks to be left alone."""
MOST_REFUSED = 1000
"""Refused drafters that are remembered, so that each is logged once."""
MOST_MISSED = 2
"""Heartbeats without a guest after which it ends."""
MOST_LATE_S = 1.0
"""Time after which drafts that were announced are not expected any more, in seconds."""


@dataclass(slots=True)
class Guest:
    """A copy of a request that a drafter owns.

    Attributes:
        drafter: The owner's process.
        rid: Its number there.
        epoch: The owner's attempt.
        name: The verifier's own name for it.
        tokens: Output tokens, the committed ones included; the verifier's own list.
        sent: How many of them were sent, or had been committed.
        finished: There will be no more tokens.
        missed: Heartbeats since that did not name it.
        waits: Its owner drafts: it computes what ``asked`` asks for and no more.
        asked: (output tokens before them, drafts) to verify; None: nothing yet.
        expected: (output tokens before them, time in seconds) of announced drafts.
        queued_at: When it was queued for another row, in seconds; 0.0: it has one.
        logprobs: Of the output tokens that were not committed; None: not wanted.
        opened: Committed output tokens when it began.
    """

    drafter: bytes
    rid: int
    epoch: int
    name: str
    tokens: Sequence[int]
    sent: int
    finished: bool = False
    missed: int = 0
    waits: bool = False
    asked: tuple[int, Sequence[int]] | None = None
    expected: tuple[int, float] = (-1, 0.0)
    queued_at: float = 0.0
    logprobs: list[Logprobs] | None = None
    opened: int = field(init=False)

    def __post_init__(self) -> None:
        self.opened = self.sent

    def drafts(self, tokens: int) -> Sequence[int] | None:
        """Return the drafts to verify behind so many output tokens; None: it waits."""
        base, drafts = self.asked or (-1, ())
        return drafts if base == tokens else None

    def eta_s(self, tokens: int, now: float) -> float | None:
        """Return when drafts behind so many output tokens are expected.

        Args:
            tokens: Output tokens.
            now: In seconds.

        Returns:
            In seconds from ``now``, at least ``-MOST_LATE_S``; None: they are not.
        """
        base, at = self.expected
        return at - now if base == tokens and at - now >= -MOST_LATE_S else None

    def verdict(self, base: int) -> Verdict:
        """Return all tokens from ``base`` on; none if it does not have so many."""
        first, end = 0, len(self.tokens)
        if self.logprobs is not None:
            # Those of committed tokens are not known, and the newest not read yet.
            first, end = self.opened, self.opened + len(self.logprobs)
        base = max(first, min(base, end))
        told = tuple(self.logprobs[base - first :]) if self.logprobs else ()
        tokens = pack(self.tokens[base:end])
        return Verdict(self.rid, self.epoch, base, tokens, self.finished, told)


@dataclass(slots=True)
class ServedDrafter:
    """A drafter that is served.

    Attributes:
        instance: Its process.
        received: When it last sent anything, in seconds.
        sequence: Number of its last heartbeat.
    """

    instance: bytes
    received: float
    sequence: int = 0


class Guests:
    """All guests of a verifier.

    Args:
        hello: What a drafter's ``Hello`` must equal but for its instance.
        most: Guests at once, unfinished ones.
        lease_s: Silence of a drafter after which its guests end, in seconds.
        counters: Counts expired leases.
        start: Begins to compute a request of a drafter; returns a new name, and the
            output tokens so far; raises ``MessageError`` if it cannot.
        stop: Ends a guest that is not finished.

    Attributes:
        outbox: (connection, message) to send, in order; the caller empties it.
    """

    def __init__(
        self,
        hello: Hello,
        most: int,
        lease_s: float,
        counters: Counters,
        *,
        start: Callable[[bytes, Open], tuple[str, Sequence[int]]],
        stop: Callable[[Guest], None],
    ) -> None:
        self._hello = hello
        self._most = most
        self._lease_s = lease_s
        self._counters = counters
        self._start = start
        self._stop = stop
        self._drafters: dict[bytes, ServedDrafter] = {}
        self._guests: dict[tuple[bytes, int], Guest] = {}
        self._refused: dict[bytes, str] = {}
        self._sequence = 0
        self.outbox: list[tuple[bytes, Message]] = []

    def __len__(self) -> int:
        """Return the number of unfinished guests."""
        return len(self.running())

    def running(self) -> list[Guest]:
        """Return the unfinished guests; last asked to verify, last in order."""
        return [guest for guest in self._guests.values() if not guest.finished]

    @property
    def drafters(self) -> int:
        """Return the number of drafters that have unfinished guests."""
        return len({guest.drafter for guest in self.running()})

    def beats(self, measured: Measured | None = None) -> dict[bytes, Message]:
        """Return, for every connection, what to send now and again.

        Args:
            measured: See ``Heartbeat``.
        """
        self._sequence += 1
        return dict.fromkeys(self._drafters, Heartbeat(self._sequence, (), measured))

    def receive(self, connection: bytes, message: ToVerifier, at: float) -> None:
        """Take in a message, which arrived at the time ``at`` over a connection.

        Raises:
            MessageError: It asks for what cannot be, for instance tokens that are not
                in the vocabulary.
        """
        if isinstance(message, Hello):
            self._greet(connection, message, at)
            return
        drafter = self._drafters.get(connection)
        if drafter is None:
            return  # it will notice the silence, and say hello
        drafter.received = max(at, drafter.received)
        if isinstance(message, Heartbeat):
            self._note_live(drafter, message)
            return
        guest = self._guests.get((drafter.instance, message.rid))
        if isinstance(message, Open):
            self._open(connection, drafter, message, guest)
        elif isinstance(message, Close):
            if guest is not None and guest.epoch <= message.epoch:
                self._end(guest)
        elif guest is None or guest.epoch != message.epoch:
            self.outbox.append((connection, Unknown(message.rid, message.epoch)))
        elif isinstance(message, Prepare):
            guest.expected = message.base, at + message.eta_ms / 1000
        else:
            self._ask(connection, guest, message)

    def _ask(
        self, connection: bytes, guest: Guest, message: Resend | VerifyDrafts
    ) -> None:
        """Answer with the tokens that are known, or note what to compute."""
        guest.waits = isinstance(message, VerifyDrafts)
        if isinstance(message, VerifyDrafts):
            drafts = unpack(message.drafts)
            if max(drafts, default=0) >= self._hello.vocabulary:
                raise MessageError(f"draft {max(drafts)} is not in the vocabulary")
            before, guest.asked = guest.asked, (message.base, drafts)
            known = guest.finished or message.base < len(guest.tokens)
            if not known and guest.asked != before:
                # Guests are in the order in which they were asked.
                key = guest.drafter, guest.rid
                self._guests[key] = self._guests.pop(key)
                return  # a repetition is answered, as a sign of life
        self._send(connection, guest, message.base)

    def _greet(self, connection: bytes, hello: Hello, at: float) -> None:
        """Welcome a drafter of the same model and versions; refuse any other."""
        differing = [
            f"{name} is {quoted(getattr(hello, name))}, "
            f"here {quoted(getattr(self._hello, name))}"
            for name in Hello.__struct_fields__
            if name != "instance" and getattr(hello, name) != getattr(self._hello, name)
        ]
        if differing:
            reason = "; ".join(differing)[:1000]
            if self._refused.get(hello.instance) != reason:
                logger.error("VeriCache: a drafter was refused: %s", reason)
            if len(self._refused) >= MOST_REFUSED:
                self._refused.clear()
            self._refused[hello.instance] = reason
            self._drafters.pop(connection, None)
            self.outbox.append((connection, Refuse(reason)))
            return
        known = self._drafters.get(connection)
        if known is None or known.instance != hello.instance:
            logger.info("VeriCache: a drafter connected")
            for other in self._connections(hello.instance):
                del self._drafters[other]  # it has connected anew
            self._drafters[connection] = ServedDrafter(hello.instance, at)
        else:
            known.received = max(at, known.received)
        self.outbox.append((connection, Welcome()))

    def _note_live(self, drafter: ServedDrafter, beat: Heartbeat) -> None:
        """End the guests that their owner no longer names."""
        if beat.sequence <= drafter.sequence:
            return
        drafter.sequence = beat.sequence
        live = set(beat.live)
        for guest in self._of(drafter.instance):
            guest.missed = 0 if guest.rid in live else guest.missed + 1
            if guest.missed >= MOST_MISSED:
                self._counters.remote_lease_expiries += 1
                self._end(guest)

    def _open(
        self,
        connection: bytes,
        drafter: ServedDrafter,
        message: Open,
        guest: Guest | None,
    ) -> None:
        """Begin a guest, unless it is here already or there is no place for it."""
        rid, epoch = message.rid, message.epoch
        if guest is not None:
            if guest.epoch >= epoch:
                return  # a repetition
            self._end(guest)
        if len(self) >= self._most:
            busy = Busy(rid, epoch, RETRY_MS, f"{self._most} guests are here")
            self.outbox.append((connection, busy))
            return
        try:
            name, tokens = self._start(drafter.instance, message)
        except MessageError as error:
            busy = Busy(rid, epoch, 0, str(error)[:1000])
            self.outbox.append((connection, busy))
            raise
        guest = Guest(drafter.instance, rid, epoch, name, tokens, len(tokens))
        guest.logprobs = None if message.wanted is None else []
        self._guests[drafter.instance, rid] = guest

    def advance(self, guest: Guest, tokens: Sequence[int], finished: bool) -> None:
        """Send what a guest has beyond what was sent.

        Args:
            tokens: Its output tokens so far, as ``Guest.tokens``; ``Guest.logprobs``
                has theirs.
            finished: There will be no more.
        """
        guest.tokens, guest.finished = tokens, finished
        if len(tokens) > guest.sent or finished:
            for connection in self._connections(guest.drafter):
                self._send(connection, guest, guest.sent)
            guest.sent = len(tokens)

    def change(self, hello: Hello) -> None:
        """Become another verifier, of other weights: everything before ends."""
        self._hello = hello
        for guest in list(self._guests.values()):
            self._end(guest)
        self._drafters.clear()

    def lose(self, guest: Guest) -> None:
        """Drop a guest that the verifier has ended by itself."""
        for connection in self._connections(guest.drafter):
            self.outbox.append((connection, Unknown(guest.rid, guest.epoch)))
        self._guests.pop((guest.drafter, guest.rid), None)

    def tick(self, now: float) -> None:
        """End the guests of drafters that are silent."""
        for connection, drafter in list(self._drafters.items()):
            if now - drafter.received <= self._lease_s:
                continue
            logger.warning("VeriCache: a drafter is silent; its guests end")
            del self._drafters[connection]
            for guest in self._of(drafter.instance):
                self._counters.remote_lease_expiries += 1
                self._end(guest)

    def _send(self, connection: bytes, guest: Guest, base: int) -> None:
        self.outbox.append((connection, guest.verdict(base)))

    def _end(self, guest: Guest) -> None:
        del self._guests[guest.drafter, guest.rid]
        if not guest.finished:
            self._stop(guest)

    def _of(self, instance: bytes) -> list[Guest]:
        return [guest for guest in self._guests.values() if guest.drafter == instance]

    def _connections(self, instance: bytes) -> list[bytes]:
        return [
            connection
            for connection, drafter in self._drafters.items()
            if drafter.instance == instance
        ]
