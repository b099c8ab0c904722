"""The memory ledger: what fits, what is subtracted, what a user is told."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.hardware import GPUS
from vericache_sglang.planning.memory import (
    MIB,
    ledger,
    memory_table,
    shortage,
    subtracted_bytes,
)
from vericache_sglang.planning.memory_rows import ROWS, Phase, row_bytes
from vericache_sglang.planning.models import find_model
from vericache_sglang.runtime import planned_memory
from vericache_sglang.runtime.planned_memory import planned


def default_flags(name, gpu, **flags):
    """Return the server of a model where the user gives only ``flags``."""
    known = GPUS[gpu]
    model = find_model(name)
    return planned(model, VeriCacheConfig(), known.memory_mib, known.capability, flags)


def drafting(inner="model", **flags):
    """Return the server of a model with an inner drafter that has weights."""
    known, config = GPUS["h200"], VeriCacheConfig(inner=inner)
    model = find_model("qwen3-32b")
    return planned(model, config, known.memory_mib, known.capability, flags)


AUDITED = [
    *(default_flags(name, gpu, **flags) for name, gpu, flags in planned_memory.AUDITED),
    default_flags("qwen3-32b", "h200"),
    default_flags("llama-3.1-8b", "a100-80gb"),
]


def taken(found, *phases):
    return sum(size for row, size in found.sizes.items() if row.phase in phases)


@pytest.mark.parametrize(
    "at", AUDITED, ids=lambda at: f"{at.model.name} on {at.gpu_mib} MiB"
)
def test_default_flags_fit_with_a_prefill_and_a_compression_on_top(at):
    found = ledger(at)
    assert shortage(found) is None
    assert found.free_bytes > 0
    assert found.slots >= at.chunk, "one prefill chunk fits the KV pool"
    # The reserve holds what is allocated while it serves, the pool never grows into it.
    reserve = at.gpu_mib * MIB * (1 - at.fraction)
    assert taken(found, Phase.RESERVED, Phase.PASSING) < reserve
    static = taken(found, Phase.LOADED, Phase.POOL, Phase.SUBTRACTED)
    assert static <= at.gpu_mib * MIB * at.fraction + 600 * MIB


def test_the_ledger_sees_what_4096_requests_and_no_subtraction_would_do():
    """SGLang's default for a speculative algorithm of no name: P1 of the audit."""
    at = default_flags("llama-3.1-8b", "h200", max_running_requests=4096)
    at = replace(at, graph_rows=256)
    found = ledger(at)
    reserve = at.gpu_mib * MIB * (1 - at.fraction)
    later = taken(found, Phase.SUBTRACTED, Phase.RESERVED)
    assert later > reserve, "without the subtraction nothing is left"
    assert shortage(found) is None
    assert found.slots < ledger(AUDITED[1]).slots
    assert found.free_bytes < 0, "if they all sample with top-p and a seed"


@given(
    budget=st.integers(0, 2**38),
    more=st.integers(0, 2**34),
    running=st.integers(1, 300),
)
def test_a_larger_budget_never_leaves_fewer_bytes_for_kv(budget, more, running):
    at = replace(AUDITED[0], running=running)
    left = budget - subtracted_bytes(at, budget)
    assert budget + more - subtracted_bytes(at, budget + more) >= left - at.slot_bytes


def test_a_small_model_takes_its_weights_and_rings():
    name = str(Path(__file__).parents[2] / "configs" / "demo-model-draft")
    with_one = drafting(speculative_draft_model_path=name)
    without = default_flags("qwen3-32b", "h200")
    assert with_one.draft == find_model(name)
    assert ledger(with_one).slots < ledger(without).slots
    rows = {row.name: size for row, size in ledger(with_one).sizes.items()}
    assert rows["weights of the small model or head"] == with_one.draft.weight_bytes
    assert rows["KV of the small model or head"] > 0
    # Two ranks have half of the weights each; its one KV head is on both.
    halved = ledger(replace(with_one, ranks=2)).sizes.items()
    parts = {row.name: size for row, size in halved}
    for name, share in {
        "weights of the small model or head": 2,
        "KV of the small model or head": 1,
    }.items():
        assert parts[name] * share == rows[name]


