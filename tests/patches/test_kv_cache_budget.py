"""A GPU's KV pool leaves the staging region its memory; a CPU's is sized by flag."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang

from vericache_patches.mem_cache_kv_cache_budget import (  # noqa: E402
    profile_available_bytes,
)
from vericache_sglang.engine import staging_size  # noqa: E402
from vericache_sglang.errors import ConfigError  # noqa: E402

SLOT = 3 * 2 * (16 + 16) * 2
"""Bytes of a slot: 3 layers, 2 heads on this rank, K and V of 16 numbers in bf16."""


def left(device, budget, slots, monkeypatch):
    monkeypatch.setattr(staging_size, "staging_slots", lambda: slots)
    ranks = SimpleNamespace(attn_tp_size=4, attn_dcp_size=1)
    monkeypatch.setattr(staging_size, "get_parallel", lambda: ranks)
    model = SimpleNamespace(
        get_num_kv_heads=lambda tp, dcp: 8 // tp, head_dim=16, v_head_dim=16
    )
    configurator = SimpleNamespace(
        device=device,
        model_config=model,
        kv_cache_dtype=torch.bfloat16,
        layer_info=SimpleNamespace(num_effective_layers=3),
    )
    return profile_available_bytes(lambda *_: budget, configurator, 80)


@pytest.mark.parametrize(
    ("device", "slots", "taken"),
    [("cuda", 100, 100 * SLOT), ("cuda:1", 0, 0), ("cpu", 100, 0)],
)
def test_the_region_s_bytes_are_not_given_to_slots(device, slots, taken, monkeypatch):
    assert left(device, 10**6, slots, monkeypatch) == 10**6 - taken


def test_a_region_that_leaves_nothing_is_refused_by_its_flag(monkeypatch):
    with pytest.raises(ConfigError, match=r"--vericache-staging-tokens: .* 50 slots"):
        left("cuda", 50 * SLOT, 50, monkeypatch)
