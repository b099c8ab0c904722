"""Faults of an observer are logged once, go no further, and switch it off."""

import pytest

from vericache_sglang.observability.guard import MOST_FAILURES, Guard


def fails():
    raise ValueError("broken")


def test_a_fault_becomes_the_default_and_is_logged_with_its_traceback(caplog):
    guard = Guard()
    assert guard.call("metrics", lambda: 3, 0) == 3
    assert guard.call("metrics", fails, 0) == 0
    assert guard.call("metrics", fails, 0) == 0
    (record,) = caplog.records
    assert "the metrics failed; serving goes on" in record.getMessage()
    assert "ValueError: broken" in caplog.text


def test_failures_in_a_row_switch_off_one_observer(caplog):
    guard, calls = Guard(), []

    def counts_and_fails():
        calls.append(1)
        fails()

    for _ in range(MOST_FAILURES - 1):
        guard.call("trace", counts_and_fails, None)
    guard.call("trace", lambda: None, None)
    for _ in range(10):
        guard.call("trace", counts_and_fails, None)
    assert len(calls) == 2 * MOST_FAILURES - 1
    assert guard.is_off("trace")
    assert "the trace is switched off" in caplog.text
    assert guard.call("trace", lambda: "called", "off") == "off"
    assert guard.call("metrics", lambda: "called", "off") == "called"


@pytest.mark.parametrize(("seconds", "off"), [(0.5, False), (2.0, True)])
def test_an_observer_that_holds_up_serving_is_switched_off(seconds, off):
    now = [0.0]

    def takes():
        now[0] += seconds
        return 1

    guard = Guard(clock=lambda: now[0])
    for _ in range(MOST_FAILURES):
        assert guard.call("trace", takes, 0, slow_s=1.0) == 1
    assert guard.is_off("trace") is off
    assert guard.call("page", takes, 0) == 1


def test_what_ends_the_process_is_let_through():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guard().call("trace", interrupted, None)
