"""A named benchmark: its options, its results and their file."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation.options import PROGRAM, add_options
from vericache_sglang.evaluation.report import publish
from vericache_sglang.provenance import provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "configs" / "demo-model"
DEMO_LONG = REPOSITORY / "configs" / "demo-model-long"
DEMO_DRAFT = REPOSITORY / "configs" / "demo-model-draft"
DEMO_HEAD = REPOSITORY / "configs" / "demo-model-eagle3"
RESULTS = REPOSITORY / "scripts" / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One entry of the table of benchmarks.

    Attributes:
        about: Its measurement, and its failure condition.
        options: Name -> default and help; see ``add_options``.
        measure: Runs the benchmark; stores rows and figures in ``Results``.
        model: Default folder of the model; None: no model is served.
        seed: Default seed of prompts and choices.
        page: Formats the report as a Markdown page, written beside ``--out``.
        out: Default of ``--out``; None writes nothing.
        selecting: Options that only select rows: ``--resume`` may change them.
    """

    about: str
    options: Mapping[str, tuple[Any, str]]
    measure: Callable[[argparse.Namespace, Results], None]
    model: Path | None = None
    seed: int = 0
    page: Callable[[dict[str, Any]], str] | None = None
    out: Path | None = None
    selecting: tuple[str, ...] = ()

    def run(self, name: str, argv: Sequence[str]) -> int:
        """Measure, print the report and write it.

        Args:
            name: Name of the benchmark on the command line.

        Returns:
            Exit status: 0, or 1 if a check failed.

        Raises:
            VeriCacheError: An option is wrong, or a server failed.
        """
        options = self._parser(name).parse_args(argv)
        for path in {"model", "out"} & vars(options).keys():
            given = getattr(options, path)
            # A path that is not a folder is a model's name on a hub.
            is_name = path == "model" and given and not given.exists()
            setattr(options, path, given if is_name else given and given.resolve())
        results = Results(self, [name, *argv], options)
        self.measure(options, results)
        print(json.dumps(results.write(), indent=1))
        for failure in results.failures:
            print(f"FAILED: {failure}", file=sys.stderr)
        return 1 if results.failures else 0

    def _parser(self, name: str) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"{PROGRAM} {name}", description=self.about, allow_abbrev=False
        )
        common = {
            "seed": (self.seed, "of prompts and choices"),
            "out": (self.out or Path, "JSON file, written after every row"),
            "resume": (False, "keep the rows that --out has already"),
        }
        if self.model is not None:
            common["model"] = (self.model, "folder")
        add_options(parser, {**self.options, **common})
        return parser


@dataclass
class Results:
    """Results of a benchmark so far.

    Attributes:
        argv: Its name and options, as given.
        options: Its parsed options.
        rows: Rows by name, in the order of the report.
        figures: Further entries of the report.
        failures: Failed checks; the exit status is 1 if there are any.

    Raises:
        ConfigError: ``--resume`` with a file that was measured with other options.
    """

    benchmark: Benchmark
    argv: list[str]
    options: argparse.Namespace
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._head = {
            "provenance": provenance(self.argv, PROGRAM),
            "options": json.loads(json.dumps(vars(self.options), default=_spelled)),
        }
        if self.options.resume and self.options.out and self.options.out.exists():
            self._resume()

    def row(
        self, name: str, measure: Callable[..., dict[str, Any]], *args: Any
    ) -> dict[str, Any]:
        """Return a row, measured now unless ``--resume`` found it; write the file.

        Args:
            name: Unique among the rows.
            measure: Returns the row; ``--resume`` measures rows with ``error`` again.
            args: Arguments of ``measure``.
        """
        if name not in self.rows:
            commit = self._head["provenance"]["commit"]
            self.rows[name] = {"name": name, **measure(*args), "commit": commit}
            self.write()
            print(json.dumps(self.rows[name]), file=sys.stderr, flush=True)
        return self.rows[name]

    def require(self, holds: bool, failure: str) -> None:
        """Record ``failure`` if a check does not hold."""
        if not holds:
            self.failures.append(failure)

    def write(self) -> dict[str, Any]:
        """Return the report, written to ``--out`` where that is given.

        Raises:
            ConfigError: The file cannot be written.
        """
        rows = {"rows": list(self.rows.values())} if self.rows else {}
        report = {**self._head, **self.figures, "failures": self.failures, **rows}
        out, page = self.options.out, self.benchmark.page
        if out is not None:
            publish(out, json.dumps(report, indent=1) + "\n")
            if page is not None:
                publish(out.with_suffix(".md"), page(report))
        return report

    def _resume(self) -> None:
        where = f"--resume: {self.options.out.name}"
        try:
            report = json.loads(self.options.out.read_text(encoding="utf-8"))
            measured = report["options"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{where} is no report to go on with") from error
        free = {"out", "resume", *self.benchmark.selecting}
        for name, value in measured.items():
            given = self._head["options"].get(name)
            if name not in free and given != value:
                raise ConfigError(
                    f"{where} was measured with --{name} {value}, not {given}: give "
                    "another --out"
                )
        rows = [row for row in report.get("rows", ()) if "error" not in row]
        self.rows = {row["name"]: row for row in rows}


def _spelled(path: Path) -> str:
    """Return a path without parts specific to this machine."""
    inside = path.is_relative_to(REPOSITORY)
    return str(path.relative_to(REPOSITORY)) if inside else path.name
