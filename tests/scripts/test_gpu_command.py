"""The GPU command: checks that fail, hang or die; resuming; bad input; the page."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpu import processes, results, run
from gpu.check import ROOT, Check, Context

TOY = """
import os, subprocess, sys, time
from gpu.check import Check, NotMetError

FOLDER = {folder!r}

def server(job):
    code = "import time; time.sleep(600)"
    made = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    with open(FOLDER + "/servers", "a") as file:
        file.write(f"{{made.pid}}\\n")

def good(job):
    server(job)
    job.attention = "fa3"
    job.figures["rows"] = [{{"load": "8 x 32K", "rate": "1|2"}}, {{"load": "16 x 32K"}}]

def wrong(job):
    job.figures["rows"] = [{{"rate": "7"}}]
    raise NotMetError("token 3 differs")

def raises(job):
    job.log.write_text("one\\nRuntimeError: out of memory\\nserver: gone\\n")
    raise ValueError("no server")

def hangs(job):
    server(job)
    time.sleep(600)

def dies(job):
    os._exit(7)

def asks(job):
    found = [job.found(name, "rows") for name in ("asks", "good", "dies")]
    job.figures["rows"] = [{{"found": str(found)}}]

def checks(context):
    runs = dict(hangs=hangs, good=good, wrong=wrong, raises=raises, dies=dies,
                asks=asks)
    limits = dict(hangs={limit})
    return [
        Check(name=name, about=f"about {{name}}", run=runs[name],
              seconds=limits.get(name, 60.0))
        for name in {names!r}
    ]
"""
"""A part whose servers are in sessions of their own, as real ones are."""

COMMAND = """
import sys, time
from gpu import run
from gpu.check import Context
import json
run.PARTS = "toy"
sys.exit(run.run_part("part", Context(**json.loads(sys.argv[1])), time.time() + 300))
"""


def stack(**changes):
    found = {"device": "CPU x", "name": "installed packages: torch 2", "carried": False}
    return found | {"fa3_error": "not tried"} | changes


def context(tmp_path, **changes):
    given = {"device": "cpu", "out": str(tmp_path / "out"), "site": str(tmp_path / "s")}
    given |= {"engine": [], "stack": stack(), "argv": ["part", "--device", "cpu"]}
    given["source"] = "1a2b"
    return Context(**given | changes)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Return a function that writes the toy part."""

    def write(*names, limit=60.0):
        (tmp_path / "toy").mkdir(exist_ok=True)
        text = TOY.format(folder=str(tmp_path), names=names, limit=limit)
        (tmp_path / "toy" / "part.py").write_text(text)
        monkeypatch.setattr(run, "PARTS", "toy")
        monkeypatch.syspath_prepend(str(tmp_path))
        paths = filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        sys.modules.pop("toy.part", None)
        return __import__("toy.part").part.checks(None)

    return write


def servers(tmp_path):
    return [int(line) for line in (tmp_path / "servers").read_text().split()]


def runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.extended
def test_checks_that_hang_die_or_fail_do_not_stop_the_others(toy, tmp_path, capsys):
    checks = toy("hangs", "good", "wrong", "raises", "dies", limit=20.0)
    here = context(tmp_path)
    assert run.run_part("part", here, time.time() + 300) == 1
    found = {c.name: results.Results(here, "part", checks).read(c.name) for c in checks}
    status = {name: one["status"] for name, one in found.items()}
    assert status == dict.fromkeys(status, "failed") | {"good": "ok"}
    assert found["hangs"]["error"] == "no result after 20 s"
    assert any("in hangs" in line for line in found["hangs"]["traceback"])
    assert found["raises"]["error"] == "ValueError: no server"
    assert found["raises"]["traceback"][-1] == "ValueError: no server"
    assert found["raises"]["log"] == ["one", "RuntimeError: out of memory"]
    assert "status 7" in found["dies"]["error"]
    assert found["wrong"]["figures"]["rows"] == [{"rate": "7"}]
    assert len(servers(tmp_path)) == 2
    assert not any(map(runs, servers(tmp_path)))
    page = capsys.readouterr().out
    lines = [line for line in page.splitlines() if line.startswith("| good")]
    assert [line.split("|")[6].strip() for line in lines] == ["8 x 32K", "16 x 32K"]
    assert page.endswith((tmp_path / "out" / "part.md").read_text())
    assert "1 of 5 checks passed" in page
    assert results.REHEARSAL in page
    assert "out of memory" in page
    whole = json.loads((tmp_path / "out" / "part.json").read_text())["good"]
    assert {"commit", "versions", "hardware", "argv"} <= whole["origin"].keys()
    assert (whole["label"], whole["about"]) == (results.REHEARSAL, "about good")


