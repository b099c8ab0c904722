"""The trace file as its readers see it: whole, cut off, and against the records."""

import itertools
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import ConfigError
from vericache_sglang.observability.record import (
    IterationRecord,
    RowRecord,
    TransferRecord,
    VerdictRecord,
)
from vericache_sglang.observability.trace import FIRST_LANE, ITERATIONS, LINKS, Trace
from vericache_sglang.scheduling.plan import Compress, Offload, Residency, SwapOut

ROOT = Path(__file__).parents[2]
PHASES = ("draft", "verify", "plain", "wait")


def events_of(text):
    """Read a trace as Perfetto does: what is not a whole event at the end is skipped.

    chrome://tracing removes a last comma and adds a missing bracket, which gives the
    same for text that ends with a line.
    """
    head, *lines = text.splitlines(keepends=True)
    assert head == "[\n"
    whole = [line.removesuffix(",\n") for line in lines if line.endswith("}\n")]
    assert len(whole) <= 1, "only the last event has no comma"
    return [json.loads(line[:-2]) for line in lines if line.endswith("},\n")] + [
        json.loads(line) for line in whole
    ]


def check_format(events):
    """Check what the trace event format and Perfetto's importer ask of each kind."""
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        kind = event["ph"]
        if kind == "M":
            assert event["name"] in {"process_name", "thread_name", "thread_sort_index"}
            continue
        assert event["ts"] >= 0
        if kind == "X":
            assert event["dur"] >= 0
        elif kind == "i":
            assert event["s"] in {"t", "p", "g"}
        elif kind in "be":
            assert event["id"]
            assert event["cat"]
        else:
            assert kind == "C"
            assert all(isinstance(n, int | float) for n in event["args"].values())


def slices(events):
    """Return {track: its slices in order of time, ties as in the file}."""
    tracks = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault(event["tid"], []).append(event)
    return {tid: sorted(found, key=lambda e: e["ts"]) for tid, found in tracks.items()}


def counted(events, name, at):
    """Return what a counter shows at a time: its last event up to then."""
    shown = [e for e in events if e["ph"] == "C" and e["name"] == name]
    return [e for e in shown if e["ts"] <= at][-1]["args"]


def record(index, *rows, moves=(), transfers=(), reservations=None):
    """Return iteration ``index``, which runs from 10 ms * index for 8 ms."""
    return IterationRecord(
        index=index,
        began=index * 0.010,
        ended=index * 0.010 + 0.008,
        rows=tuple(RowRecord(*row) for row in rows),
        moves=tuple(moves),
        transfers=tuple(transfers),
        reservations=reservations or {},
    )


def traced(path, *records):
    """Write a whole trace; return its events."""
    trace = Trace(path, "test")
    for each in records:
        trace.iteration(each)
    trace.close()
    events = json.loads(path.read_text())
    assert events == events_of(path.read_text())
    check_format(events)
    return events


def test_tracks_have_names(tmp_path):
    events = traced(tmp_path / "trace", record(1, ("a", "plain", 1, 1)))
    names = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert set(names) == {ITERATIONS, *(tid for tid, _ in LINKS.values()), FIRST_LANE}
    assert len(set(names.values())) == len(names)


def test_moves_are_instants_on_the_lane(tmp_path):
    moves = (Compress("b", Residency.HOST), Offload("a"), SwapOut("gone"))
    rows = (("a", "draft", 1, 0), ("b", "plain", 1, 1))
    events = traced(tmp_path / "trace", record(1, *rows, moves=moves))
    found = [
        (event["tid"], event["name"], event["ts"], event["args"])
        for event in events
        if event["ph"] == "i"
    ]
    assert found == [
        (
            FIRST_LANE + 1,
            "compress",
            18_000,
            {"rid": "b", "to": "host", "former_name": "split"},
        ),
        (FIRST_LANE, "offload", 18_000, {"rid": "a", "former_name": "offload"}),
        (ITERATIONS, "swap_out", 18_000, {"rid": "gone", "former_name": "park"}),
        (ITERATIONS, "closed", 18_000, {"iterations": 1}),
    ]


