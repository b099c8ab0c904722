"""The paper's figures: those it works out are met, every wide gap is explained."""

from pathlib import Path

import pytest

from vericache_sglang.planning.paper.claim import Claim, table
from vericache_sglang.planning.paper.long_context import budget_sweep, link_sweep
from vericache_sglang.planning.paper.report import all_claims, page

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def claims():
    return all_claims()


def test_every_figure_of_the_text_is_there(claims):
    printed = {claim.paper for claim in claims}
    wanted = {
        *(35, 37, 80, 800, 64, 90),
        *(3.7, 15, 3.5, 4.35, 1.24),
        *(102, 256, 0.74, 0.2, 1.61, 2.71, 1.82, 1.02, 1.92, 3.01),
        *(1.33, 2.11, 240, 485),
    }
    assert wanted <= printed


def test_wide_gaps_are_explained(claims):
    silent = [claim.what for claim in claims if claim.wide and claim.why == "-"]
    assert silent == []


def test_a_drafter_composes_as_the_paper_says(claims):
    """Within the bound beyond which a row must explain itself."""
    (composed,) = [claim for claim in claims if claim.paper == 1.24]
    assert not composed.wide
    assert "m divides the iterations" in composed.open
    (printed,) = [claim for claim in claims if claim.paper == 4.35]
    assert printed.wide  # the appendix multiplies two gains that share a bottleneck


def test_sweeps_go_the_papers_way():
    # A smaller KV budget helps VeriCache and hurts SparseSpec; a faster link helps.
    _, ours_wide, sparse_wide, _, ours_tight, sparse_tight = budget_sweep()
    assert ours_tight.ours > ours_wide.ours
    assert sparse_tight.ours < sparse_wide.ours
    slow, fast = link_sweep()
    assert fast.ours > slow.ours


def test_gap_and_row_by_hand():
    claim = Claim(what="speed", paper=2.0, ours=2.5, unit="x", why="luck")
    assert claim.gap == 0.25
    assert (
        table((claim,)).splitlines()[-1] == "| speed | 2 x | 2.5 x | +25% | - | luck |"
    )
    near = Claim(what="speed", paper=123, ours=130, unit="ms", why="luck")
    assert near.cells()[1:] == ("123 ms", "130 ms", "+6%", "-", "-")


def test_the_page_in_the_repository_is_the_one_written(claims):
    stored = ROOT / "scripts" / "results" / "paper_vs_ours.md"
    assert stored.read_text() == page(claims)