def test_a_check_waits_for_one_it_is_compared_with_and_not_for_itself(toy, tmp_path):
    checks = toy("asks", "good", "dies", limit=60.0)
    here = context(tmp_path)
    assert run.run_part("part", here, time.time() + 300, jobs=3) == 1
    (row,) = results.Results(here, "part", checks).read("asks")["figures"]["rows"]
    assert row["found"].startswith("[None, [{'load': '8 x 32K'")
    assert row["found"].endswith(", None]")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_command_leaves_nothing_running(toy, tmp_path, number):
    checks = toy("hangs", "good", limit=200.0)
    here = context(tmp_path)
    made = subprocess.Popen(
        [sys.executable, "-c", COMMAND, here.to_json()],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT}/scripts"},
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 240
    while not (tmp_path / "servers").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(0.5)
    made.send_signal(number)
    made.wait(120)
    while any(map(runs, servers(tmp_path))):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    left = results.Results(here, "part", checks).left()
    assert [check.name for check in left] == ["good", "hangs"]


def test_what_was_left_is_run_and_what_is_there_is_not_run_again(toy, tmp_path):
    checks = toy("raises", "good")
    here = context(tmp_path)
    found = results.Results(here, "part", checks)
    found.begin(checks[0])  # as a killed command leaves it
    assert [check.name for check in found.left()] == ["good", "raises"]
    for _ in range(2):
        assert run.run_part("part", here, time.time() + 300) == 1
        assert found.left() == []
        assert len(servers(tmp_path)) == 1


def test_time_that_is_up_ends_a_check_and_keeps_the_rest_for_later(
    toy, tmp_path, capsys
):
    checks = toy("good", "hangs", limit=200.0)
    here = context(tmp_path)
    assert run.run_part("part", here, time.time() + 60) == 3
    assert "not finished: repeat the command" in capsys.readouterr().err
    found = results.Results(here, "part", checks)
    assert [check.name for check in found.left()] == ["hangs"]
    assert found.read("hangs") == {}
    run.run_check(checks[1], found, "mark/", time.time() + 3)
    assert [check.name for check in found.left()] == ["hangs"]
    assert "| interrupted |" in found.publish()


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, True),
        ({"argv": ["again"]}, True),
        ({"stack": stack(device="CPU y")}, False),
        ({"stack": stack(name="carried kit")}, False),
        ({"engine": ["--disable-cuda-graph"]}, False),
        ({"source": "3c4d"}, False),
    ],
    ids=["same", "words", "device", "packages", "flags", "code"],
)
def test_results_of_something_else_do_not_count(tmp_path, changes, counts):
    check = Check(name="a", about="", run=print, seconds=1.0)
    before = results.Results(context(tmp_path), "part", [check])
    before.begin(check)
    before.end(check, {"status": "ok"})
    after = results.Results(context(tmp_path, **changes), "part", [check])
    assert bool(after.read("a")) is counts
    (tmp_path / "out" / "part" / "a.json").write_text('{"status": "o')
    assert after.left() == [check]


def test_the_digest_is_of_the_code_alone(tmp_path):
    file = tmp_path / "kernels" / "a.py"
    file.parent.mkdir()
    digests = []
    for name, text in ((file, "x = 1"), (tmp_path / "R.md", "x"), (file, "x = 2")):
        name.write_text(text)
        digests.append(results.source_digest(tmp_path))
    assert digests[0] == digests[1] != digests[2]


def test_processes_are_known_by_their_mark_alone():
    def started(mark):
        environment = {**os.environ, processes.VARIABLE: mark}
        code = "import time; time.sleep(600)"
        return subprocess.Popen([sys.executable, "-c", code], env=environment)

    ours, other = started("one/check/"), started("one-more/check/")
    try:
        while not processes.marked("one/"):
            time.sleep(0.05)
        processes.end("one/")
        assert ours.wait(60) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bot"], "invalid choice: 'bot' (choose from"),
        (["install"], "install: --kit is needed"),
        (["boot", "--minutes", "0"], "--minutes must be > 0"),
        (["boot", "--jobs", "0"], "--jobs must be >= 1"),
        (["throughput", "--jobs", "2"], "--jobs: throughput is measured one server"),
        (["boot", "--site", str(ROOT / "site")], "is inside the repository"),
        (["boot", "--kit", "/no/such"], "--kit /no/such is no file"),
        (["boot", "--kit", str(ROOT / "README.md")], "README.md: not"),
        (["boot"], "torch sees no CUDA device; --device cpu rehearses"),
    ],
)
def test_bad_input_is_told(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    site = [] if "--site" in words else ["--site", str(tmp_path / "site")]
    try:
        status = run.main([*words, *site])
    except SystemExit as refused:
        status = refused.code
    assert status == 2
    assert message in capsys.readouterr().err.replace("'boot', ", "")
    assert not (tmp_path / "gpu-results").exists()


def test_attention_that_does_not_load_is_on_the_page(tmp_path):
    found = stack(fa3_error="ImportError: flash_ops", device="NVIDIA H200")
    page = results.Results(context(tmp_path, device="cuda", stack=found), "p", [])
    text = page.publish()
    assert "NVIDIA H200; installed packages: torch 2" in text
    assert "ImportError: flash_ops" in text
    assert results.REHEARSAL not in text


def test_cells_line_up_and_a_bar_does_not_end_them():
    shown = results.table([{"a": "1\n2"}, {"a": "x", "bb": "x|y"}])
    assert shown.splitlines() == [
        "| a   | bb   |",
        "|-----|------|",
        "| 1 2 | -    |",
        "| x   | x\\|y |",
    ]
