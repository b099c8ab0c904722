"""What a layer's attention shows, and when it is left out."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from vericache_sglang.kv.prefill_observer import observed

pytestmark = pytest.mark.sglang

TOKENS, HEADS, KV_HEADS, DIM = 3, 4, 2, 8


def asked(answer, keys=True, wanted=True):
    """Attend under an observer that answers so; return result, calls, shown."""
    calls, shown = [], []

    def original(*args, **kwargs):
        calls.append((args, kwargs))
        return "attended"

    def observer(*seen):
        shown.append(seen)
        return answer

    layer = SimpleNamespace(
        layer_id=5,
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        qk_head_dim=DIM,
        v_head_dim=DIM,
        forward=original,
    )
    q = torch.randn(TOKENS, HEADS * DIM)
    k = torch.randn(TOKENS, KV_HEADS * DIM, dtype=torch.bfloat16) if keys else None
    forward = observed(layer, lambda batch: wanted, observer)
    result = forward(q, k, k, "batch", save_kv_cache=True)
    return result, calls, shown


def test_queries_and_keys_are_shown_by_head():
    result, calls, shown = asked(answer=True)
    assert result == "attended"
    ((layer, queries, keys, batch),) = shown
    assert (layer, batch) == (5, "batch")
    assert queries.shape == (TOKENS, HEADS, DIM)
    assert keys.shape == (TOKENS, KV_HEADS, DIM)
    assert calls[0][1] == {"save_kv_cache": True}


def test_attention_that_nobody_reads_is_left_out():
    result, calls, _ = asked(answer=False)
    assert calls == []
    assert result.shape == (TOKENS, HEADS * DIM)
    assert result.dtype == torch.bfloat16, "as the model's values"
    assert not result.any()


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("more", [{"keys": False}, {"wanted": False}])
def test_a_layer_with_another_ones_keys_or_an_unwanted_forward_is_not_shown(
    answer, more
):
    result, calls, shown = asked(answer, **more)
    assert (result, len(calls), shown) == ("attended", 1, [])
