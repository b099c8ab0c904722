"""Sockets between drafters and verifiers, in a thread of their own.

The scheduler must not wait for a network and may be busy for seconds in a forward, so a
thread receives, sends, and repeats heartbeats meanwhile. Queues are bounded and what
does not fit is dropped: the protocol treats it as lost.
"""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import zmq

from vericache_sglang.errors import ConfigError, MessageError
from vericache_sglang.remote.messages import LONGEST, Message, encode
from vericache_sglang.remote.quarantine import Quarantine
from vericache_sglang.remote.verifiers import BEAT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vericache_sglang.remote.peer_keys import PeerKeys

logger = logging.getLogger(__name__)

MOST_QUEUED = 4096
"""Messages that wait in either direction."""
LONGEST_WAIT_S = 0.01
"""Longest wait for a message, in seconds; what a store has read waits too."""
HIGH_WATER = 1000
"""Messages that ZeroMQ queues per connection and direction."""
AT_ONCE = 256
"""Messages received from one socket before the others have their turn."""
LONGEST_PAUSE_S = 2 * BEAT_S
"""What counts of a pause in which the thread stands still, in seconds."""
ZAP = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks whether a client is admitted (its RFC 27)."""

Peer = TypeVar("Peer", int, bytes)
"""A verifier's index for a drafter, a connection for a verifier."""
Received = TypeVar("Received")


