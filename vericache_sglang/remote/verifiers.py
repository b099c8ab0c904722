"""What a drafter knows of its verifiers, and the order it tries them in."""

from __future__ import annotations

import hashlib
import logging
from enum import Enum, auto
from typing import TYPE_CHECKING

from vericache_sglang.remote.messages import Heartbeat, Hello, Refuse, Welcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.remote.messages import Measured, ToDrafter

logger = logging.getLogger(__name__)

BEAT_S = 0.25
"""Interval of heartbeats, in seconds."""
DEAD_S = 2.0
"""Least silence after which a verifier's requests move, in seconds."""
DEAD = 0.2
"""It is this share of the lease if that is longer."""
QUIET = 0.5
"""Share of that silence after which a verifier gets no new requests."""
STILL_S = 4 * BEAT_S
"""A scheduler that sends no new heartbeat for so long stands still, in seconds."""
PATIENCE = 6
"""Leases run so many times slower meanwhile: a long forward ends, and elsewhere its
requests would begin anew."""


class State(Enum):
    """How a verifier answers."""

    UNKNOWN = auto()
    """It has not answered yet, or is dead."""
    SERVING = auto()
    REFUSING = auto()


class KnownVerifier:
    """One verifier as a drafter sees it.

    Args:
        endpoint: Its address.
        hello: Sent until it is answered.
        lease_s: Length of a lease, in seconds.

    Attributes:
        state: Its last answer.
        measured: What it last told of itself; None: nothing yet.
    """

    def __init__(self, endpoint: str, hello: Hello, lease_s: float) -> None:
        self.endpoint = endpoint
        self._hello = hello
        self._dead_s = max(DEAD_S, DEAD * lease_s)
        self._received = float("-inf")
        self._busy_until = float("-inf")
        self._sequence = 0
        self._told = 0
        # When its scheduler last sent something new, and ``clock`` then.
        self._ran = self._clock = 0.0
        self.state = State.UNKNOWN
        self.measured: Measured | None = None

    def receive(self, message: ToDrafter, at: float) -> None:
        """Note a message, received at the time ``at``."""
        self._received = max(at, self._received)
        beat = None
        if isinstance(message, Heartbeat):
            beat = message.sequence
            self.measured = message.measured or self.measured
        if beat != self._told:
            self._clock, self._ran = self.clock(at), max(at, self._ran)
            self._told = self._told if beat is None else beat
        if isinstance(message, Welcome):
            if self.state is not State.SERVING:
                logger.info("VeriCache: %s serves this drafter", self.endpoint)
            self.state = State.SERVING
        elif isinstance(message, Refuse):
            if self.state is not State.REFUSING:
                logger.error("VeriCache: %s refuses: %s", self.endpoint, message.reason)
            self.state = State.REFUSING

    def clock(self, now: float) -> float:
        """Return the time of a clock that runs slower while its scheduler stands still.

        Its process repeats the last heartbeat then, see ``Transport.repeat``.

        Args:
            now: At the last message or later, in seconds.
        """
        elapsed = max(0.0, now - self._ran)
        still = max(0.0, elapsed - STILL_S)
        return self._clock + elapsed - still + still / PATIENCE

    def change(self, hello: Hello) -> None:
        """Introduce a drafter that has other weights than before."""
        self._hello, self.state = hello, State.UNKNOWN

    def tick(self, now: float) -> None:
        """Note its silence."""
        if self.state is State.SERVING and now - self._received > self._dead_s:
            logger.warning("VeriCache: %s does not answer", self.endpoint)
            self.state = State.UNKNOWN

    def rest(self, until: float) -> None:
        """Offer it no request before ``until``."""
        self._busy_until = max(until, self._busy_until)

    def takes(self, now: float) -> bool:
        """Return whether a new request may be tried there."""
        fresh = now - self._received <= QUIET * self._dead_s
        return self.state is State.SERVING and fresh and now >= self._busy_until

    def beat(self, live: Sequence[int]) -> Hello | Heartbeat:
        """Return what to send it now and again.

        Args:
            live: Requests that are open there.
        """
        if self.state is not State.SERVING:
            return self._hello
        self._sequence += 1
        return Heartbeat(self._sequence, tuple(live))


def rendezvous(key: bytes, endpoints: Sequence[str]) -> list[int]:
    """Return the indices of verifiers in the order in which to try a prompt.

    Highest random weight: prompts that begin alike go to the same verifier, and one
    that leaves moves only its own.

    Args:
        key: Beginning of the prompt.
        endpoints: Addresses of the verifiers.
    """
    return sorted(
        range(len(endpoints)),
        key=lambda i: hashlib.blake2b(
            endpoints[i].encode() + b"\0" + key, digest_size=8
        ).digest(),
        reverse=True,
    )
