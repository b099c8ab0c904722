"""SGLang's two streams over a simulated device, as its overlap schedule orders them."""

from contextlib import contextmanager

import torch


class Streams:
    """The schedule stream, current where nothing is said, and the forward stream.

    As ``Scheduler.run_batch`` and ``_apply_war_barrier``: a forward begins behind all
    the schedule stream was given; the schedule stream goes on where the forward has
    read what they share. A graph's attention says so before its layers have stored
    (``SharedReadEnds.IN_REPLAY``), a prefill and moves do not say.

    Args:
        cuda: The simulated device.
    """

    def __init__(self, cuda):
        self.schedule, self.forward_stream = cuda.main, cuda.stream()
        self._read = None

    @contextmanager
    def launched(self):
        """Run a forward, or what a worker does beside it."""
        self.forward_stream.wait_stream(self.schedule)
        self._read = None
        try:
            with torch.cuda.stream(self.forward_stream):
                yield self
        finally:
            if self._read is None:
                self.schedule.wait_stream(self.forward_stream)
            else:
                self.schedule.wait_event(self._read)

    def read_done(self):
        """The forward has read its rows; what it stores comes behind."""
        self._read = self.forward_stream.record_event()
