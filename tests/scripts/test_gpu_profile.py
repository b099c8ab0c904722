"""Profiles of a server: iterations, gaps and waits, by hand and from torch itself."""

import gzip
import importlib.util
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu import serving
from gpu.part import Context
from gpu.parts import gaps
from gpu.profile_trace import Iteration, iterations, read
from gpu.setups import label


def context(tmp_path, **changes):
    settings_ = {"device": "cuda", "out": tmp_path / "out", "site": tmp_path / "site"}
    return Context(**settings_ | changes)


# -- traces --------------------------------------------------------------------


def mark(ts, name):
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": ts, "dur": 1} | {
        "pid": 7,
        "tid": 1,
    }


def call(ts, name, correlation=0, tid=1):
    event = {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": ts, "dur": 1}
    return event | {"pid": 7, "tid": tid, "args": {"correlation": correlation}}


def work(ts, dur, correlation, cat="kernel", name="k"):
    event = {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}
    return event | {"pid": 0, "tid": 9, "args": {"correlation": correlation}}


def test_an_iteration_is_counted_as_by_hand():
    events = [
        mark(0, "vericache[draft=3]"),
        call(5, "cudaGraphLaunch", 1),
        call(8, "cudaStreamSynchronize", tid=2),  # the thread of copies may wait
        mark(100, "vericache[draft=2 verify=1]"),
        call(101, "step"),
        call(105, "cudaLaunchKernel", 2),
        call(110, "cudaMemcpyAsync", 3),
        call(111, "cudaStreamSynchronize"),
        call(112, "cudaEventSynchronize"),
        mark(200, "vericache[plain=1]"),
        mark(210, "step[EXTEND bs=1 toks=9]"),
        call(215, "cudaLaunchKernel", 4),
        mark(300, "vericache[plain=1]"),
        # The device runs 50 behind: [60, 80] and [85, 90] of the first, [120, 160] of
        # the second, then a copy to the host, which is no work.
        work(60, 20, 1),
        work(70, 5, 1),
        work(85, 5, 1),
        work(120, 40, 2),
        work(160, 30, 3, "gpu_memcpy", "Memcpy DtoH (Device -> Pageable)"),
        work(220, 10, 4),
    ]
    first, second, third = iterations(events[::-1])
    assert first.rows == {"draft": 3}
    assert first.only_drafts
    assert (first.window_us, first.idle_us) == (60, 60 - 25)
    assert (first.kernels, first.waits, first.blocking_copies) == (3, 0, 0)
    assert not second.only_drafts
    assert (second.window_us, second.idle_us) == (100, 60)
    assert (second.waits, second.event_waits, second.blocking_copies) == (1, 1, 1)
    assert third.prefills
    assert not first.prefills
    assert (third.window_us, third.idle_us) == (0, 0)  # nothing runs after it


def test_plain_sglang_s_own_ranges_are_marks_where_ours_are_not():
    found = iterations([mark(at, f"step[DECODE bs={at}]") for at in (4, 9, 12)])
    assert [one.rows for one in found] == [{"plain": 4}, {"plain": 9}]
    assert iterations([mark(4, "step[DECODE bs=4]")]) == []
    assert iterations([]) == []


spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=8
)


@settings(max_examples=60, deadline=None)
@given(first=spans, second=spans)
def test_idle_time_is_what_no_kernel_covers(first, second):
    events = [mark(0, "vericache[draft=1]"), mark(1000, "vericache[draft=1]")]
    events += [mark(2000, "vericache[draft=1]")]
    covered = set()
    for number, (launched, runs) in enumerate(((1, first), (1001, second))):
        for ts, dur in runs:
            start = ts + 40 * number
            events += [work(start, dur, number + 1)]
            covered |= {*range(start, start + dur)}
        events.append(call(launched, "cudaGraphLaunch", number + 1))
    begin, end = min(ts for ts, _ in first), 40 + min(ts for ts, _ in second)
    found = iterations(events)[0]
    if end <= begin:
        assert (found.window_us, found.idle_us) == (0, 0)
    else:
        assert found.window_us == end - begin
        assert found.idle_us == len({*range(begin, end)} - covered)


