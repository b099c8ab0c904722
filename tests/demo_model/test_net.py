"""The net against Hugging Face's Llama, its cache, its start and its export."""

import math
import random
from pathlib import Path

import pytest
import torch

from demo_model import checkpoint, tokenizer
from demo_model.initialise import initialise
from demo_model.net import Net, NetConfig, rope_tables, rotate
from vericache_sglang import demo_records as records

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL, LONG = CONFIGS / "demo-model", CONFIGS / "demo-model-long"


@pytest.fixture(scope="module")
def llama():
    """Import Hugging Face's Llama where torchvision is built for another torch."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in {
        "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    }.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    return pytest.importorskip("transformers").LlamaForCausalLM


def prompt_ids(folder: Path, tokens: int) -> torch.Tensor:
    built = tokenizer.load(folder)
    prompt = records.prompt_of_length(
        random.Random(9), tokens, lambda text: len(tokenizer.encode(built, text))
    )
    return torch.tensor([tokenizer.encode(built, prompt.text + prompt.answer)])


@pytest.mark.parametrize("folder", [SMALL, LONG], ids=lambda folder: folder.name)
@torch.inference_mode()
def test_logits_are_those_of_hugging_face(llama, folder):
    ids = prompt_ids(folder, 700)
    net = checkpoint.load(folder)
    ours = net.logits(net.hidden(ids)[0])
    theirs = llama.from_pretrained(folder, dtype=torch.float32)(ids).logits
    assert (ours - theirs).abs().max() < 1e-4


@torch.inference_mode()
def test_reading_in_parts_changes_nothing():
    ids = prompt_ids(SMALL, 500)
    net = checkpoint.load(SMALL)
    whole, _, _ = net.hidden(ids)
    _, _, past = net.hidden(ids[:, :300])
    middle, _, past = net.hidden(ids[:, 300:301], past=past)
    rest, _, _ = net.hidden(ids[:, 301:], past=past)
    parts = torch.cat([middle, rest], 1)
    assert (whole[:, 300:] - parts).abs().max() < 1e-4


def test_export_and_load_keep_every_bit(tmp_path):
    net = Net(NetConfig(hidden_size=128, num_hidden_layers=2))
    initialise(net, seed=3)
    checkpoint.export(net, tmp_path, 2048)
    loaded = checkpoint.load(tmp_path)
    assert loaded.config == net.config
    for name, weight in net.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name])


def test_other_models_are_refused(tmp_path):
    checkpoint.write_json(
        tmp_path / "config.json", {"model_type": "gpt2", "tie_word_embeddings": True}
    )
    with pytest.raises(ValueError, match="holds no Llama"):
        checkpoint.load(tmp_path)


@torch.inference_mode()
def test_the_start_has_heads_that_look_a_fixed_distance_back():
    net = Net(NetConfig())
    initialise(net, seed=0)
    config, layer = net.config, net.model.layers[0]
    ids = torch.randint(8, config.vocab_size, (1, 64))
    x = layer.input_layernorm(net.model.embed_tokens(ids))
    cos, sin = rope_tables(torch.arange(64)[None], config)
    heads = (1, 64, -1, config.head_dim)
    query = rotate(layer.self_attn.q_proj(x).view(heads).transpose(1, 2), cos, sin)
    key = rotate(layer.self_attn.k_proj(x).view(heads).transpose(1, 2), cos, sin)
    scores = query @ key.repeat_interleave(2, 1).mT / math.sqrt(config.head_dim)
    scores = scores.masked_fill(~torch.ones(64, 64).tril().bool(), -math.inf)
    looked = torch.arange(64) - scores.argmax(-1)[0]
    for head in range(config.num_attention_heads):
        assert (looked[head, 8:] == head + 1).float().mean() > 0.9


def test_the_start_is_the_same_by_seed():
    nets = [Net(NetConfig()) for _ in "123"]
    for net, seed in zip(nets, [1, 1, 2], strict=True):
        initialise(net, seed)
    first, same, other = (net.model.layers[2].mlp.up_proj.weight for net in nets)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
