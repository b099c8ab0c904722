"""Forwards are timed by what the device did, not by when the host launched them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.runtime.forward_times import ForwardTimes, Prefill
from vericache_sglang.scheduling.estimates import Estimates
from vericache_sglang.scheduling.iteration_model import Work

KINDS = st.sampled_from(["timed", "untimed", "behind other work"])


class Device:
    """Runs forwards one after another, up to ``done_s``."""

    def __init__(self):
        self.end_s = self.done_s = 0.0

    def event(self, enable_timing=False):
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device):
        self.device, self.at_s = device, None

    def record(self):
        self.at_s = self.device.end_s

    def query(self):
        return self.at_s <= self.device.done_s

    def elapsed_time(self, end):
        assert end.query(), "the host would wait"
        return 1e3 * (end.at_s - self.at_s)


@given(st.lists(st.tuples(KINDS, st.integers(1, 9), st.integers(0, 2)), max_size=20))
def test_each_forward_is_given_its_own_time(forwards):
    """However far the host is ahead of the device."""
    device, expected, seen = Device(), [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", device.event)
        times = ForwardTimes("cuda")
        ends = []
        for i, (kind, seconds, behind) in enumerate(forwards):
            if kind == "behind other work":
                device.end_s += 100
                times.interrupt()
            device.end_s += seconds
            work = Work(1 + i, 1, 1)
            times.end(None if kind == "untimed" else work, 0.0)
            ends.append(device.end_s)
            if i and kind == "timed":
                expected.append((work, seconds))
            device.done_s = ends[max(0, i - behind)]
            seen += times.observed()
        device.done_s = device.end_s
        seen += times.observed()
    assert [work for work, _ in seen] == [work for work, _ in expected]
    assert [s for _, s in seen] == pytest.approx([s for _, s in expected])


def test_a_cpu_times_forwards_as_they_return(monkeypatch):
    now = iter([0.0, 2.0, 5.0, 6.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    times, work = ForwardTimes(torch.device("cpu")), Work(1, 1, 1)
    times.end(work, 0.0)
    times.end(work, 0.5)  # half a second was the inner drafter's
    assert list(times.observed()) == [(work, 1.5)]
    times.interrupt()
    times.end(work, 0.5)
    times.end(work, 0.5)
    assert list(times.observed()) == [(work, 1.0)]


def test_a_prefill_is_timed_from_its_own_begin(monkeypatch):
    now = iter([0.0, 7.0, 9.0, 12.0, 13.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    times, work = ForwardTimes("cpu"), Work(1, 1, 1)
    times.end(work, 0.0)
    times.end(None, 0.0)
    times.end(Prefill(10), 0.0)
    times.interrupt()
    times.end(work, 0.0)
    times.end(work, 0.0)
    assert list(times.observed()) == [(Prefill(10), 2.0), (work, 1.0)]


def test_a_prompt_takes_the_time_of_all_its_chunks():
    found = Estimates()
    assert found.prompt_s.value == 0.0
    for tokens, seconds in ((8, 9.0), (0, 1.0), (0, 1.0), (1000, 0.5)):
        found.observe_prefill(tokens, seconds)
    assert found.prompt_s.value == 0.0025
    for _ in range(200):
        found.observe_prefill(2000, 2.0)
    assert abs(found.prompt_s.value - 0.001) < 1e-6
