"""What selectors learn of the model, against Hugging Face's rotary embeddings."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("sglang")

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding.factory import get_rope

from vericache_sglang.errors import CompressionError
from vericache_sglang.runtime.model_services import ModelServices

pytestmark = pytest.mark.sglang

HEADS, KV_HEADS, DIM, WIDTH, LENGTH, BASE = 4, 2, 16, 24, 256, 10_000

KINDS = {
    "default": None,
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


class Attention(nn.Module):
    """An attention module as SGLang's models have it."""

    def __init__(self, layer, rotary):
        super().__init__()
        self.attn = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer)
        self.o_proj = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        if rotary is not None:
            self.rotary_emb = rotary


def rotary_of(kind="default", neox=True, rotated=DIM, dtype=torch.float32):
    length = 64 if kind == "yarn" else LENGTH  # SGLang multiplies it by the factor
    return get_rope(DIM, rotated, length, BASE, neox, KINDS[kind], dtype)


def services(rotary=None, layers=2):
    model = nn.ModuleList([Attention(i, rotary) for i in range(layers)])
    runner = SimpleNamespace(
        model=model,
        model_config=SimpleNamespace(
            hidden_size=WIDTH, get_total_num_kv_heads=lambda: KV_HEADS
        ),
        tp_rank=0,
        tp_size=1,
    )
    return ModelServices(runner, SimpleNamespace(model_path="folder/model"))


def keys(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(KV_HEADS, tokens, DIM, generator=generator)


def hugging_face(kind, neox, positions):
    """Return cosines, sines and the function that applies them."""
    if neox:
        from transformers import LlamaConfig as Config
        from transformers.models.llama import modeling_llama as source

        rotary = source.LlamaRotaryEmbedding
    else:
        from transformers import CohereConfig as Config
        from transformers.models.cohere import modeling_cohere as source

        rotary = source.CohereRotaryEmbedding
    config = Config(
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        rope_parameters={
            "rope_theta": float(BASE),
            **(KINDS[kind] or {"rope_type": "default"}),
        },
    )
    cosine, sine = rotary(config)(torch.zeros(1, dtype=torch.float32), positions[None])
    return cosine, sine, source.apply_rotary_pos_emb


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rotation_is_hugging_face_s(kind, neox):
    positions = torch.tensor([0, 1, 2, 17, 63, 64, 100, 255])
    raw = keys(len(positions))
    cosine, sine, apply = hugging_face(kind, neox, positions)
    wanted, _ = apply(raw[None], raw[None], cosine, sine)
    made = services(rotary_of(kind, neox))
    found = made.rope(raw, positions)
    torch.testing.assert_close(found, wanted[0], rtol=0, atol=3e-5)
    back = made.rope(found, positions, inverse=True)
    torch.testing.assert_close(back, raw, rtol=0, atol=3e-6)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotated", [DIM, DIM // 2])
def test_every_head_may_stand_elsewhere_and_a_part_may_rotate(neox, rotated):
    positions = torch.tensor([[0, 3, 9], [200, 8, 1]])
    raw = keys(3)
    found = services(rotary_of(neox=neox, rotated=rotated)).rope(raw, positions)
    for head in range(KV_HEADS):
        for token in range(3):
            turned = raw[head, token].double().tolist()
            for i in range(rotated // 2):
                one, other = (i, i + rotated // 2) if neox else (2 * i, 2 * i + 1)
                angle = positions[head, token].item() * BASE ** (-2 * i / rotated)
                x, y = raw[head, token, one].item(), raw[head, token, other].item()
                turned[one] = x * math.cos(angle) - y * math.sin(angle)
                turned[other] = y * math.cos(angle) + x * math.sin(angle)
            torch.testing.assert_close(
                found[head, token].double(),
                torch.tensor(turned, dtype=torch.float64),
                rtol=0,
                atol=3e-5,
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_the_rotation_the_model_runs_in_its_own_precision(dtype):
    rotary = rotary_of(dtype=dtype)
    assert rotary.cos_sin_cache.dtype == dtype, "SGLang's table, rounded on a CPU"
    positions = torch.arange(40, 60)
    raw = keys(20).to(dtype)
    flat = raw.transpose(0, 1).reshape(20, -1)
    wanted, _ = rotary.forward_native(positions, flat.clone(), flat.clone())
    found = services(rotary).rope(raw.float(), positions)
    wanted = wanted.view(20, KV_HEADS, DIM).transpose(0, 1).float()
    atol = 0.03 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)
    back = services(rotary).rope(found, positions, inverse=True)
    torch.testing.assert_close(back, raw.float(), rtol=0, atol=1e-5)


def test_shapes_are_those_of_this_rank():
    spec = services(rotary_of(), layers=3).spec
    assert (spec.layers, spec.query_heads, spec.kv_heads) == (3, HEADS, KV_HEADS)
    assert (spec.head_dim, spec.hidden_size) == (DIM, WIDTH)
    assert spec.name == "folder/model"


def test_the_output_weight_is_by_query_head():
    made = services(rotary_of())
    weight = made.output_weight(1)
    projection = made._layers[1][1].o_proj
    assert weight.shape == (HEADS, DIM, WIDTH)
    for head in range(HEADS):
        own = torch.zeros(HEADS, DIM)
        own[head] = torch.randn(DIM)
        torch.testing.assert_close(
            own[head] @ weight[head], projection(own.flatten()), rtol=0, atol=1e-5
        )
    assert not weight.requires_grad


def test_models_without_these_parts_are_refused():
    greedy_fast = services()
    with pytest.raises(CompressionError, match="folder/model: the attention has no ro"):
        greedy_fast.rope(keys(1), torch.tensor([0]))
    greedy_fast._layers[0][1].o_proj = nn.Linear(3, WIDTH)
    with pytest.raises(
        CompressionError, match=r"layer 0 has no o_proj\.weight of \[d,"
    ):
        greedy_fast.output_weight(0)
    del greedy_fast._layers[1][1].o_proj
    with pytest.raises(CompressionError, match=r"layer 1 has no o_proj\.weight"):
        greedy_fast.output_weight(1)


def test_texts_are_encoded_without_special_tokens(monkeypatch):
    asked = []

    class Tokenizer:
        def encode(self, text, add_special_tokens):
            assert not add_special_tokens
            return [ord(letter) for letter in text]

    def get_tokenizer(name, **options):
        asked.append((name, options["tokenizer_mode"]))
        return Tokenizer()

    monkeypatch.setattr(
        "sglang.srt.utils.hf_transformers_utils.get_tokenizer", get_tokenizer
    )
    made = services(rotary_of())
    made._args = SimpleNamespace(
        tokenizer_path=None,
        model_path="folder/model",
        tokenizer_mode="auto",
        trust_remote_code=False,
    )
    assert made.encode("ab") == [97, 98]
    assert made.encode("c") == [99]
    assert asked == [("folder/model", "auto")], "loaded once, when asked"
