"""A model's services for selectors, without a model."""

from dataclasses import dataclass, field

import pytest
import torch

from vericache_sglang.compression.base import ModelSpec
from vericache_sglang.compression.codecs.rope import Rope


@dataclass
class FewServices:
    """Services of a random model: RoPE, output weights, and a token per letter."""

    spec: ModelSpec
    rope: Rope
    weights: list[torch.Tensor] = field(default_factory=list)

    def output_weight(self, layer):
        return self.weights[layer]

    def encode(self, text):
        return [ord(letter) % 100 for letter in text]


@pytest.fixture
def make_services():
    """Return a function from a spec, and a seed, to services."""

    def make(spec, seed=0):
        generator = torch.Generator().manual_seed(seed)
        half = spec.head_dim // 2
        shape = (spec.query_heads, spec.head_dim, spec.hidden_size)
        return FewServices(
            spec,
            Rope(10000.0 ** (-torch.arange(half) / half)),
            [torch.randn(shape, generator=generator) for _ in range(spec.layers)],
        )

    return make
