"""Every Triton kernel compiles without a GPU, and none spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vericache_kernels.compile_report import ARCHITECTURES, Figures
from vericache_kernels.compile_report.builds import builds

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "results" / "kernel_compile.json"
TRIED = [
    *("split planes E3M1", "KIVI 2 bits", "KVQuant 4 bits", "merge of splits"),
    *("ragged rows of 32", "ragged rows of 32, batch of 256", "ragged rows of 1"),
    *("token commit", "suffix match", "pick entries"),
]
"""One of each kind but for RotateKV, which takes longest."""
MOST_REGISTERS = 255


def script(*options, cache):
    """Run the script in a process that does not interpret, its cache empty."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "compile_kernels.py"), *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return the report of ``TRIED`` for sm_90, compiled now, and the table."""
    folder = tmp_path_factory.mktemp("compiled")
    out = folder / "report"
    done = script(
        *("--arch", "90", "--only", *TRIED, "--out", str(out)), cache=folder / "cache"
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(out.with_suffix(".json").read_text())
    return report, out.with_suffix(".md").read_text(), done.stdout


@pytest.fixture(scope="module")
def stored():
    return json.loads(RESULTS.read_text())


def row(report, arch, name):
    found = [r for r in report["rows"] if (r["arch"], r["build"]) == (arch, name)]
    assert len(found) == 1
    return found[0]


@pytest.mark.extended
@pytest.mark.parametrize("name", TRIED)
def test_what_is_compiled_now_does_not_spill(compiled, name):
    figures = row(compiled[0], 90, name)
    assert figures["spill_bytes"] == figures["stack_bytes"] == 0
    assert 0 < figures["registers"] <= min(MOST_REGISTERS, builds()[name].registers)
    assert figures["programs"] >= 2


@pytest.mark.extended
@pytest.mark.parametrize("name", TRIED)
def test_what_is_compiled_now_is_like_the_stored_table(compiled, stored, name):
    now, then = row(compiled[0], 90, name), row(stored, 90, name)
    # Another Triton allocates otherwise; half as much again would be another kernel.
    for figure in ("registers", "shared_bytes", "cubin_bytes"):
        assert now[figure] == pytest.approx(then[figure], rel=0.5)


@pytest.mark.extended
def test_the_table_shows_what_the_json_says(compiled):
    report, page, printed = compiled
    assert printed.strip() in page
    for name in TRIED:
        figures = row(report, 90, name)
        line = next(line for line in page.splitlines() if line.startswith(f"| {name} "))
        assert f"| {figures['registers']} | 0 | 0 |" in line


def test_the_stored_table_has_every_build_on_every_architecture(stored):
    found = {(r["arch"], r["build"]) for r in stored["rows"]}
    assert found == {(arch, name) for arch in ARCHITECTURES for name in builds()}
    assert {"argv", "commit", "date", "hardware", "versions"} <= set(stored)


def test_nothing_in_the_stored_table_spills(stored):
    for figures in stored["rows"]:
        assert set(Figures.__annotations__) < set(figures)
        assert figures["spill_bytes"] == 0, figures["build"]
        assert figures["registers"] <= MOST_REGISTERS


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_one_draft_more_compiles_the_same_kernel(group):
    """So what is said of verifications of 32 tokens holds for those of 33."""
    import triton.language as tl

    from vericache_kernels.ragged_attention.triton_impl import constants

    shapes = [constants(tl.bfloat16, 2, queries, group, 128) for queries in (32, 33)]
    assert shapes[0] == shapes[1]
    assert shapes[0]["M"] == 32


def test_a_build_that_is_not_known_is_named(tmp_path):
    done = script("--only", "merge", cache=tmp_path)
    assert done.returncode == 1
    assert "--only: no build is called ['merge']" in done.stderr
