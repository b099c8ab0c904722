"""Train the EAGLE3 head that proposes tokens for the demo model.

Ten minutes of one CPU core::

    PYTHONPATH=.:scripts python -m demo_model.eagle3 --out configs/demo-model-eagle3

The head reads what the demo model computed for a token, together with the next token,
and learns what the demo model finds most likely after that one. It is trained on its
own outputs too, ``UNROLLED`` tokens deep, as it will be used (EAGLE-3,
arXiv:2503.01840). Letters: B batch, T tokens, H hidden size.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from demo_model import checkpoint, tokenizer
from demo_model.curriculum import BatchMaker
from demo_model.draft import POSITIONS, STAGES, WINDOW, measured, train
from demo_model.net import Mlp, Net, NetConfig, Norm, rope_tables, rotate

if TYPE_CHECKING:
    from demo_model.curriculum import Stage
    from demo_model.draft import Step

LAYERS = (0, 1, 2)  # whose outputs are read; SGLang captures no last layer's
UNROLLED = 3  # tokens proposed in a row in training
WORDS = 320  # token ids that the head can propose
TEXT_WEIGHT = 0.1  # loss weight of tokens outside answers


class HeadAttention(nn.Module):
    """Attention of the head; its input is an embedding beside a hidden state."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.config = config
        size, dim = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * dim, config.num_key_value_heads
        self.q_proj = nn.Linear(2 * size, queries, bias=False)
        self.k_proj = nn.Linear(2 * size, keys * dim, bias=False)
        self.v_proj = nn.Linear(2 * size, keys * dim, bias=False)
        self.o_proj = nn.Linear(queries, size, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        before: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Attend as the proposal of number ``len(before)`` does.

        The last entries of its text are the proposals before it, and the others are
        entries with the demo model's hidden states.

        Args:
            x: [B, T, 2 H].
            cos: See ``rope_tables``.
            sin: See ``rope_tables``.
            before: Keys and values of the earlier proposals; these are appended.

        Returns:
            [B, T, H].
        """
        batch, tokens, _ = x.shape
        heads = (batch, tokens, -1, self.config.head_dim)
        query = rotate(self.q_proj(x).view(heads).transpose(1, 2), cos, sin)
        key = rotate(self.k_proj(x).view(heads).transpose(1, 2), cos, sin)
        value = self.v_proj(x).view(heads).transpose(1, 2)
        group = query.shape[1] // key.shape[1]
        before.append(
            (key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))
        )
        number = len(before) - 1
        key, value = before[0]
        scores = query @ key.mT
        unseen = torch.ones(tokens, tokens).triu(1 - number).bool()
        scores = scores.masked_fill(unseen, -1e9)
        recent = [
            (back(k, number - i), back(v, number - i))
            for i, (k, v) in enumerate(before[1:], 1)
        ]
        own = [(query * k).sum(-1, keepdim=True) for k, _ in recent]
        weights = torch.cat([scores, *own], -1) / math.sqrt(self.config.head_dim)
        weights = weights.softmax(-1)
        out = weights[..., :tokens] @ value
        for i, (_, v) in enumerate(recent):
            out = out + weights[..., tokens + i : tokens + i + 1] * v
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))


def back(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """Move ``x`` [..., T, D] by ``tokens`` to later ones; the first become 0."""
    return functional.pad(x, (0, 0, tokens, 0))[..., : x.shape[-2], :]


class HeadLayer(nn.Module):
    """The one layer of the head."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config)
        self.mlp = Mlp(config)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)


