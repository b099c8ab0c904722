"""Rewrites a wheel without the files that match a pattern: ``IN.whl FOLDER REGEX``."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import zipfile
from pathlib import Path

RECORD = ".dist-info/RECORD"


def slim(source: Path, target: Path, drop: re.Pattern[str]) -> None:
    """Copy a wheel, leaving files out; its list of files stays right.

    Args:
        source: The wheel.
        target: Written; keeps the name, so that pip takes it.
        drop: Searched in every name; what it finds is left out.

    Raises:
        ValueError: It has no list of files, so it is no wheel.
    """
    rows: list[str] = []
    with (
        zipfile.ZipFile(source) as old,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new,
    ):
        records = [name for name in old.namelist() if name.endswith(RECORD)]
        if not records:
            raise ValueError(f"{source} has no {RECORD}")
        for name in old.namelist():
            if name in records or drop.search(name):
                continue
            content = old.read(name)
            new.writestr(old.getinfo(name), content, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
            rows.append(f"{name},sha256={digest.rstrip(b'=').decode()},{len(content)}")
        new.writestr(records[0], "\n".join([*rows, f"{records[0]},,"]) + "\n")


def main() -> None:
    """Slim the wheel that the command line names."""
    source, folder, pattern = sys.argv[1:]
    target = Path(folder, Path(source).name)
    slim(Path(source), target, re.compile(pattern))
    print(f"{target.name} {target.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