def test_a_verdict_is_a_slice_from_its_drafts_to_its_tokens(tmp_path):
    row = ("a", "wait", 0, 4)
    verdicts = (VerdictRecord("a", 6, 4, 0.003), VerdictRecord("a", 1, 1, 99.0))
    given = replace(record(1, row), verdicts=verdicts)
    events = traced(tmp_path / "trace", given)
    found = [
        (each["ph"], each["id"], each["tid"], each["ts"], each["args"])
        for each in events
        if each.get("cat") == "verdict"
    ]
    one, other = ({"rid": "a", "drafts": d, "tokens": n} for d, n in ((6, 4), (1, 1)))
    assert found == [
        ("b", 1, FIRST_LANE, 7_000, one),
        ("e", 1, FIRST_LANE, 10_000, one),
        ("b", 2, FIRST_LANE, 0, other),
        ("e", 2, FIRST_LANE, 10_000, other),
    ]


def test_copies_noticed_together_are_drawn_back_to_back(tmp_path):
    copies = [
        TransferRecord("a", "in", 100, 0.009, 0.002),
        TransferRecord("b", "in", 200, 0.009, 0.003),
        TransferRecord("b", "out", 300, 0.009, 0.001),
    ]
    late = TransferRecord("c", "in", 400, 0.019, 0.015)
    tracks = slices(
        traced(
            tmp_path / "trace",
            record(1, transfers=copies),
            record(2, transfers=[late]),
        )
    )
    (prefetches, _), (offloads, _) = LINKS["in"], LINKS["out"]
    assert [(e["ts"], e["dur"], e["args"]["rid"]) for e in tracks[prefetches]] == [
        (4_000, 2_000, "a"),
        (6_000, 3_000, "b"),
        (9_000, 10_000, "c"),
    ]
    assert tracks[prefetches][2]["args"]["seconds"] == 0.015, "the true one"
    (out,) = tracks[offloads]
    assert out["args"] == {"rid": "b", "bytes": 300, "seconds": 0.001}


def test_nobody_runs_in_a_pause(tmp_path):
    row = ("a", "draft", 1, 0)
    events = traced(tmp_path / "trace", record(1, row), record(2, row), record(500))
    nobody = dict.fromkeys(PHASES, 0)
    assert counted(events, "requests", 27_999)["draft"] == 1
    assert counted(events, "requests", 28_000) == nobody
    busy = traced(tmp_path / "busy", record(1, row))
    assert counted(busy, "requests", 18_000) == nobody, "nor after the end"


def test_a_rid_may_be_any_text(tmp_path):
    rid = 'a"},\n{"\\é\ud800'
    tracks = slices(traced(tmp_path / "trace", record(1, (rid, "plain", 1, 1))))
    assert tracks[FIRST_LANE][0]["args"]["rid"] == rid


def test_a_rank_goes_into_the_name(tmp_path):
    assert Trace(tmp_path / "a.json", "test", rank=2).path == tmp_path / "a.2.json"
    assert Trace(tmp_path / "a", "test", rank=0).path == tmp_path / "a.0"


@pytest.mark.parametrize("path", ["missing/trace", ".", "nul\0", "/dev/full"])
def test_an_unwritable_path_names_the_flag(tmp_path, path):
    with pytest.raises(ConfigError, match="--vericache-trace"):
        Trace(tmp_path / path, "test")


def test_a_symbolic_link_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "trace").symlink_to(victim)
    with pytest.raises(ConfigError, match=r"--vericache-trace .*trace"):
        Trace(tmp_path / "trace", "test")
    assert victim.read_text() == "precious"


