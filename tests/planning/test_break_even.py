"""The acceptance from which an inner drafter pays: by hand, and as documented."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.plan import main
from vericache_sglang.planning.acceptance import Geometric
from vericache_sglang.planning.break_even import STEP, break_even
from vericache_sglang.planning.hardware import Machine
from vericache_sglang.planning.intra import InnerDrafter, ServerModel, search

DOCS = Path(__file__).parents[2] / "docs" / "requests.md"
SERVER = ServerModel(
    machine=Machine(
        name="by hand",
        memory_bytes=1000.0,
        hbm_bytes_per_s=100.0,
        link_bytes_per_s=1e9,
        flops_per_s=1e9,
    ),
    weight_bytes=100.0,
    kv_bytes=300.0,
    concurrency=1,
    acceptance=Geometric(0.9),
)
KEEP, LENGTHS = 0.5, range(1, 8)


def speed(inner):
    return search(replace(SERVER, inner=inner), [KEEP], LENGTHS).tokens_per_s


@settings(max_examples=30, deadline=None)
@given(weights=st.floats(0, 120), length=st.integers(1, 3))
def test_it_pays_from_there_on_and_not_below(weights, length):
    inner = InnerDrafter(length=length, weight_bytes=weights)
    found = break_even(SERVER, inner, KEEP, LENGTHS)
    alone = speed(InnerDrafter())
    if found is None:
        assert speed(replace(inner, accept=1.0)) < alone
        return
    assert speed(replace(inner, accept=found)) >= alone
    if found:
        below = (round(found / STEP) - 1) * STEP
        assert speed(replace(inner, accept=below)) < alone


def test_what_costs_nothing_pays_at_once_and_what_costs_more_never():
    assert break_even(SERVER, InnerDrafter(length=2), KEEP, LENGTHS) == 0.0
    dear = InnerDrafter(length=1, weight_bytes=1e6)
    assert break_even(SERVER, dear, KEEP, LENGTHS) is None


def test_drafting_one_token_it_is_what_the_proposal_reads_over_the_row():
    """Alone, and x = 1: (1 + p) over (1 + r), but for the drafts that are rejected."""
    whole = replace(SERVER, acceptance=Geometric(1.0))
    inner = InnerDrafter(length=1, weight_bytes=40.0)
    found = break_even(whole, inner, 1.0, [1])
    # A cycle of 1/(1 + p) drafts and a verification emits 2 + p tokens, each iteration
    # reads 100 + 300, and 40 more: (2 + p)(1 + p) / (2 + p) / 440 >= 2 / 2 / 400.
    assert found == pytest.approx(0.1, abs=1.5 * STEP)


def test_the_documented_table_is_the_printed_one(capsys):
    assert main(["--drafters"]) == 0
    assert capsys.readouterr().out in DOCS.read_text()
