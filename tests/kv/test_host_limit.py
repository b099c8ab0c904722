"""Host memory: the container's limit counts, its file cache does not."""

from pathlib import Path

import psutil
import pytest

from vericache_sglang.device.host_limit import available_host_bytes

MACHINE = psutil.virtual_memory().total
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.fixture
def groups(tmp_path):
    """Write control groups; return what ``available_host_bytes`` takes."""

    def write(lines, folders):
        listed = tmp_path / "cgroup"
        listed.write_text("".join(f"{line}\n" for line in lines))
        mount = tmp_path / "mount"
        for path, (names, limit, usage, cache) in folders.items():
            folder = mount / path
            folder.mkdir(parents=True, exist_ok=True)
            (folder / names[0]).write_text(f"{limit}\n")
            (folder / names[1]).write_text(f"{usage}\n")
            (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\nslab 1\n")
        return listed, mount

    return write


SMALL = (3 * 2**20, 2**20, 2**19)
"""A limit, what is used of it, and what of that is file cache: 2.5 MiB are left."""
LEFT = 2**21 + 2**19


@pytest.mark.parametrize(
    ("lines", "folders", "left"),
    [
        (["0::/job"], {"job": (V2, *SMALL)}, LEFT),
        (["0::/"], {"": (V2, *SMALL)}, LEFT),
        (["0::/host/job"], {"": (V2, *SMALL)}, LEFT),
        (["0::/pod/job"], {"pod": (V2, *SMALL), "pod/job": (V2, "max", 7, 0)}, LEFT),
        (["0::/pod/job"], {"pod": (V2, "max", 7, 0), "pod/job": (V2, *SMALL)}, LEFT),
        (["2:cpu,memory:/a", "0::/"], {"memory/a": (V1, *SMALL)}, LEFT),
        (["3:cpu:/a"], {"memory/a": (V1, *SMALL)}, None),
        (["0::/job"], {"job": (V2, "max", 5, 0)}, None),
        (["0::/job"], {"job": (V2, 2 * MACHINE, 5, 0)}, None),
        (["0::/job"], {"job": (V2, 2**20, 2**21, 0)}, 0),
        (["0::/job"], {}, None),
        ([], {}, None),
    ],
    ids=[
        *("v2", "namespace", "mounted elsewhere", "parent", "own", "v1", "no memory"),
        *("no limit", "above the machine", "over the limit", "no files", "no groups"),
    ],
)
def test_the_least_of_machine_and_groups_is_left(groups, lines, folders, left):
    found = available_host_bytes(*groups(lines, folders))
    if left is None:  # the machine's, which changes while tests run
        assert 2**22 < found <= MACHINE
    else:
        assert found == left


def test_a_machine_without_control_groups_has_its_own_memory():
    assert 2**22 < available_host_bytes(Path("/nowhere")) <= MACHINE


def test_this_machine_has_some():
    assert 2**22 < available_host_bytes() <= MACHINE