def test_a_full_file_is_closed_and_one_older_file_kept(tmp_path):
    path, most = tmp_path / "trace", 4000
    trace = Trace(path, "test", most_bytes=most)
    rows = [(f"r{i}", "draft", 1, 0) for i in range(8)]
    full = {"link": (1, 2)}
    indices = []
    for i in range(1, 60):
        trace.iteration(record(i, *rows, reservations=full))
        sizes = [each.stat().st_size for each in tmp_path.iterdir()]
        assert len(sizes) <= 2
        assert max(sizes) < most + 2500, "one iteration more than the limit"
    trace.close()
    assert {each.name for each in tmp_path.iterdir()} == {"trace", "trace.1"}
    for name in ("trace.1", "trace"):
        events = json.loads((tmp_path / name).read_text())  # each is whole
        check_format(events)
        tracks = slices(events)
        # Tracks are named and counters begin in every file.
        named = {e["tid"] for e in events if e["name"] == "thread_name"}
        assert tracks.keys() <= named
        indices += [e["args"]["index"] for e in tracks[ITERATIONS]]
        first = tracks[ITERATIONS][0]["ts"]
        assert counted(events, "requests", first)["draft"] == 8
        assert counted(events, "ring link", first) == {
            "iteration": 1,
            "horizon": 3,
            "window": 1,
        }
    assert indices == [*range(indices[0], 60)]
    assert indices[0] > 1, "what was older is gone"


def test_rotation_replaces_a_link_and_does_not_follow_it(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    trace = Trace(tmp_path / "trace", "test", most_bytes=1)
    (tmp_path / "trace.1").symlink_to(victim)
    trace.iteration(record(1, ("a", "plain", 1, 1)))
    trace.close()
    assert victim.read_text() == "precious"
    assert not (tmp_path / "trace.1").is_symlink()


def test_a_trace_that_cannot_be_rotated_ends(tmp_path, caplog):
    folder = tmp_path / "folder"
    folder.mkdir()
    trace = Trace(folder / "trace", "test", most_bytes=1)
    (folder / "trace").rename(tmp_path / "elsewhere")
    folder.rmdir()
    for i in (1, 2):
        trace.iteration(record(i, ("a", "plain", 1, 1)))
    assert caplog.text.count("the trace ends here") == 1
    assert json.loads((tmp_path / "elsewhere").read_text())[-1]["name"] == "closed"


def test_a_device_is_not_renamed():
    trace = Trace("/dev/null", "test", most_bytes=1)
    for i in (1, 2):
        trace.iteration(record(i, ("a", "plain", 1, 1)))
    trace.close()
    assert Path("/dev/null").is_char_device()


def test_nothing_follows_the_end(tmp_path):
    trace = Trace(tmp_path / "trace", "test")
    trace.close()
    written = trace.path.read_text()
    trace.iteration(record(1, ("a", "plain", 1, 1)))
    trace.close()
    assert trace.path.read_text() == written


def test_a_cut_file_loses_the_cut_line_only(tmp_path):
    trace = Trace(tmp_path / "trace", "test")
    trace.iteration(record(1, ("a", "draft", 1, 0)))
    text = trace.path.read_text()
    events = events_of(text)
    assert text.endswith(",\n")
    assert json.loads(text.rstrip(",\n") + "]") == events, "as chrome://tracing does"
    last = text.rindex("\n", 0, -1) + 1
    for cut in range(last, len(text)):
        assert events_of(text[:cut]) == events[:-1]


CHILD = """
import os, resource, signal, sys
from vericache_sglang.observability.record import IterationRecord, RowRecord
from vericache_sglang.observability.trace import Trace

trace = Trace(sys.argv[1], "test")
if sys.argv[2] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for i in range(1, 101):
    rows = tuple(RowRecord(f"r{n}", "plain", 1, 1) for n in range(3))
    trace.iteration(IterationRecord(i, i, i + 0.5, rows, (), (), {}))
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
trace.close()
"""


def run_child(path, how):
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(path), how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_killed_process_leaves_every_iteration(tmp_path):
    assert run_child(tmp_path / "trace", "killed").returncode == -9
    text = (tmp_path / "trace").read_text()
    assert text.endswith(",\n")
    tracks = slices(events_of(text))
    assert [e["args"]["index"] for e in tracks[ITERATIONS]] == [*range(1, 101)]
    assert len(tracks[FIRST_LANE + 2]) == 100


def test_a_full_disk_ends_the_trace_after_a_whole_line(tmp_path):
    run = run_child(tmp_path / "trace", "full")
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("the trace ends here") == 1
    text = (tmp_path / "trace").read_text()
    assert 0 < len(text) < 2000
    assert text.endswith(",\n")
    indices = [e["args"]["index"] for e in slices(events_of(text))[ITERATIONS]]
    assert indices == [*range(1, len(indices) + 1)]
    assert indices


RIDS = st.lists(st.sampled_from("abcdefgh"), max_size=5, unique=True)
AMOUNTS = st.lists(st.integers(0, 9), max_size=4).map(tuple)
GAPS = st.sampled_from([0, 1, 700, 99_999, 3_000_000])
COPIES = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["in", "out"]), GAPS), max_size=4
)