class Head(nn.Module):
    """An EAGLE3 head with the sizes of ``config``; names are its checkpoint's."""

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: NetConfig, words: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(
            len(LAYERS) * config.hidden_size, config.hidden_size, bias=False
        )
        self.midlayer = HeadLayer(config)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(words), bias=False)
        known = torch.zeros(config.vocab_size, dtype=torch.bool)
        known[words] = True
        self.register_buffer("d2t", words - torch.arange(len(words)))
        self.register_buffer("t2d", known)

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        before: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [B, T, words], and hidden states [B, T, H] for the next one.

        Args:
            embeds: [B, T, H], of the next token of every entry.
            hidden: [B, T, H].
            positions: [B, T] int64.
            before: See ``HeadAttention.forward``.
        """
        layer = self.midlayer
        cos, sin = rope_tables(positions, self.config)
        x = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], -1)
        hidden = hidden + layer.self_attn(x, cos, sin, before)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.lm_head(self.norm(hidden)), hidden


def seen(head: Head, target: Net, maker: BatchMaker) -> Step:
    """Return the step that draws a batch and measures the head on it."""
    words = head.d2t + torch.arange(len(head.d2t))
    of_word = torch.full((target.config.vocab_size,), -100)
    of_word[words] = torch.arange(len(words))

    def step(stage: Stage, rng: random.Random) -> tuple[torch.Tensor, float]:
        batch = maker.make(stage, rng)
        ids = batch.ids[:, :-1]
        with torch.no_grad():
            final, outputs, _ = target.hidden(ids, batch.positions)
            first = max(0, ids.shape[1] - 1 - WINDOW)
            features = torch.cat([outputs[i] for i in LAYERS], -1)[:, first:-1]
            embeds = target.model.embed_tokens(ids)[:, first + 1 :]
            likely = target.logits(final[:, first + 1 :]).argmax(-1)
        answered = batch.answered[:, first + 1 :]
        label = of_word[likely]
        weight = torch.where(answered, 1.0, TEXT_WEIGHT) * (ids[:, first + 1 :] != 0)
        positions = torch.arange(features.shape[1])
        positions = positions + rng.randint(0, POSITIONS - len(positions) - 1) * (
            rng.random() < 0.5
        )
        hidden, before, loss, right = head.fc(features), [], torch.zeros(()), 0.0
        for number in range(UNROLLED):
            logits, hidden = head(embeds, hidden, positions[None], before)
            each = functional.cross_entropy(
                logits.flatten(0, 1), label.flatten(), reduction="none"
            ).view_as(label)
            loss = loss + (each * weight)[:, number:].sum() / answered.sum().clamp_min(
                1
            )
            found = (logits.argmax(-1) == label)[:, number:][answered[:, number:]]
            right += found.float().mean().item() / UNROLLED
            hidden = back(hidden, 1)
        return loss, right

    return step


@torch.no_grad()
def common(target: Net, maker: BatchMaker, rng: random.Random) -> torch.Tensor:
    """Return, ascending, the ``WORDS`` token ids that conversations have most."""
    counts = torch.zeros(target.config.vocab_size)
    for stage in STAGES * 12:
        batch = maker.make(stage, rng)
        counts += torch.bincount(batch.ids.flatten(), minlength=len(counts))
        inside = batch.ids[:, 1:][batch.answered]
        counts += 1000 * torch.bincount(inside, minlength=len(counts))
    return counts.topk(WORDS).indices.sort().values


def export(head: Head, folder: Path) -> None:
    """Write the checkpoint in the format that SGLang reads."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.contiguous() for name, value in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {**asdict(head.config), "num_hidden_layers": 1}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **sizes,
        "draft_vocab_size": len(head.d2t),
        "target_hidden_size": head.config.hidden_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)},
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes["rope_theta"]},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **checkpoint.SPECIAL_IDS,
        "torch_dtype": "float32",
    }
    checkpoint.write_json(folder / "config.json", config)


def load(folder: Path) -> Head:
    """Read a checkpoint that ``export`` wrote."""
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    sizes = {f.name: config[f.name] for f in fields(NetConfig)}
    words = weights["d2t"] + torch.arange(len(weights["d2t"]))
    head = Head(NetConfig(**sizes), words)
    head.load_state_dict(weights)
    return head.eval()


def main(argv: list[str]) -> None:
    """Train, measure and export, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--model", type=Path, default=Path("configs/demo-model"))
    parser.add_argument("--minutes", type=float, default=10.0, help="of CPU time")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)
    target, maker = checkpoint.load(given.model), BatchMaker(tokenizer.build())
    words = common(target, maker, random.Random(f"words {given.seed}"))
    head = Head(target.config, words)
    step = seen(head, target, maker)
    steps = train(head, step, given.minutes, given.seed)
    export(head, given.out)
    summary = {
        "argv": argv,
        "steps": steps,
        "parameters": sum(math.prod(p.shape) for p in head.parameters()),
        "right": round(measured(step, given.seed), 4),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main(sys.argv[1:])
