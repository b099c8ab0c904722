"""A part's file of results: written after every step, read to go on from there."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

OVER = ("ok", "failed")
"""Statuses that need no other run; the others are resumed."""

UNDER_WAY = "running"


def file_of(out: Path, part: str) -> Path:
    """Return where the results of a part stand."""
    return out / f"{part}.json"


def read(file: Path) -> dict[str, Any]:
    """Return a file of results; empty where there is none, or none that can be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(part, file)


def is_of(found: Mapping[str, Any], identity: Mapping[str, str]) -> bool:
    """Say whether results are of this code and this device."""
    stamp = found.get("stamp", {})
    return all(stamp.get(key) == value for key, value in identity.items())


def is_over(
    found: Mapping[str, Any], identity: Mapping[str, str], steps: Sequence[str]
) -> bool:
    """Say whether a part needs no run: it ended, is of this, and has every step.

    Args:
        found: What its file says.
        identity: See ``gpu.stamp.identity``.
        steps: Names of the steps it has now.
    """
    has_all = set(steps) <= found.get("steps", {}).keys()
    return found.get("status") in OVER and is_of(found, identity) and has_all


class Journal:
    """The results of a part while it runs.

    Args:
        file: Of the part.
        stamp: See ``gpu.stamp.stamp``; results in the file of other code or another
            device are dropped.
        again: Drop them all.
    """

    def __init__(self, file: Path, stamp: dict[str, Any], *, again: bool) -> None:
        identity = {key: stamp[key] for key in ("source", "device")}
        before = read(file)
        keep = is_of(before, identity) and not again
        self._file = file
        self.content: dict[str, Any] = {
            "part": file.stem,
            "status": UNDER_WAY,
            "label": stamp["label"],
            "stamp": stamp,
            "steps": before.get("steps", {}) if keep else {},
            "stuck": before.get("stuck", []) if keep else [],
            "seconds": before.get("seconds", 0.0) if keep else 0.0,
        }
        if keep and before.get("began"):  # what a kill has interrupted
            self.content["stuck"].append(before["began"])

    @property
    def steps(self) -> dict[str, dict[str, Any]]:
        """What ended, by name."""
        found: dict[str, dict[str, Any]] = self.content["steps"]
        return found

    def left(self, names: Sequence[str]) -> list[str]:
        """Return which of ``names`` to run: those that were killed once come last."""
        missing = [name for name in names if name not in self.steps]
        return sorted(missing, key=lambda name: name in self.content["stuck"])

    def begin(self, name: str) -> None:
        """Note that a step runs, in case it is killed."""
        self.content["began"] = name
        self.save()

    def end(self, name: str, result: dict[str, Any]) -> None:
        """Note what came of a step."""
        self.content["began"] = ""
        self.steps[name] = result
        self.save()

    def save(self, **more: Any) -> None:
        """Write the file, with ``more`` beside what it has."""
        self.content |= more
        write(self._file, self.content)
