"""Rotations behind the end of SGLang's table of cosines and sines."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding

from vericache_sglang.compression.base import NOTHING, Step
from vericache_sglang.compression.expected_attention import ExpectedAttention
from vericache_sglang.runtime.model_services import ModelServices

HEADS, KV_HEADS, DIM, BASE = 4, 2, 8, 100


def plain(length, *, neox=True, rotated=DIM):
    return RotaryEmbedding(DIM, rotated, length, BASE, neox, torch.float32)


def yarn(length, *, neox=True, rotated=DIM):
    """Return an embedding of amplitude 1.1386 whose table has ``length`` rows."""
    half = length // 4
    return YaRNScalingRotaryEmbedding(DIM, rotated, half, BASE, neox, 4, torch.float32)


def services(rotary):
    """Return what a model of one attention layer with this embedding offers."""
    attention = torch.nn.Module()
    attention.attn = RadixAttention(HEADS, DIM, 1.0, KV_HEADS, layer_id=0)
    attention.rotary_emb = rotary
    model = torch.nn.Module()
    model.self_attn = attention
    config = SimpleNamespace(hidden_size=32, get_total_num_kv_heads=lambda: 1)
    runner = SimpleNamespace(model=model, model_config=config, tp_rank=0, tp_size=1)
    return ModelServices(runner, SimpleNamespace(model_path="a model"))


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("inverse", [False, True], ids=["turn", "inverse"])
@pytest.mark.parametrize("rotated", [DIM, DIM // 2])
@pytest.mark.parametrize("neox", [True, False], ids=["halves", "interleaved"])
@pytest.mark.parametrize("kind", [plain, yarn])
def test_a_short_table_rotates_as_a_long_one(kind, neox, rotated, inverse):
    short = services(kind(64, neox=neox, rotated=rotated))
    long = services(kind(64, neox=neox, rotated=rotated))
    # SGLang's own way to lengthen a table, which keeps YaRN's frequencies.
    long._layers[0][1].rotary_emb._ensure_cos_sin_cache_length(200)
    assert len(long._rotation[0]) > 127 > len(short._rotation[0]) - 1 == 63
    positions = torch.arange(127)
    keys = drawn(KV_HEADS, 127, DIM)
    turned = short.rope(keys, positions, inverse=inverse)
    wanted = long.rope(keys, positions, inverse=inverse)
    torch.testing.assert_close(turned, wanted, rtol=1e-5, atol=3e-5)
    inside = slice(0, 64)
    assert torch.equal(turned[:, inside], wanted[:, inside]), "no bit changes inside"


@given(st.integers(0, 126), st.integers(0, 2**20))
def test_rotation_equals_the_oracle_and_is_undone(position, seed):
    key = drawn(DIM, seed=seed).tolist()
    turned = [0.0] * DIM
    for i in range(DIM // 2):
        angle = position * BASE ** (-2 * i / DIM)
        left, right = key[i], key[i + DIM // 2]
        turned[i] = left * math.cos(angle) - right * math.sin(angle)
        turned[i + DIM // 2] = right * math.cos(angle) + left * math.sin(angle)
    short, at = services(plain(64)), torch.tensor([position])
    found = short.rope(torch.tensor(key).view(1, 1, DIM), at)
    torch.testing.assert_close(
        found.flatten().double(), torch.tensor(turned).double(), rtol=1e-4, atol=5e-5
    )
    back = short.rope(found, at, inverse=True)
    torch.testing.assert_close(back.flatten(), torch.tensor(key), rtol=1e-4, atol=5e-5)


def test_more_than_two_tables_ahead_is_refused():
    with pytest.raises(IndexError):
        services(plain(64)).rope(drawn(1, 1, DIM), torch.tensor([127]))


def test_expected_attention_looks_behind_the_end_of_the_context():
    """A prompt as long as the table, and its next positions, of which none is in it."""
    queries, keys = drawn(HEADS, 64, DIM, seed=1), drawn(KV_HEADS, 64, DIM, seed=2)
    scores = []
    for length in (64, 128):
        selector = ExpectedAttention(future=48)
        selector.bind(services(plain(length)))
        selector.open("r")
        selector.update(Step(rid="r", layer=0, start=0, queries=queries))
        scores.append(selector.scores("r", 0, keys, keys, NOTHING))
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-6)
    assert scores[0].std() > 0.05, "the keys are told apart"
