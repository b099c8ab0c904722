"""What a wheel of this project holds, and what it brings."""

import re
import subprocess
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vericache_sglang.serving.refusals import SGLANG_VERSION

ROOT = Path(__file__).parents[2]
FOLDERS = ("vericache_sglang", "kernels/vericache_kernels", "patches/vericache_patches")


@pytest.fixture(scope="module")
def needs(wheel):
    """Requirements of the wheel by extra, "" for those that are always there."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    found = {}
    for line in metadata.get_all("Requires-Dist"):
        needed = Requirement(line)
        extra = re.search(r'extra == "(\w+)"', str(needed.marker or ""))
        found.setdefault(extra[1] if extra else "", {})[needed.name] = needed.specifier
    return found


def test_every_tracked_file_is_in_the_wheel(wheel):
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(
        [*listing, *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    wanted = {
        name.removeprefix("kernels/").removeprefix("patches/")
        for name in tracked
        if (ROOT / name).is_file()
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert len(wanted) > 200
    assert packed == wanted


def test_every_package_is_found_without_the_checkout(interpreter):
    code = (
        "import vericache_kernels, vericache_patches, vericache_sglang.planning as p;"
        "from importlib.metadata import entry_points as e;"
        "print(p.__file__, *(x.value for x in e(group='sglang.srt.plugins')))"
    )
    ended = interpreter.run("-c", code)
    assert ended.returncode == 0, ended.stderr
    where, plugin = ended.stdout.split()
    assert Path(where).is_relative_to(interpreter.site)
    assert plugin == "vericache_sglang.plugin:register"


def test_the_extras_pin_what_the_launcher_and_the_requirement_files_pin(needs):
    assert str(needs["cuda"]["sglang"]) == f"=={SGLANG_VERSION}"
    lines = (ROOT / "scripts/requirements-cpu.txt").read_text().splitlines()
    pinned = dict(
        re.match(r"([\w.-]+)==([^\s;]+)", line).groups()
        for line in lines
        if re.match(r"[\w.-]+==", line)
    )
    pinned = {re.sub(r"[-_.]+", "-", name).lower(): v for name, v in pinned.items()}
    assert pinned["sglang"] == SGLANG_VERSION
    assert str(needs["cuda"]["torch"]) == str(needs["cpu"]["torch"])
    for name, specifier in {**needs[""], **needs["cpu"]}.items():
        version = pinned[re.sub(r"[-_.]+", "-", name).lower()]
        assert specifier.contains(version), name
