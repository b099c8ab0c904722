"""What a file of results says of where it comes from."""

import shlex
from importlib.metadata import version

from vericache_sglang.provenance import provenance


def test_a_run_can_be_repeated_from_what_it_says():
    argv = ["--engine", "--a 1 --b", "--out", "x"]
    found = provenance(argv, "python -m x")
    assert shlex.split(found["command"]) == ["python", "-m", "x", *argv]
    assert found["argv"] == argv
    assert found["commit"]
    assert found["versions"]["sglang"] == version("sglang")
    hardware = found["hardware"]
    assert hardware["cores"] >= 1
    assert hardware["memory_gb"] > 0.1
    assert hardware["load_average"] >= 0
    assert hardware["cpu"]


def test_the_commit_may_be_told_where_git_is_not_carried(monkeypatch):
    monkeypatch.setenv("VERICACHE_COMMIT", "abc1234")
    assert provenance([], "x")["commit"] == "abc1234"