@st.composite
def histories(draw):
    """Draw iterations in order of time, with copies noticed at their starts."""
    history, now = [], 0
    for index in range(1, draw(st.integers(1, 12)) + 1):
        began = now + draw(GAPS)
        now = began + 1 + draw(GAPS)
        rows = tuple(
            RowRecord(rid, draw(st.sampled_from(PHASES)), index, len(rid))
            for rid in draw(RIDS)
        )
        copies = tuple(
            TransferRecord(rid, way, index, began / 1e6, long / 1e6)
            for rid, way, long in draw(COPIES)
        )
        rings = {"link": draw(AMOUNTS), "staging": draw(AMOUNTS)}
        history.append(
            IterationRecord(index, began / 1e6, now / 1e6, rows, (), copies, rings)
        )
    return history


@given(histories())
def test_any_history_is_drawn_as_it_was(history):
    with tempfile.TemporaryDirectory() as folder:
        events = traced(Path(folder, "trace"), *history)
    tracks = slices(events)
    for found in tracks.values():
        for before, after in itertools.pairwise(found):
            assert before["ts"] + before["dur"] <= after["ts"], "slices overlap"
    shown = [
        (round(e["ts"]), e["dur"], e["name"], e["args"])
        for tid, found in tracks.items()
        if tid >= FIRST_LANE
        for e in found
    ]
    wanted = [
        (
            round(each.began * 1e6),
            round(each.ended * 1e6) - round(each.began * 1e6),
            row.phase,
            {"rid": row.rid, "tokens": row.tokens, "emitted": row.emitted},
        )
        for each in history
        for row in each.rows
    ]
    assert sorted(shown, key=repr) == sorted(wanted, key=repr)
    assert [(round(e["ts"]), e["args"]) for e in tracks[ITERATIONS]] == [
        (round(each.began * 1e6), counted_rows(each)) for each in history
    ]
    at_once = max(len(each.rows) for each in history)
    assert len([tid for tid in tracks if tid >= FIRST_LANE]) <= at_once
    check_counters(events, history)
    check_copies(tracks, history)


def counted_rows(each):
    phases = [row.phase for row in each.rows]
    emitted = sum(row.emitted for row in each.rows)
    counts = {phase: phases.count(phase) for phase in PHASES}
    return {"index": each.index, **counts, "emitted": emitted}


def check_counters(events, history):
    """Compare every counter with the last record that begins at a time."""
    at = {round(each.began * 1e6): each for each in history}
    for began, each in at.items():
        phases = [row.phase for row in each.rows]
        assert counted(events, "requests", began) == {
            phase: phases.count(phase) for phase in PHASES
        }
        for ring, amounts in each.reservations.items():
            assert counted(events, f"ring {ring}", began) == {
                **dict.fromkeys(("iteration", "window"), amounts[0] if amounts else 0),
                "horizon": sum(amounts),
            }
    for ring in ("link", "staging"):
        shown = [e["args"] for e in events if e["name"] == f"ring {ring}"]
        for before, after in itertools.pairwise(shown):
            assert before != after, "only what changes"


def check_copies(tracks, history):
    """Compare each link's slices with the copies in the order they ended."""
    for way, (tid, name) in LINKS.items():
        drawn = tracks.get(tid, [])
        assert {e["name"] for e in drawn} <= {name}
        copies = [c for each in history for c in each.transfers if c.direction == way]
        assert sorted((e["args"]["rid"], e["args"]["bytes"]) for e in drawn) == sorted(
            (c.rid, c.nbytes) for c in copies
        )
        last = {c.nbytes: c.ended for c in copies}
        for e in drawn:
            assert e["ts"] + e["dur"] <= round(last[e["args"]["bytes"]] * 1e6)
            assert e["dur"] <= round(e["args"]["seconds"] * 1e6)
