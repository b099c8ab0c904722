"""One file for each check, written when it begins and when it ends; and their page."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.check import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpu.check import Check, Context

REHEARSAL = "REHEARSAL on a CPU at toy sizes: says nothing of a GPU"

MEASURED = ("vericache_sglang", "kernels", "patches", "scripts/gpu")
"""Folders of the measured code: a change of their Python files voids results."""

OK, FAILED = "ok", "failed"

LINES = 15
"""How much of a log an error quotes, in lines."""


class Results:
    """The results of one part.

    Args:
        context: Results of other code, another device, other packages or other flags
            do not count.
    """

    def __init__(self, context: Context, part: str, checks: Sequence[Check]) -> None:
        self.context = context
        self.part = part
        self.checks = checks
        self.folder = Path(context.out, part)
        self.folder.mkdir(parents=True, exist_ok=True)
        named = [context.stack["device"], context.stack["name"], *context.engine]
        self._identity = [context.source, *named]

    def read(self, name: str) -> dict[str, Any]:
        """Return what is known of a check; empty for nothing that counts."""
        try:
            found = json.loads((self.folder / f"{name}.json").read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return found if found.get("identity") == self._identity else {}

    def server_log(self, name: str) -> Path:
        """Return the file for what the server of a check prints."""
        return self.folder / f"{name}.log"

    def left(self) -> list[Check]:
        """Return the checks without an outcome; those a kill interrupted come last."""
        begun = {c: self.read(c.name).get("begun", 0) for c in self.checks}
        left = [c for c in self.checks if "status" not in self.read(c.name)]
        return sorted(left, key=lambda check: begun[check])

    def begin(self, check: Check) -> None:
        """Write that a check runs."""
        begun = self.read(check.name).get("begun", 0) + 1
        self._write(check, {"begun": begun, "at": time.time(), "run": os.getpid()})

    def finished(self, name: str, run: int) -> dict[str, Any]:
        """Return what is known of a check, once it no longer runs.

        Args:
            name: Of a check of the part.
            run: Process of the command it would run under.
        """
        while (found := self.read(name)).get("run") == run and "status" not in found:
            time.sleep(0.2)
        return found

    def end(self, check: Check, outcome: Mapping[str, Any]) -> None:
        """Write what came of a check that has begun."""
        found = self.read(check.name)
        took = round(time.time() - found["at"], 1)
        self._write(check, {**found, "seconds": took, **outcome})

    def _write(self, check: Check, content: Mapping[str, Any]) -> None:
        label = REHEARSAL if self.context.on_cpu else self.context.stack["name"]
        whole = {"check": check.name, "about": check.about, "label": label}
        whole |= {"identity": self._identity, **content}
        write_whole(self.folder / f"{check.name}.json", json.dumps(whole, indent=1))

    def publish(self) -> str:
        """Write ``OUT/PART.md`` and ``OUT/PART.json``; return the page."""
        found = {check.name: self.read(check.name) for check in self.checks}
        text = self._page(found)
        write_whole(self.folder.with_suffix(".md"), text)
        write_whole(self.folder.with_suffix(".json"), json.dumps(found, indent=1))
        return text

    def _page(self, found: Mapping[str, dict[str, Any]]) -> str:
        stack = self.context.stack
        passed = sum(one.get("status") == OK for one in found.values())
        texts = [f"# {self.part}: {passed} of {len(found)} checks passed"]
        texts += [f"**{REHEARSAL}**"] if self.context.on_cpu else []
        texts.append(f"{stack['device']}; {stack['name']}")
        rows = [row for check in self.checks for row in _rows(check, found[check.name])]
        texts.append(table(rows))
        errors = {} if self.context.on_cpu else {"no FA3": [stack["fa3_error"]]}
        for name, one in found.items():
            errors[name] = [one["error"]] if one.get("error") else []
            for title in ("traceback", "log"):
                errors[name] += [f"-- {title}:", *one[title]] if one.get(title) else []
        for title, lines in errors.items():
            quoted = "\n".join(filter(None, lines))
            texts += [f"## {title}\n\n```\n{quoted}\n```"] if quoted else []
        origins = [one["origin"] for one in found.values() if one.get("origin")]
        return "\n\n".join([*texts, *map(_origin, origins[-1:])]) + "\n"


def _rows(check: Check, one: Mapping[str, Any]) -> list[dict[str, str]]:
    status = one.get("status", "interrupted" if one else "not run")
    first = {"check": check.name, "about": check.about, "status": status}
    first["took"] = f"{one['seconds']:.0f} s" if "seconds" in one else "-"
    first["attention"] = one.get("attention") or "-"
    last = {"error": one["error"][:160]} if one.get("error") else {}
    return [first | row | last for row in one.get("figures", {}).get("rows") or [{}]]


def _origin(origin: Mapping[str, Any]) -> str:
    hardware = origin["hardware"]
    versions = ", ".join(f"{k} {v}" for k, v in origin["versions"].items())
    return (
        f"`{' '.join(origin['argv'])}`, commit {origin['commit']}, {origin['date']}. "
        f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gb']} GB; "
        f"{'; '.join(hardware['gpus']) or 'no GPU'}. {versions}."
    )


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows (title -> cell) as a Markdown table; its columns line up."""
    found = dict.fromkeys(title for row in rows for title in row)
    titles = sorted(found, key="error".__eq__)  # long texts come last
    cells = [titles, *([row.get(title, "-") for title in titles] for row in rows)]
    cells = [[" ".join(c.split()).replace("|", "\\|") for c in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def write_whole(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = file.with_suffix(f"{file.suffix}.part")
    part.write_text(f"{text}\n", encoding="utf-8")
    os.replace(part, file)


def log_end(file: Path) -> list[str]:
    """Return the lines of a log that say what went wrong: its last error, or its end.

    The lines after an error are other processes' that noticed.
    """
    text = file.read_text("utf-8", errors="replace") if file.exists() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    words = [line.partition(":")[0] for line in lines]
    kinds = ("Error", "Exception")
    ends = [i for i, w in enumerate(words, 1) if w.endswith(kinds) and " " not in w]
    last = ends[-1] if ends else len(lines)
    return lines[max(0, last - LINES) : last]


def source_digest(root: Path = ROOT) -> str:
    """Return a digest of every Python file under ``MEASURED``."""
    digest = hashlib.sha256()
    for folder in MEASURED:
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
