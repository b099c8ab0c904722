"""Train the small model that proposes tokens for the demo models.

About five minutes of one CPU core::

    PYTHONPATH=.:scripts python -m demo_model.draft --out configs/demo-model-draft

It learns what ``--vericache-inner model`` shows it: the first tokens of a conversation,
then its last ones, at positions that follow one another. The demo models' answers are
the right ones nearly always, so right answers are learned in place of theirs. What it
proposes rightly is measured on conversations that it was not trained on.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from demo_model import checkpoint, tokenizer
from demo_model.curriculum import MULTI, SINGLE, BatchMaker
from demo_model.initialise import initialise
from demo_model.muon import Muon
from demo_model.net import Net, NetConfig
from vericache_sglang.drafters.ring import SINKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from demo_model.curriculum import Batch, Stage

    Step = Callable[[Stage, random.Random], tuple[torch.Tensor, float]]

SIZES = NetConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
)
STAGES = (SINGLE[1], MULTI[0], MULTI[1], MULTI[2])
WINDOW = 512  # tokens that are shown at most, sinks included
POSITIONS = 2048  # the context; texts are begun anew at its end
MATRIX_LR, VECTOR_LR = 0.02, 4e-3
WARM_UP = 40  # steps
TEXT_WEIGHT = 0.1  # loss weight of tokens outside answers


def shown(batch: Batch, rng: random.Random) -> tuple[torch.Tensor, ...]:
    """Cut a batch to what the window shows.

    Returns:
        Token ids [B, T + 1], positions [B, T] and, [B, T] bool, where the target is
        part of an answer.
    """
    ids, answered = batch.ids, batch.answered
    dropped = max(0, ids.shape[1] - 1 - WINDOW)
    keep = torch.arange(ids.shape[1])
    keep = torch.cat([keep[:SINKS], keep[SINKS + dropped :]])
    positions = torch.arange(len(keep) - 1)
    # The ring keeps the positions of a text that has grown beyond the window.
    grown = rng.randint(0, POSITIONS - len(positions))
    positions = positions + (positions >= SINKS) * grown * rng.randint(0, 1)
    rows = len(ids)
    return ids[:, keep], positions.expand(rows, -1), answered[:, keep[:-1]]


def losses(net: Net, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, float]:
    """Return the loss, and the share of answer tokens that are most likely."""
    ids, positions, answered = given
    hidden, _, _ = net.hidden(ids[:, :-1], positions)
    logits, targets = net.logits(hidden), ids[:, 1:]
    each = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    ).view_as(targets)
    weight = torch.where(answered, 1.0, TEXT_WEIGHT) * (targets != 0)
    right = (logits.argmax(-1) == targets)[answered].float().mean()
    return (each * weight).sum() / answered.sum().clamp_min(1), right.item()


def seen(net: Net, maker: BatchMaker) -> Step:
    """Return the step that draws a batch and measures the net on it."""
    return lambda stage, rng: losses(net, shown(maker.make(stage, rng), rng))


@torch.no_grad()
def measured(step: Step, seed: int) -> float:
    """Return the share of answer tokens that are foreseen in batches of their own."""
    rng = random.Random(f"held out {seed}")
    found = [step(stage, rng)[1] for stage in STAGES * 3]
    return sum(found) / len(found)


def train(net: nn.Module, step: Step, minutes: float, seed: int) -> int:
    """Train until the time is over; return the steps."""
    named = list(net.named_parameters())
    words = ("embed", "lm_head")
    vectors = [p for n, p in named if p.dim() != 2 or any(word in n for word in words)]
    matrices = [p for _, p in named if all(p is not vector for vector in vectors)]
    muon = Muon(matrices, lr=MATRIX_LR, weight_decay=0.05)
    adam = torch.optim.Adam(vectors, lr=VECTOR_LR, betas=(0.9, 0.97), eps=1e-10)
    rng, begun, steps, mean = random.Random(seed), time.process_time(), 0, 0.0
    while (part := (time.process_time() - begun) / (60 * minutes)) < 1:
        scale = min(1.0, (steps + 1) / WARM_UP) * min(1.0, 2 * (1 - part))
        loss, right = step(rng.choice(STAGES), rng)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(vectors, 1.0)
        for optimizer, lr in ((muon, MATRIX_LR), (adam, VECTOR_LR)):
            optimizer.param_groups[0]["lr"] = lr * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        steps += 1
        mean += (right - mean) / min(steps, 50)
        if steps % 50 == 0:
            print(f"{part:.2f} step {steps} right {mean:.3f}", flush=True)
    return steps


def main(argv: list[str]) -> None:
    """Train, measure and export, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--minutes", type=float, default=5.0, help="of CPU time")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)
    built = tokenizer.build()
    net, maker = Net(SIZES), BatchMaker(built)
    initialise(net, given.seed)
    steps = train(net, seen(net, maker), given.minutes, given.seed)
    checkpoint.export(net, given.out, POSITIONS)
    summary = {
        "argv": argv,
        "steps": steps,
        "parameters": sum(math.prod(p.shape) for p in net.parameters()),
        "right": round(measured(seen(net, maker), given.seed), 4),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main(sys.argv[1:])
