"""The table of invariants in docs/reliability.md is what the code raises."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vericache_sglang"
LEFT_OUT = ("calibrate", "simulation", "evaluation")
"""Rooms no server runs."""

KINDS = {"cache", "request", "all", "start"}
ROW = re.compile(r"\| `(\S+\.py)` \| (\d+) \| (\w+) \|")


def raised(file):
    """Return how often a file raises an invariant; an ``assert`` counts as one."""
    count = 0
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Assert):
            count += 1
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            count += getattr(node.exc.func, "id", "") == "InvariantError"
    return count


def test_the_table_has_every_invariant_and_its_kind():
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE).as_posix()
        if not path.startswith(LEFT_OUT) and raised(file):
            found[path] = raised(file)
    rows = ROW.findall((ROOT / "docs" / "reliability.md").read_text())
    assert {path: int(count) for path, count, _ in rows} == found
    assert {kind for _, _, kind in rows} == KINDS