def load_marks():
    spec = importlib.util.spec_from_file_location(
        "vericache_marks", serving.MARKS / "vericache_marks" / "__init__.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_marks_of_the_real_watch_are_found_in_a_real_profile(tmp_path, monkeypatch):
    from vericache_sglang.engine.watch import Watch
    from vericache_sglang.scheduling import plan

    monkeypatch.setattr(Watch, "begin", lambda self, seats, actions: None)
    load_marks().install()
    draft, verify = (object.__new__(kind) for kind in (plan.Draft, plan.Verify))
    with torch.profiler.profile() as profile:
        Watch.begin(None, {0: "a", 3: "b"}, {0: draft, 3: verify})
        Watch.begin(None, {0: "a", 3: "b"}, None)
        Watch.begin(None, {0: "a"}, {0: draft})
    file = tmp_path / "t.trace.json.gz"
    profile.export_chrome_trace(str(file))
    found = iterations(read(file))
    assert [one.rows for one in found] == [{"draft": 1, "verify": 1}, {"plain": 2}]


def test_a_trace_that_is_still_written_is_refused(tmp_path):
    file = tmp_path / "t.json.gz"
    with gzip.open(file, "wt") as stream:
        json.dump({"traceEvents": [{"ph": "M"}] * 1000}, stream)
    assert read(file) == []
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match="is not whole"):
        read(file)


def test_a_profile_that_nobody_will_end_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(gaps, "IDLE_SECONDS", 0.1)
    assert gaps._trace(tmp_path, "x-0", []) == []
    with gzip.open(tmp_path / "x-1-TP-0.trace.json.gz", "wt") as stream:
        marks = [mark(at, "vericache[draft=1]") for at in (1, 2)]
        json.dump({"traceEvents": marks}, stream)
    assert len(gaps._trace(tmp_path, "x-1", [])) == 1


# -- verdicts ------------------------------------------------------------------


def window(idle=0.03, waits=0, copies=0, count=50):
    one = {"iterations": count, "idle_share": idle, "window_us": 900.0, "kernels": 9}
    return one | {"waits": waits, "event_waits": 3, "blocking_copies": copies}


@pytest.mark.parametrize(
    ("whole", "drafting", "passed"),
    [
        (window(), window(), [True, True, True]),
        (window(idle=0.06), window(), [False, True, True]),
        (window(idle=None), window(), [False, True, True]),
        (window(waits=9), window(waits=1), [True, False, True]),
        (window(), window(copies=1), [True, True, False]),
        (window(), window(count=0), [True, False, False]),
    ],
    ids=["good", "idle", "no kernels", "waits", "copies", "no drafting"],
)
def test_gaps_and_waits_are_judged(tmp_path, whole, drafting, passed):
    results = {"VeriCache": {"all": whole, "drafting": drafting}}
    found = gaps.conclude(context(tmp_path), results)
    assert [one.passed for one in found.checks] == passed
    assert found.label == label(0.972)


def iteration(rows, idle=10.0, waits=0):
    return Iteration(rows, False, 3, 100.0, idle, waits, 1, 0)


def test_a_window_is_summed_apart_for_iterations_that_only_draft():
    draft, mixed = {"draft": 2}, {"draft": 1, "verify": 1}
    found = gaps.sums(
        [iteration(draft), iteration(mixed, idle=40.0, waits=2), iteration(draft)]
    )
    assert found["kinds"] == {"draft": 2, "draft+verify": 1}
    assert found["all"]["idle_share"] == 60 / 300
    assert (found["all"]["waits"], found["drafting"]["waits"]) == (2, 0)
    assert found["drafting"]["iterations"] == 2
    assert found["worst"]["rows"] == mixed
    assert gaps.sums([iteration({"plain": 1})])["drafting"]["idle_share"] is None
