"""Streams and events of a simulated device; see ``simulated_cuda``."""

import time
from collections import deque
from functools import partial

import torch


class Ticket:
    """One recording of an event; ``at``: when the device got there."""

    def __init__(self):
        self.at = None


class Stream(torch.Stream):
    """Work in order; each piece is (may it run, what it does)."""

    def __new__(cls, device, number):
        return super().__new__(cls, stream_id=number, device_index=0, device_type=1)

    def __init__(self, device, number):
        self.owner, self.work, self.cuda_stream = device, deque(), number
        self.freed = []

    def reuse(self):
        """Overwrite the memory of tensors that are gone, as new ones may."""
        with self.owner.lock:
            freed, self.freed = self.freed, []
            for memory, events in freed:
                if all(event.reached for event in events):
                    self.put(partial(self.owner.spoil, memory))
                else:
                    self.freed.append((memory, events))

    def put(self, does, may=lambda: True):
        """Queue a piece of work."""
        with self.owner.lock:
            self.work.append((may, does))
            while self.owner.in_order and self.owner.step():
                pass

    def record_event(self, event=None):
        event = event or Event(self.owner)
        event.record(self)
        return event

    def wait_event(self, event):
        ticket = event.ticket  # as CUDA: of the recording that was last by now
        if ticket is not None:
            self.put(lambda: None, lambda: ticket.at is not None)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def query(self):
        return not self.work

    def synchronize(self):
        self.record_event().synchronize()


class Event:
    """As ``torch.cuda.Event``: one that was never recorded is complete."""

    def __init__(self, device):
        self.device, self.ticket = device, None

    def record(self, stream=None):
        ticket = self.ticket = Ticket()

        def reach():
            ticket.at = self.device.now

        (stream or self.device.current()).put(reach)

    def wait(self, stream=None):
        (stream or self.device.current()).wait_event(self)

    @property
    def reached(self):
        return self.ticket is None or self.ticket.at is not None

    def query(self):
        """While the host asks, the device goes on."""
        return self.reached or (self.device.step() and False)

    def synchronize(self):
        while not self.reached:
            if not (self.device.goes_on() and self.device.step()):
                time.sleep(1e-4)  # another thread queues what it waits for, or steps

    def elapsed_time(self, end):
        return float(end.ticket.at - self.ticket.at)
