"""Calls that hang or raise cost their time-out, a few times, then nothing."""

import logging
import threading
import time

from sample_segments import took

from vericache_sglang.prefix_cache.store import calls as calls_module
from vericache_sglang.prefix_cache.store.calls import BoundedCalls
from vericache_sglang.prefix_cache.store.counters import StoreCounters


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def new_calls(clock=None):
    counters = StoreCounters()
    return BoundedCalls(
        counters, pause_s=5.0, failures=3, clock=clock or Clock()
    ), counters


def fail():
    raise ConnectionError("gone")


def test_a_result_comes_back_and_nothing_is_counted():
    calls, counters = new_calls()
    assert calls.call("get", lambda: [3], 60.0) == [3]
    assert counters == StoreCounters()


def test_three_failures_in_a_row_stop_calls_for_five_seconds():
    clock = Clock()
    calls, counters = new_calls(clock)
    for _ in range(2):
        assert calls.call("get", fail, 60.0) is None
    assert calls.call("get", lambda: True, 60.0)  # the row begins anew
    for _ in range(3):
        assert calls.call("get", fail, 60.0) is None
    made = []
    assert calls.call("get", lambda: made.append(1), 60.0) is None
    assert made == []
    clock.now += 4.9
    assert calls.call("get", lambda: True, 60.0) is None
    assert counters == StoreCounters(failed_calls=5, refused_calls=2)
    clock.now += 0.2
    assert calls.call("get", lambda: True, 60.0) is True


def test_the_first_failure_after_the_pause_stops_calls_again():
    clock = Clock()
    calls, counters = new_calls(clock)
    for _ in range(3):
        calls.call("get", fail, 60.0)
    clock.now += 5.1
    calls.call("get", fail, 60.0)
    assert calls.call("get", lambda: True, 60.0) is None
    assert counters == StoreCounters(failed_calls=4, refused_calls=1)


def test_a_call_that_hangs_is_left_behind_in_time():
    calls, counters = new_calls()
    go_on = threading.Event()
    assert took(lambda: calls.call("get", go_on.wait, 0.05)) < 15
    assert counters.failed_calls == 1
    go_on.set()


def test_so_many_calls_may_hang_and_no_more(monkeypatch):
    monkeypatch.setattr(calls_module, "MOST_STUCK", 2)
    clock = Clock()
    calls, counters = new_calls(clock)
    go_on = threading.Event()
    for _ in range(2):
        calls.call("get", go_on.wait, 0.02)
    clock.now += 60
    assert calls.call("get", lambda: True, 60.0) is None
    assert counters == StoreCounters(failed_calls=2, refused_calls=1)
    go_on.set()
    deadline = time.monotonic() + 120
    while calls.call("get", lambda: True, 60.0) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_job_that_ends_the_process_ends_only_its_thread():
    calls, counters = new_calls()

    def leave():
        raise SystemExit(3)

    assert calls.call("get", leave, 60.0) is None
    assert counters.failed_calls == 1


def test_each_kind_of_call_is_warned_of_once(caplog):
    calls, _ = new_calls()
    with caplog.at_level(logging.WARNING):
        for kind in ("get", "set", "get"):
            calls.call(kind, fail, 60.0)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "get failed" in messages[0]
    assert "gone" in messages[0]
    assert "set failed" in messages[1]


def test_counters_add_up_over_threads():
    counters = StoreCounters()
    threads = [
        threading.Thread(
            target=lambda: [counters.add(hits=1, read_bytes=2) for _ in range(500)]
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters == StoreCounters(hits=2000, read_bytes=4000)
    assert counters.report(3)["cache_store_read_bytes"] == 4000
    assert counters.report(3)["cache_store_waiting"] == 3
