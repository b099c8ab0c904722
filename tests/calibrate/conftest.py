"""A model small enough to be run token by token."""

import pytest
import torch

from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

define_missing_ops()

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from vericache_sglang.calibrate.subject import Subject  # noqa: E402


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A saved random Llama of 2 layers; 4 query and 2 KV heads of 16."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    net = LlamaForCausalLM(config).eval().requires_grad_(False)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    net.save_pretrained(folder)
    return Subject(net, folder)


@pytest.fixture(scope="session")
def prompt():
    """30 distinct tokens, so that no two rows of a layer are equal."""
    generator = torch.Generator().manual_seed(2)
    return torch.randperm(61, generator=generator)[:30].tolist()
