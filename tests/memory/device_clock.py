"""A CUDA device's streams without the device: work is queued and runs when told to.

Nothing of ours is replaced. What ``torch.cuda`` offers is: streams, events, and
``Tensor.copy_(non_blocking=True)``, which is queued on the current stream here as there
and moves its bytes when the test, or a host that waits, lets the device go on. In what
order streams go on is drawn.
"""

import threading
import time
from collections import deque
from contextlib import contextmanager
from random import Random

import pytest
import torch

COPY = torch.Tensor.copy_
INDEX_COPY = torch.Tensor.index_copy_


class Ticket:
    """One recording of an event; ``at``: when the device got there."""

    def __init__(self):
        self.at = None


class Stream:
    """Work in order; each entry is (may it run, what it does)."""

    def __init__(self, device):
        self.device = device
        self.work = deque()

    def put(self, does, may=lambda: True):
        """Queue a piece of work."""
        with self.device.lock:
            self.work.append((may, does))

    def wait_event(self, event):
        ticket = event.ticket  # as CUDA: of the recording that was last by now
        if ticket is not None:
            self.put(lambda: None, lambda: ticket.at is not None)

    def wait_stream(self, other):
        event = Event(self.device)
        event.record(other)
        self.wait_event(event)

    def synchronize(self):
        event = Event(self.device)
        event.record(self)
        event.synchronize()


class Event:
    """As ``torch.cuda.Event``: one that was never recorded is complete."""

    def __init__(self, device):
        self.device = device
        self.ticket = None

    def record(self, stream=None):
        ticket = self.ticket = Ticket()

        def reach():
            ticket.at = self.device.now

        (stream or self.device.current()).put(reach)

    def query(self):
        return self.ticket is None or self.ticket.at is not None

    def synchronize(self):
        while not self.query():
            if threading.current_thread() is self.device.owner:
                self.device.step()
            else:
                time.sleep(1e-4)  # the owner lets the device go on

    def elapsed_time(self, end):
        return float(end.ticket.at - self.ticket.at)


class Device:
    """Streams of one device, and what patches torch while it is there.

    Attributes:
        now: Pieces of work done so far, taken for milliseconds.
        owner: The thread whose waiting makes the device go on.
        recorded: Tensors whose memory is kept for another stream.
        forward: The stream forwards are launched on.
    """

    def __init__(self, seed):
        self.lock = threading.RLock()
        self.owner = threading.current_thread()
        self.now = 0
        self.recorded = []
        self.streams = []
        self.forward = self.stream()
        self._random = Random(seed)
        self._local = threading.local()

    def stream(self):
        made = Stream(self)
        self.streams.append(made)
        return made

    def current(self):
        return getattr(self._local, "stream", self.forward)

    @contextmanager
    def on(self, stream):
        before, self._local.stream = self.current(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def step(self):
        """Do one piece of work of a stream that may go on; False: none may."""
        with self.lock:
            ready = [s for s in self.streams if s.work and s.work[0][0]()]
            if not ready:
                return False
            _, does = self._random.choice(ready).work.popleft()
            self.now += 1
            does()
            return True

    def run(self, pieces):
        """Do up to so many pieces of work."""
        return sum(self.step() for _ in range(pieces))

    def drain(self):
        """Do all there is.

        Raises:
            AssertionError: Streams wait for each other.
        """
        while self.step():
            pass
        assert not any(stream.work for stream in self.streams), "a deadlock"

    def copy(self, target, source, non_blocking=False):
        if non_blocking:
            self.current().put(lambda: COPY(target, source))
            return target
        return COPY(target, source)

    def index_copy(self, target, dim, index, source):
        self.current().put(lambda: INDEX_COPY(target, dim, index, source))
        return target


@contextmanager
def device(seed):
    """Have ``torch.cuda`` be a device of ours."""
    made = Device(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", made.stream)
        patch.setattr(torch.cuda, "Event", lambda enable_timing=False: Event(made))
        patch.setattr(torch.cuda, "current_stream", made.current)
        patch.setattr(torch.cuda, "stream", made.on)
        patch.setattr(torch.Tensor, "copy_", lambda *a, **k: made.copy(*a, **k))
        patch.setattr(
            torch.Tensor, "index_copy_", lambda *a, **k: made.index_copy(*a, **k)
        )
        patch.setattr(
            torch.Tensor, "record_stream", lambda t, s: made.recorded.append(t)
        )
        yield made


def until(condition, seconds=20.0):
    """Wait for a thread of ours."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "a thread never got there"
        time.sleep(1e-4)
