"""What is installed is what is pinned, file by file."""

import re
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PIN = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.MULTILINE)


def pins(file):
    found = PIN.findall((SCRIPTS / file).read_text())
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


@pytest.mark.parametrize("name", ["cpu", "test"])
def test_a_lock_has_the_pins_of_its_list(name):
    wanted = pins(f"requirements-{name}.txt")
    wanted.pop("torch", None)  # of PyTorch's own index
    assert pins(f"requirements-{name}.lock") == wanted


def test_the_lock_for_cuda_is_whole():
    locked = pins("requirements-cuda.lock")
    assert pins("requirements-cuda.txt").items() <= locked.items()
    for name in ("torch", "sglang-kernel", "flashinfer-python", "triton", "cuda-tile"):
        assert name in locked
    assert locked["torch"] == pins("requirements-cpu.txt")["torch"].partition("+")[0]


@pytest.mark.parametrize("name", ["cpu", "cuda", "test"])
def test_every_pin_has_hashes(name):
    text = (SCRIPTS / f"requirements-{name}.lock").read_text()
    entries = re.findall(r"^[\w.-]+==[^\n]*(?:\n +[^\n]*)*", text, re.MULTILINE)
    assert len(entries) == len(pins(f"requirements-{name}.lock"))
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
