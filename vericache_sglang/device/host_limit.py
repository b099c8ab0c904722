"""Free host memory of a process: the machine's, or its container's.

SGLang's ``available_host_memory_bytes`` counts a container's file cache as used. After
the first start that cache holds the model's files, and a second start would find no
free memory.
"""

from __future__ import annotations

from pathlib import Path

import psutil

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def available_host_bytes(
    cgroups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the bytes of host memory that are free, or can be freed at once.

    Args:
        cgroups: The kernel's list of the control groups a process is in.
        mount: Where control groups are mounted; version 1 in a folder ``memory``.
    """
    free: int = psutil.virtual_memory().available
    try:
        lines = cgroups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return free
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = mount, _V2
        elif "memory" in controllers.split(","):
            root, names = mount / "memory", _V1
        else:
            continue
        folder = root / path.lstrip("/")
        # In a container the group itself is often mounted at the root.
        folder = folder if folder.is_dir() else root
        while folder.is_relative_to(root):
            free = min(free, _headroom(folder, *names, free))
            folder = folder.parent
    return free


def _headroom(folder: Path, limit: str, usage: str, cache: str, unlimited: int) -> int:
    """Return the bytes a control group leaves; ``unlimited`` where it has no limit."""
    try:
        most = (folder / limit).read_text(encoding="ascii").strip()
        if most == "max":
            return unlimited
        taken = int((folder / usage).read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return unlimited
    reclaimable = dict(line.split() for line in stat).get(cache, 0)
    return max(0, int(most) - taken + int(reclaimable))