class Transport(ABC, Generic[Peer, Received]):
    """One role's connections; a thread serves them until ``close``.

    Args:
        decode: Decodes what this role receives; raises ``MessageError``.
        keys: Encrypt and authenticate; None: neither.

    Attributes:
        ready: File descriptor that is readable while received messages wait.
        malformed: Messages that could not be decoded.
    """

    def __init__(
        self, decode: Callable[[bytes], Received], keys: PeerKeys | None
    ) -> None:
        self._decode = decode
        self._keys = keys
        self._inbox: deque[tuple[Peer, Received, float]] = deque()
        self._outbox: deque[tuple[Peer, bytes]] = deque()
        self._beats: dict[Peer, bytes] = {}
        self._quarantine: Quarantine[Peer] = Quarantine()
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self.ready = os.eventfd(0, os.EFD_NONBLOCK)
        self._posted = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller.register(self._posted, zmq.POLLIN)
        self._arrivals = zmq.Poller()
        self._arrivals.register(self.ready, zmq.POLLIN)
        self._closing = False
        self.malformed = 0
        self._seen = time.monotonic(), 0.0  # when the thread last ran; the clock then
        self._thread = Thread(target=self._run, name="vericache-remote", daemon=True)

    # -- called by the scheduler ------------------------------------------------

    def send(self, peer: Peer, message: Message) -> None:
        """Send a message, or lose it."""
        self._outbox.append((peer, encode(message)))
        if len(self._outbox) > MOST_QUEUED:
            self._outbox.popleft()
        os.eventfd_write(self._posted, 1)

    def repeat(self, beats: Mapping[Peer, Message]) -> None:
        """Send each peer its message now and then every ``BEAT_S``."""
        self._beats = {peer: encode(message) for peer, message in beats.items()}

    def now(self) -> float:
        """Return the time of a clock that stands still while this process does.

        Silence is measured with it: after a pause of the machine, what peers have sent
        meanwhile has not been received yet.

        Returns:
            Seconds; the origin is arbitrary.
        """
        return self._clock(time.monotonic())

    def _clock(self, at: float) -> float:
        seen, clock = self._seen
        return clock + min(at - seen, LONGEST_PAUSE_S)

    def drain(self) -> list[tuple[Peer, Received, float]]:
        """Return (peer, message, ``now()`` at its arrival), oldest first."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.ready)  # first: later arrivals make it readable again
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def hand_over(self, receive: Callable[[Peer, Received, float], None]) -> None:
        """Call ``receive`` with all of ``drain``; blame senders for its errors."""
        for peer, message, at in self.drain():
            try:
                receive(peer, message, at)
            except MessageError as error:
                self.blame(peer, error)

    def wake_on(self, *sockets: object) -> None:
        """Have ``wait`` end for other sockets of the scheduler too, where they are."""
        for each in sockets:
            if isinstance(each, zmq.Socket) and each not in self._arrivals:
                self._arrivals.register(each, zmq.POLLIN)

    def wait(self, seconds: float = LONGEST_WAIT_S) -> None:
        """Wait for a peer's message or one of those sockets, ``seconds`` at most."""
        self._arrivals.poll(int(1000 * seconds))

    def blame(self, peer: Peer, error: MessageError) -> None:
        """Count a message that made no sense against its sender."""
        self.malformed += 1
        if self._quarantine.blame(peer, self.now()):
            logger.error("VeriCache: a peer is ignored for a while: %s", error)

    def close(self) -> None:
        """End the thread and close all sockets."""
        self._closing = True
        os.eventfd_write(self._posted, 1)
        self._thread.join()
        self._context.term()
        os.close(self.ready)
        os.close(self._posted)

    # -- the thread -------------------------------------------------------------

    def _start(self, sockets: Sequence[zmq.Socket[bytes]]) -> None:
        for each in sockets:
            self._poller.register(each, zmq.POLLIN)
        self._thread.start()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._closing:
            left = max(0.0, due - time.monotonic())
            events = self._poller.poll(int(1000 * left))
            at = time.monotonic()
            self._seen = at, self._clock(at)
            for found, _ in events:
                if found == self._posted:
                    os.eventfd_read(self._posted)
                else:
                    self._receive_some(found)
            while self._outbox:
                self._deliver(*self._outbox.popleft())
            if time.monotonic() >= due:
                due = time.monotonic() + BEAT_S
                for peer, data in self._beats.items():
                    self._deliver(peer, data)
        for found, _ in list(self._poller.sockets):
            if isinstance(found, zmq.Socket):
                found.close()

    def _receive_some(self, found: zmq.Socket[bytes]) -> None:
        for _ in range(AT_ONCE):
            try:
                frames = found.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(found, frames)

    @abstractmethod
    def _take(self, found: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
        """Handle what a socket has received."""

    @abstractmethod
    def _deliver(self, peer: Peer, data: bytes) -> None:
        """Send an encoded message, or lose it."""

    def _accept(self, peer: Peer, frames: Sequence[bytes]) -> None:
        """Decode a message and queue it for the scheduler."""
        now = self.now()
        if self._quarantine.holds(peer, now) or len(self._inbox) >= MOST_QUEUED:
            return
        try:
            if len(frames) != 1:
                raise MessageError(f"{len(frames)} frames")
            message = self._decode(frames[0])
        except MessageError as error:
            self.blame(peer, error)
            return
        self._inbox.append((peer, message, now))
        os.eventfd_write(self.ready, 1)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.linger = 0
        made.set(zmq.MAXMSGSIZE, LONGEST)
        made.set_hwm(HIGH_WATER)
        made.set(zmq.IPV6, 1)
        return made


class DrafterTransport(Transport[int, Received]):
    """A drafter's connections, one to each verifier; they come and go by themselves."""

    def __init__(
        self,
        endpoints: Sequence[str],
        decode: Callable[[bytes], Received],
        keys: PeerKeys | None,
    ) -> None:
        super().__init__(decode, keys)
        self._sockets = [self._connect(each) for each in endpoints]
        self._start(self._sockets)

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        made = self._socket(zmq.DEALER)
        made.set(zmq.IMMEDIATE, 1)  # queue nothing for a verifier that is not there
        made.set(zmq.RECONNECT_IVL_MAX, 1000)
        if self._keys is not None:
            made.curve_secretkey = self._keys.drafter_secret
            made.curve_publickey = self._keys.drafter_public
            made.curve_serverkey = self._keys.verifier_public
        try:
            made.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy()  # an open socket would keep the process from ending
            raise ConfigError(f"--vericache-verifiers {endpoint}: {error}") from error
        return made

    def _take(self, found: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
        self._accept(self._sockets.index(found), frames)

    def _deliver(self, peer: int, data: bytes) -> None:
        with suppress(zmq.Again):  # not connected, or its queue is full: lost
            self._sockets[peer].send(data, zmq.NOBLOCK)


class VerifierTransport(Transport[bytes, Received]):
    """A verifier's socket; ZeroMQ numbers the connections of drafters."""

    def __init__(
        self,
        endpoint: str,
        decode: Callable[[bytes], Received],
        keys: PeerKeys | None,
    ) -> None:
        super().__init__(decode, keys)
        self._door: Any = None
        self._admitted = b"" if keys is None else keys.drafter_raw
        self._router = self._socket(zmq.ROUTER)
        sockets = [self._router]
        if keys is not None:
            self._door = self._context.socket(zmq.REP)
            self._door.linger = 0
            self._door.bind(ZAP)
            sockets.append(self._door)
            self._router.curve_secretkey = keys.verifier_secret
            self._router.curve_publickey = keys.verifier_public
            self._router.curve_server = True
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy()  # an open socket would keep the process from ending
            raise ConfigError(f"--vericache-peer-bind {endpoint}: {error}") from error
        self._start(sockets)

    def _take(self, found: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
        if found is self._door:
            self._admit(frames)
        else:
            self._accept(frames[0], frames[1:])

    def _admit(self, frames: Sequence[bytes]) -> None:
        """Answer whether a client's public key is the drafters' (ZeroMQ's RFC 27)."""
        request, mechanism, key = frames[1], frames[5], frames[6:]
        known = mechanism == b"CURVE" and key == [self._admitted]
        status = b"200" if known else b"400"
        self._door.send_multipart([b"1.0", request, status, b"", b"drafter", b""])

    def _deliver(self, peer: bytes, data: bytes) -> None:
        with suppress(zmq.ZMQError):  # it has left, or its queue is full: lost
            self._router.send_multipart([peer, data], zmq.NOBLOCK)
