"""A wheel of the checkout, and interpreters that have it and nothing else."""

import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("vericache_sglang", "kernels", "patches")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Build a wheel from a copy, so that nothing is left in the checkout."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir")
    subprocess.run([*PIP, "wheel", *options, out, copy], check=True, timeout=300)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="session")
def environment(wheel, tmp_path_factory):
    """Install the wheel, and what it needs, in a virtual environment; to be copied."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    command = [sys.executable, "-m", "venv", "--without-pip", folder]
    subprocess.run(command, check=True, timeout=120)
    options = ("install", "--no-deps", "--no-index", wheel)
    command = [*PIP, "--python", folder / "bin/python", *options]
    subprocess.run(command, check=True, timeout=300)
    (site,) = folder.glob("lib/python*/site-packages")
    for file in distribution("packaging").files:
        if file.suffix != ".pyc":
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.locate(), target)
    return folder


class Interpreter:
    """A virtual environment's Python; it sees its own packages only."""

    def __init__(self, folder):
        self.python = folder / "bin/python"
        (self.site,) = folder.glob("lib/python*/site-packages")

    def claim(self, name, version):
        """Have a package of this name listed, with metadata and no code."""
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)

    def run(self, *argv, **environment):
        return subprocess.run(
            [self.python, *argv],
            capture_output=True,
            text=True,
            timeout=120,
            env={"PATH": "/usr/bin:/bin", **environment},
            cwd=self.site,
        )


@pytest.fixture
def interpreter(environment, tmp_path):
    return Interpreter(shutil.copytree(environment, tmp_path / "venv", symlinks=True))
