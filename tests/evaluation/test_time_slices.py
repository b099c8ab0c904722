"""Servers that take turns for slices of time: one runs, and its clock alone."""

import time

import pytest

from vericache_sglang.evaluation.time_slices import SLICE_S, in_slices


class Stopped:
    """A server that is in ``running`` while it runs."""

    def __init__(self, running):
        self.running = running
        self.go_on()

    def hold(self):
        self.running.discard(self)

    def go_on(self):
        self.running.add(self)


def test_one_server_runs_at_a_time_and_its_clock_counts_that_time():
    running = set()
    servers = [Stopped(running) for _ in range(3)]
    lengths = [0.5, 2.5, 4.0]  # in slices: the last one goes on alone
    seen, together = [[] for _ in servers], []

    def ask(i, clock):
        while clock.now() < lengths[i] * SLICE_S:
            seen[i].append(clock.now())
            together.append(len(running))
            time.sleep(SLICE_S / 50)
        return i

    began = time.perf_counter()
    assert in_slices(servers, ask) == [0, 1, 2]
    assert sum(lengths) * SLICE_S <= time.perf_counter() - began
    assert max(together) == 1
    assert seen == [sorted(times) for times in seen]
    # It has waited for a slice of each of the others before its first.
    assert seen[2].count(0.0) > 1
    assert running == {*servers}


def test_all_servers_run_again_after_one_has_failed():
    running = set()
    servers = [Stopped(running), Stopped(running)]

    def ask(i, clock):
        if i:
            raise RuntimeError("a request failed")

    with pytest.raises(RuntimeError, match="a request failed"):
        in_slices(servers, ask)
    assert running == {*servers}
