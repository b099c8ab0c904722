"""A random model shaped like MiMo and its prediction head, in transformers' layers.

Imported once transformers can be (``define_missing_ops``).
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2DecoderLayer,
    Qwen2RMSNorm,
    Qwen2RotaryEmbedding,
)

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"
WINDOW = 512


class Predictor(torch.nn.Module):
    """MiMo's head, in transformers' layers."""

    def __init__(self, config):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = Qwen2RMSNorm(size, eps)
        self.hidden_layernorm = Qwen2RMSNorm(size, eps)
        self.input_proj = torch.nn.Linear(2 * size, size, bias=False)
        self.block = Qwen2DecoderLayer(config, 0)
        self.final_layernorm = Qwen2RMSNorm(size, eps)
        self.rotary = Qwen2RotaryEmbedding(config)

    def forward(self, embeds, hidden, positions):
        embeds = torch.where(positions[..., None] == 0, 0.0, embeds)
        x = self.input_proj(
            torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embeds)], -1)
        )
        seen = torch.ones(x.shape[1], x.shape[1]).tril().bool()[None, None]
        x = self.block(
            x,
            attention_mask=seen,
            position_ids=positions,
            position_embeddings=self.rotary(x, positions),
        )
        return self.final_layernorm(x[0] if isinstance(x, tuple) else x)

    def stored(self):
        """Return its weights by the names of MiMo's checkpoints."""
        first = "model.mtp_layers.0."
        return {
            first + name.removeprefix("block."): value.contiguous()
            for name, value in self.state_dict().items()
        }


def shaped_like_mimo(folder):
    """Write a checkpoint with random weights; return the model and its head."""
    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=586,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        bos_token_id=1,
        eos_token_id=6,
        pad_token_id=0,
    )
    model, head = Qwen2ForCausalLM(config).eval(), Predictor(config).eval()
    for weight in [*model.parameters(), *head.parameters()]:
        torch.nn.init.normal_(weight, std=0.3 / weight.shape[-1] ** 0.5)
    for name, weight in [*model.named_parameters(), *head.named_parameters()]:
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.8, 1.2)
    model.model.embed_tokens.weight.data.normal_()
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights | head.stored(), folder / "model.safetensors", {"format": "pt"})
    fields = {
        **config.to_dict(),
        "architectures": ["MiMoForCausalLM"],
        "num_nextn_predict_layers": 1,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(fields))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, folder / name)
    return model, head


@torch.no_grad()
def said_by(model, head, text, skipped, depth):
    """Return what the head proposes after a text: its text in one forward each."""
    ids = torch.tensor([text])
    hidden = model.model(ids[:, :-1]).last_hidden_state[:, skipped:]
    embeds, found = model.model.embed_tokens(ids)[:, skipped + 1 :], []
    first = max(0, hidden.shape[1] + depth - 1 - WINDOW)
    for _ in range(depth):
        positions = torch.arange(first, hidden.shape[1])[None]
        own = head(embeds[:, first:], hidden[:, first:], positions)[:, -1:]
        found.append(int(model.lm_head(own).argmax()))
        more = model.model.embed_tokens(torch.tensor([found[-1:]]))
        embeds, hidden = torch.cat([embeds, more], 1), torch.cat([hidden, own], 1)
    return found
