"""One thread, a bounded queue: in order, never blocking, emptied before it closes."""

import threading

import pytest

from vericache_sglang.store.background import Background


def test_jobs_run_in_their_order_and_answer():
    done = []
    thread = Background("test", 10)
    futures = [thread.submit(lambda i=i: done.append(i) or i) for i in range(10)]
    assert [future.result(5) for future in futures] == list(range(10))
    assert done == list(range(10))


def test_a_full_queue_refuses_at_once():
    thread = Background("test", 2)
    go_on = threading.Event()
    started = threading.Event()
    thread.submit(lambda: started.set() or go_on.wait(5))
    assert started.wait(5)
    assert [thread.submit(lambda: 1) is None for _ in range(3)] == [False, False, True]
    assert not thread.drain(0.01)
    go_on.set()
    assert thread.drain(5)
    assert thread.submit(lambda: 1) is not None


def test_closing_runs_what_waits_and_takes_no_more():
    done = []
    thread = Background("test", 10)
    for i in range(5):
        thread.submit(lambda i=i: done.append(i))
    assert thread.close(5)
    assert done == [0, 1, 2, 3, 4]
    assert thread.submit(lambda: 1) is None
    assert thread.close(0)


def test_a_job_that_raises_tells_its_future_and_the_next_one_runs():
    thread = Background("test", 10)
    bad = thread.submit(lambda: 1 / 0)
    good = thread.submit(lambda: 7)
    with pytest.raises(ZeroDivisionError):
        bad.result(5)
    assert good.result(5) == 7


def test_a_job_that_was_cancelled_does_not_run():
    done = []
    thread = Background("test", 10)
    go_on = threading.Event()
    thread.submit(lambda: go_on.wait(5))
    future = thread.submit(lambda: done.append(1))
    assert future.cancel()
    go_on.set()
    assert thread.drain(5)
    assert done == []


def test_a_job_that_ran_holds_nothing_any_more():
    class Tensor:
        pass

    gone = threading.Event()
    tensor = Tensor()
    thread = Background("test", 10)
    thread.submit(lambda kept=tensor: kept).result(5)
    import weakref

    weakref.finalize(tensor, gone.set)
    del tensor
    assert gone.wait(5)


def test_a_thread_that_was_never_used_closes():
    assert Background("test", 1).close(0)
