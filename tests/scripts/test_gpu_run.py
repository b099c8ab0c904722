"""The GPU command's machinery: resuming, limits, failures, tables, merged files."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpu import child, journal, run, stamp, work
from gpu.part import REHEARSAL, Check, Context, Step, Summary
from gpu.parts import PARTS, module_of

ROOT = Path(__file__).parents[2]
STAMP = {
    "source": "aaaa",
    "device": "CPU x",
    "commit": "abc1234",
    "argv": ["--parts", "device"],
    "date": "2026-11-21T12:00:00+00:00",
    "label": "",
    "versions": {"torch": "2"},
}
IDENTITY = {"source": "aaaa", "device": "CPU x"}


def context(tmp_path, **changes):
    settings = {"device": "cpu", "out": tmp_path / "out", "site": tmp_path / "site"}
    return Context(**settings | changes)


def notes(tmp_path, again=False, **changes):
    file = journal.file_of(tmp_path, "device")
    return journal.Journal(file, STAMP | changes, again=again)


def step(name, log, fails=False, seconds=0.0):
    def do():
        log.append(name)
        if fails:
            raise ValueError("it is broken")
        return {"value": name}

    return Step(name, do, seconds)


def steps_of(*made):
    return {one.name: one for one in made}


# -- resuming ------------------------------------------------------------------


def test_what_ended_is_not_run_again(tmp_path):
    ran = []
    first = notes(tmp_path)
    assert work.run(first, steps_of(step("a", ran)), time.monotonic() + 60)
    second = notes(tmp_path)
    assert work.run(
        second, steps_of(step("a", ran), step("b", ran)), time.monotonic() + 60
    )
    assert ran == ["a", "b"]
    assert {name: one["value"] for name, one in second.steps.items()} == {
        "a": "a",
        "b": "b",
    }


@pytest.mark.parametrize(
    ("changes", "again", "kept"),
    [
        ({}, False, True),
        ({"commit": "other"}, False, True),
        ({"source": "bbbb"}, False, False),
        ({"device": "CPU y"}, False, False),
        ({}, True, False),
    ],
    ids=["same", "other commit, same code", "other code", "other device", "again"],
)
def test_results_are_kept_for_the_same_code_and_device(tmp_path, changes, again, kept):
    work.run(notes(tmp_path), steps_of(step("a", [])), time.monotonic() + 60)
    assert ("a" in notes(tmp_path, again, **changes).steps) is kept


def test_a_part_is_over_only_with_every_step_it_has_now():
    found = {"status": "failed", "stamp": STAMP, "steps": {"a": {}}}
    assert journal.is_over(found, IDENTITY, ["a"])
    assert not journal.is_over(found, IDENTITY, ["a", "b"])
    assert not journal.is_over(found | {"status": "killed"}, IDENTITY, ["a"])
    assert not journal.is_over(found | {"status": "unfinished"}, IDENTITY, ["a"])
    assert not journal.is_over(found, IDENTITY | {"device": "CPU y"}, ["a"])
    assert not journal.is_over({}, IDENTITY, [])


def test_a_step_that_was_killed_goes_last(tmp_path):
    first = notes(tmp_path)
    first.begin("a")  # and never ends
    assert notes(tmp_path).left(["a", "b", "c"]) == ["b", "c", "a"]


def test_steps_that_would_not_end_in_time_are_left_for_the_next_run(tmp_path):
    ran = []
    made = steps_of(step("a", ran, seconds=99), step("b", ran, seconds=99))
    assert not work.run(notes(tmp_path), made, time.monotonic() + 10)
    assert ran == ["a"]  # the first runs whatever it takes, or nothing ever would
    assert work.run(notes(tmp_path), made, time.monotonic() + 10)
    assert ran == ["a", "b"]


def test_a_failed_step_fails_the_part_and_not_the_others(tmp_path):
    ran, one = [], notes(tmp_path)
    made = steps_of(step("a", ran, fails=True), step("b", ran))
    assert work.run(one, made, time.monotonic() + 60)
    assert ran == ["a", "b"]
    assert work.first_error(one.steps) == "a: ValueError: it is broken"
    assert work.status_of(one.steps, Summary(headline="")) == "failed"


def test_a_check_that_is_not_met_fails_the_part():
    good, bad = (Check("x", "1", "2", passed) for passed in (True, False))
    assert work.status_of({}, Summary(headline="", checks=(good,))) == "ok"
    assert work.status_of({}, Summary(headline="", checks=(good, bad))) == "failed"


def test_a_half_written_file_counts_as_none(tmp_path):
    file = tmp_path / "device.json"
    journal.write(file, {"a": 1})
    assert journal.read(file) == {"a": 1}
    file.write_text(file.read_text()[:4])
    assert journal.read(file) == {}


# -- limits --------------------------------------------------------------------

SERVER = "import time; time.sleep(600)"
STARTS = f"""
import subprocess, sys, time, pathlib
made = subprocess.Popen([sys.executable, "-c", {SERVER!r}], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(made.pid))
time.sleep(float(sys.argv[2]))
"""
"""Starts a process in a session of its own, as servers are, and forgets it."""


def started(tmp_path, sleeps, seconds):
    note = tmp_path / "pid"
    command = [sys.executable, "-c", STARTS, str(note), str(sleeps)]
    began = time.monotonic()
    status = child.run(command, {}, tmp_path / "log", seconds, grace=1.0)
    return status, int(note.read_text()), time.monotonic() - began


def runs(pid):
    state = child._fields(pid)
    return bool(state) and state[0] != "Z"


def test_a_part_over_its_limit_ends_with_every_process_it_started(tmp_path):
    bystander = subprocess.Popen([sys.executable, "-c", SERVER], start_new_session=True)
    try:
        status, pid, took = started(tmp_path, 600, seconds=1.5)
        assert status is None
        assert not runs(pid)
        assert took < 20
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_what_a_part_leaves_behind_is_ended_too(tmp_path):
    status, pid, _ = started(tmp_path, 1.0, seconds=60)
    assert status == 0
    assert not runs(pid)


def test_a_part_that_ignores_the_request_to_end_is_made_to(tmp_path):
    code = "import signal, time; signal.signal(15, lambda *_: None)\n"
    code += "while True: time.sleep(1)"
    began = time.monotonic()
    done = child.run([sys.executable, "-c", code], {}, tmp_path / "log", 0.5, grace=0.5)
    assert done is None
    assert time.monotonic() - began < 20


def test_a_command_that_is_ended_ends_its_part(tmp_path):
    script = ROOT / "scripts" / "gpu" / "run.py"
    words = command(tmp_path, "--parts", "floors")
    made = subprocess.Popen(
        [sys.executable, str(script), *words], stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        log, seen = tmp_path / "out" / "floors.log", set()
        while not log.exists() or len(seen) < 2:  # it asks git and the driver before
            assert time.monotonic() < deadline
            time.sleep(2 * child.POLL_SECONDS)
            seen = child.below(made.pid)
        made.terminate()
        assert made.wait(60) == 128 + signal.SIGTERM
        assert not [process for process in seen if child.is_alive(process)]
    finally:
        made.kill()
        made.wait()


# -- the command ---------------------------------------------------------------


def command(tmp_path, *words):
    return [
        *("--device", "cpu", "--out", str(tmp_path / "out")),
        *("--site", str(tmp_path / "site"), *words),
    ]


def test_killed_parts_do_not_stop_others_and_resume(tmp_path, capsys):
    parts = ("--parts", "device,floors")
    assert run.main(command(tmp_path, *parts, "--minutes", "0.01")) == 1
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown[-2:]] == [
        ["device", "killed"],
        ["floors", "killed"],
    ]
    assert run.main(command(tmp_path, "--parts", "device")) == 0
    found = json.loads((tmp_path / "out" / "device.json").read_text())
    assert found["status"] == "ok"
    assert found["label"] == REHEARSAL
    assert found["stamp"]["argv"][:2] == ["--device", "cpu"]
    assert found["stamp"]["versions"]["torch"]
    assert capsys.readouterr().out.splitlines()[-3] == REHEARSAL
    assert run.main(command(tmp_path, "--parts", "device")) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("device")
    assert "ok (before)" in last


def test_without_a_gpu_a_part_is_skipped_and_says_so(tmp_path, capsys):
    words = command(tmp_path, "--parts", "device")[2:]
    assert run.main(words) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split()[:2] == ["device", "skipped"]
    assert "no CUDA device; --device cpu rehearses" in last


def test_a_part_that_dies_is_reported_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    here = context(tmp_path)
    here.out.mkdir()
    run.run_part(PARTS["device"], here, [], again=False)
    found = journal.read(journal.file_of(here.out, "device"))
    assert found["status"] == "failed"
    assert found["error"].startswith("ended with status 1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parts", "devices"], "no part is called devices; parts: device, wheels"),
        (["--site", str(ROOT / "site")], "is inside the repository"),
        (["--wheels", "/nowhere/at/all"], "--wheels /nowhere/at/all is no folder"),
        (["--minutes", "0"], "--minutes must be > 0"),
    ],
)
def test_a_wrong_command_line_is_refused_by_name(tmp_path, words, message):
    with pytest.raises(SystemExit, match=message):
        run.main(command(tmp_path, *words))


def test_a_part_whose_packages_are_missing_says_which(tmp_path):
    part = PARTS["device"]
    assert work.lacks(part, context(tmp_path)) == ""
    without = type(part)("x", "", 1, ("torch", "no_such_package"))
    assert work.lacks(without, context(tmp_path)) == "not installed: no_such_package"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_steps_of_every_part_have_names_of_their_own(tmp_path, device, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # a rehearsal sets it for good
    for part in PARTS.values():
        names = [
            s.name for s in module_of(part).steps(context(tmp_path, device=device))
        ]
        assert len(names) == len(set(names)) > 0


def test_parts_conclude_from_nothing(tmp_path):
    for device in ("cpu", "cuda"):
        for part in PARTS.values():
            made = module_of(part).conclude(context(tmp_path, device=device), {})
            assert made.headline


def test_a_context_survives_the_way_to_its_process(tmp_path):
    whole = context(tmp_path, wheels=tmp_path, minutes=1.5, backend="vericache")
    assert Context.from_json(whole.to_json()) == whole
    paths = whole.environment()["PYTHONPATH"].split(os.pathsep)
    assert paths[:2] == [str(tmp_path / "site"), str(ROOT)]


# -- where results come from ---------------------------------------------------


def test_the_commit_is_of_git_or_the_environment_or_a_carried_file(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(stamp, "ROOT", tmp_path)
    monkeypatch.delenv(stamp.COMMIT_VARIABLE, raising=False)
    wheels = tmp_path / "wheels" / "k1"
    wheels.mkdir(parents=True)
    here = context(tmp_path, wheels=wheels)
    assert stamp.commit(here) == "unknown"
    (wheels.parent / stamp.COMMIT).write_text("carried\n")
    assert stamp.commit(here) == "carried"
    monkeypatch.setenv(stamp.COMMIT_VARIABLE, "named")
    assert stamp.commit(here) == "named"


def test_the_digest_is_of_the_code_alone(tmp_path):
    file = tmp_path / "kernels" / "a.py"
    file.parent.mkdir()
    file.write_text("x = 1\n")
    before = stamp.source_digest(tmp_path)
    (tmp_path / "README.md").write_text("words")
    assert stamp.source_digest(tmp_path) == before
    file.write_text("x = 2\n")
    assert stamp.source_digest(tmp_path) != before
