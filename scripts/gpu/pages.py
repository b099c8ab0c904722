"""Tables: as text for a terminal, as Markdown for a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns of equal width, two blanks apart."""
    lines = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in lines)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; bars in cells are escaped."""
    lines = [
        [str(cell).replace("|", "\\|").replace("\n", " ") for cell in row]
        for row in (columns, *rows)
    ]
    cells = ["| " + " | ".join(row) + " |" for row in lines]
    return "\n".join([cells[0], "|" + "---|" * len(columns), *cells[1:]])


def page(report: Mapping[str, Any]) -> str:
    """Return the Markdown page of merged results (see ``gpu.collect``)."""
    labels = sorted({part["label"] for part in report["parts"].values()} - {""})
    lines = [f"# On {report['device']}, {report['date']}"]
    if report["label"]:
        lines.append(f"**{report['label']}**")
    lines += [f"Commits: {', '.join(report['commits'])}."]
    if len(report["sources"]) > 1:
        lines.append("**Parts are of different code; each says its commit below.**")
    rows = [
        (
            name,
            part["status"],
            part.get("done", ""),
            f"{part.get('seconds', 0):.0f} s",
            part.get("headline") or part.get("error", ""),
        )
        for name, part in report["parts"].items()
    ]
    columns = ("part", "status", "done", "took", "what came of it")
    lines.append(markdown_table(columns, rows))
    lines += [f"- {label}" for label in labels if label != report["label"]]
    for name, part in report["parts"].items():
        lines += _part(name, part)
    return "\n\n".join(lines) + "\n"


def _part(name: str, part: Mapping[str, Any]) -> list[str]:
    origin = part["stamp"]
    versions = ", ".join(f"{k} {v}" for k, v in origin.get("versions", {}).items())
    lines = [f"## {name}"]
    if part["label"]:
        lines.append(f"**{part['label']}**")
    lines.append(
        f"`python scripts/gpu/run.py {' '.join(origin['argv'])}`; commit "
        f"{origin['commit']}, {origin['date']}; {versions}."
    )
    if part.get("error"):
        lines.append(f"Error: `{part['error'][:600]}`")
    if part.get("checks"):
        rows = [
            (one["what"], one["wanted"], one["got"], "yes" if one["passed"] else "NO")
            for one in part["checks"]
        ]
        lines.append(markdown_table(("check", "wanted", "got", "met"), rows))
    for table in part.get("tables", ()):
        lines.append(f"### {table['title']}")
        lines.append(markdown_table(table["columns"], table["rows"]))
    return lines