def test_a_head_takes_its_features_too():
    name = str(Path(__file__).parents[2] / "configs" / "demo-model-eagle3")
    at = drafting("eagle3", speculative_draft_model_path=name)
    rows = {row.name: size for row, size in ledger(at).sizes.items()}
    stored = 3 * at.model.hidden * at.draft.element_bytes
    assert rows["features of a prefill"] == 2 * at.chunk * stored
    kept = rows["features that a head reads"]
    assert kept == (at.running + 1) * at.config.ring_reach * stored


def test_a_prediction_head_is_one_layer_of_the_model():
    at = drafting("mtp")
    assert at.draft.layers == 1
    rows = {row.name: size for row, size in ledger(at).sizes.items()}
    assert rows["weights of the small model or head"] < at.model.weight_bytes / 60
    kept = at.model.hidden * at.draft.element_bytes
    assert rows["features of a prefill"] == 2 * at.chunk * kept


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "--vericache-inner model needs --speculative-draft-model-path"),
        (
            {"speculative_draft_model_path": "/nothing"},
            "--speculative-draft-model-path '/nothing' is neither a folder",
        ),
    ],
)
def test_a_small_model_that_is_unknown_is_named(flags, words):
    with pytest.raises(ConfigError, match=words):
        drafting(**flags)


def test_subtracted_are_the_rows_that_are_allocated_after_the_pool():
    at = AUDITED[0]
    found = ledger(at)
    symbols = at.symbols(found.slots, found.staging)
    rows = [row for row in ROWS if row.backend in ("", "fa3")]
    later = sum(row_bytes(r, symbols) for r in rows if r.phase is Phase.SUBTRACTED)
    # Some tables grow with the slots, and the budget is counted as if all were slots.
    budget = (found.slots + found.staging) * at.slot_bytes + later
    assert later <= subtracted_bytes(at, budget) <= 1.01 * later


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"gpu_mib": 16000},
            [
                "GiB are missing where a prefill runs",
                "weights: 15.26 GiB, raise --tp-size",
            ],
        ),
        (
            {"fraction": 0.999},
            ["are missing", "lower --mem-fraction-static, now 0.999"],
        ),
        ({"fraction": 0.12}, ["KV pool", "raise --mem-fraction-static, now 0.12"]),
        (
            {"running": 8192, "context": 131072, "gpu_mib": 32768, "fraction": 0.8},
            ["block table", "lower --max-running-requests"],
        ),
        (
            {"config": VeriCacheConfig(staging_tokens=2_000_000)},
            ["staging buffer: 274.66 GiB, lower --vericache-staging-tokens"],
        ),
    ],
    ids=["weights", "no reserve", "no pool", "tables", "staging"],
)
def test_what_does_not_fit_is_named_with_the_flag_that_helps(changes, words):
    message = shortage(ledger(replace(AUDITED[0], **changes)))
    assert message is not None
    for word in words:
        assert word in message


def test_a_pool_that_the_user_made_small_is_no_shortage():
    found = ledger(replace(AUDITED[0], most_slots=3000))
    assert (found.slots, shortage(found)) == (3000, None)


def test_the_staging_buffer_leaves_most_of_a_small_pool():
    found = ledger(AUDITED[2])
    assert found.staging <= (found.slots + found.staging) / 4 + 64
    assert ledger(AUDITED[0]).staging == 61440, "two residual KVs of the context"


def test_the_table_has_every_row_its_formula_and_every_symbol_of_it():
    found = ledger(AUDITED[3])
    text = memory_table(found)
    for row, size in found.sizes.items():
        assert f"iB    {row.name} = {row.formula}\n" in text
        assert row.source in text
        assert size > 0
    assert "43.91 GiB    weights = " in text
    assert "  96.00 MiB    cuBLAS workspaces = 3 * 32 * MiB" in text
    assert f"holds {found.slots} tokens" in text
    symbols = text.rpartition("Symbols:\n")[2]
    assert "kv_heads = 8, " in symbols
    assert "page_tables" not in symbols
    assert {phase.value for phase in Phase} <= {
        line.partition("iB  ")[2] for line in text.splitlines()
    }
