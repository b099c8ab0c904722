"""Train the demo model: generate, build the tokenizer, train, export.

From nothing, single-call requests only (about an hour of one CPU core)::

    PYTHONPATH=scripts python -m demo_model.train --out DIR --minutes 60

From an exported checkpoint on to requests for several calls at once, in smaller
steps (``configs/demo-model-long/README.md`` says what was run)::

    PYTHONPATH=scripts python -m demo_model.train --out DIR --minutes 95 \
        --cooldown 45 --matrix-lr 0.01 --vector-lr 0.002 --revisit 0.5 \
        --continue-from configs/demo-model

A stage is left when enough answers of a fixed sample are exact; some steps stay on
earlier stages (``--revisit``). A linear probe for the current id and item number,
read after the second layer, is trained along and dropped from the export: without
it the model is slow to find which record is asked for.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from demo_model import checkpoint, curriculum, tokenizer
from demo_model.curriculum import Batch, BatchMaker, Stage
from demo_model.initialise import initialise
from demo_model.muon import Muon
from demo_model.net import Net, NetConfig

if TYPE_CHECKING:
    from collections.abc import Callable

PROBE_LAYER = 1
PROBE_WEIGHT = 0.5
TEXT_WEIGHT = 0.03  # loss weight of tokens outside answers
WARM_UP = 60  # steps
CHECK_EVERY = 90.0  # seconds between looks at exact answers
CHECK_TOKENS = 60000  # most tokens of such a look
SAVE_EVERY = 300.0  # seconds between exports


@dataclass(frozen=True, slots=True)
class Settings:
    """What one run is given.

    Attributes:
        minutes: Wall time of the run; the learning rates end at zero.
        cooldown: Minutes of it with falling learning rates.
        matrix_lr: Muon's step.
        vector_lr: Adam's step, for embedding and norms.
        revisit: Share of steps on earlier stages.
        stage_minutes: A stage is left after this time even if it is not passed.
        first_stage: Where the curriculum starts, from 0.
        seed: Of weights, batches and positions.
    """

    minutes: float
    cooldown: float
    matrix_lr: float
    vector_lr: float
    revisit: float
    stage_minutes: float
    first_stage: int
    seed: int


class Trainer:
    """Owns the net, its probe and optimizers; walks through the stages."""

    def __init__(
        self, net: Net, maker: BatchMaker, stages: tuple[Stage, ...], given: Settings
    ) -> None:
        self.net, self.maker, self.stages, self.given = net, maker, stages, given
        self.probe = torch.nn.Linear(net.config.hidden_size, 50)
        self.rng = random.Random(given.seed + 100)
        named = list(net.named_parameters())
        matrices = [p for n, p in named if p.dim() == 2 and "embed" not in n]
        self.vectors = [p for n, p in named if p.dim() != 2 or "embed" in n]
        self.vectors += self.probe.parameters()
        self.muon = Muon(matrices, lr=given.matrix_lr, weight_decay=0.05)
        self.adam = torch.optim.Adam(
            self.vectors, lr=given.vector_lr, betas=(0.9, 0.97), eps=1e-10
        )
        self.stage = given.first_stage
        self.steps = self.steps_in_stage = self.tokens = 0
        self.stage_begun = time.time()
        self.samples: dict[int, list[Batch]] = {}

    def scale(self, elapsed: float) -> float:
        """Return the factor of the learning rates, ``elapsed`` seconds in."""
        left = (self.given.minutes * 60 - elapsed) / (self.given.cooldown * 60)
        return min(1.0, (self.steps + 1) / WARM_UP) * min(1.0, max(0.0, left))

    def pick_stage(self) -> int:
        """Draw the stage of the next batch."""
        if self.stage > 0 and self.rng.random() < self.given.revisit:
            return self.rng.randrange(self.stage)
        return self.stage

    def step(self, scale: float) -> dict[str, float]:
        """Train on one batch; return the losses."""
        chosen = self.pick_stage()
        batch = self.maker.make(self.stages[chosen], self.rng)
        hidden, outputs, _ = self.net.hidden(batch.ids[:, :-1], batch.positions)
        answer, rest = self.text_losses(hidden, batch)
        probed = functional.rms_norm(outputs[PROBE_LAYER], hidden.shape[-1:])
        guesses = self.probe(probed).unflatten(-1, (5, 10))
        probe = functional.cross_entropy(
            guesses.flatten(0, 2), batch.labels.flatten(), ignore_index=-100
        )
        (answer + rest + PROBE_WEIGHT * probe).backward()
        torch.nn.utils.clip_grad_norm_(self.vectors, 1.0)
        for optimizer, lr in (
            (self.muon, self.given.matrix_lr),
            (self.adam, self.given.vector_lr),
        ):
            optimizer.param_groups[0]["lr"] = lr * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self.steps_in_stage += 1
        self.tokens += batch.positions.numel()
        return {"stage": chosen, "answer": answer.item(), "probe": probe.item()}

    def text_losses(
        self, hidden: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss inside answers and the weighted loss outside."""
        targets = batch.ids[:, 1:]
        losses = functional.cross_entropy(
            self.net.logits(hidden).flatten(0, 1), targets.flatten(), reduction="none"
        ).view_as(targets)
        answered = batch.answered.float()
        other = (~batch.answered & (targets != 0)).float() * TEXT_WEIGHT
        count = answered.sum().clamp_min(1)
        return (losses * answered).sum() / count, (losses * other).sum() / count

    @torch.no_grad()
    def exact(self, stage: int) -> tuple[float, float]:
        """Return the shares of exact single-call and multi-call answers.

        Teacher-forced exactness equals greedy exactness: a greedy answer is right
        if and only if every argmax after a right prefix is.
        """
        if stage not in self.samples:
            rng, drawn = random.Random(12345 + stage), self.stages[stage]
            batches = min(6, CHECK_TOKENS // (drawn.batch * drawn.length))
            made = [self.maker.make(drawn, rng) for _ in range(batches)]
            self.samples[stage] = made
        right, answers = [0, 0], [0, 0]
        for batch in self.samples[stage]:
            hidden, _, _ = self.net.hidden(batch.ids[:, :-1])
            same = self.net.logits(hidden).argmax(-1) == batch.ids[:, 1:]
            for row, mask, good in zip(batch.ids, batch.answered, same, strict=True):
                for start, stop in spans(row, mask, self.maker.end):
                    kind = int(row[start + 1] == self.maker.bracket)
                    answers[kind] += 1
                    right[kind] += bool(good[start:stop].all())
        single, multi = (
            r / n if n else 1.0 for r, n in zip(right, answers, strict=True)
        )
        return single, multi

    def advance(self) -> str:
        """Measure the stage, go to the next where it is passed; return a line."""
        single, multi = self.exact(self.stage)
        line = f"check stage {self.stage} single {single:.3f} multi {multi:.3f}"
        minutes = (time.time() - self.stage_begun) / 60
        passed = min(single, multi) >= self.stages[self.stage].passed
        passed = (passed and self.steps_in_stage > 30) or (
            minutes > self.given.stage_minutes
        )
        if passed and self.stage + 1 < len(self.stages):
            self.stage, self.steps_in_stage = self.stage + 1, 0
            self.stage_begun = time.time()
            line += f" -> stage {self.stage}"
        return line


def spans(row: torch.Tensor, answered: torch.Tensor, end: int) -> list[tuple[int, int]]:
    """Return (start, stop) in targets of the answers in ``row`` that are complete."""
    edges = functional.pad(answered.int(), (1, 1)).diff()
    starts = (edges == 1).nonzero()[:, 0].tolist()
    stops = (edges == -1).nonzero()[:, 0].tolist()
    return [(a, b) for a, b in zip(starts, stops, strict=True) if row[b] == end]


def run(trainer: Trainer, save: Callable[[], None]) -> float:
    """Train until the time is over, saving now and then; return the seconds."""
    begun = checked = saved = time.time()
    mean: dict[str, float] = {}
    while (elapsed := time.time() - begun) < trainer.given.minutes * 60:
        losses = trainer.step(trainer.scale(elapsed))
        for name in ("answer", "probe"):
            mean[name] = 0.95 * mean.get(name, losses[name]) + 0.05 * losses[name]
        if trainer.steps % 25 == 0:
            speed = trainer.tokens / (time.time() - begun)
            shown = " ".join(f"{name} {value:.4f}" for name, value in mean.items())
            print(
                f"{elapsed:.0f}s step {trainer.steps} stage {trainer.stage} "
                f"tokens {trainer.tokens / 1e6:.2f}M ({speed:.0f}/s) {shown}",
                flush=True,
            )
        last = trainer.stage + 1 == len(trainer.stages)
        if time.time() - checked > (SAVE_EVERY if last else CHECK_EVERY):
            print(f"{elapsed:.0f}s {trainer.advance()}", flush=True)
            checked = time.time()
        if time.time() - saved > SAVE_EVERY:
            save()
            saved = time.time()
    save()
    return time.time() - begun


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--continue-from", type=Path, help="exported checkpoint")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--cooldown", type=float, default=15.0, help="minutes")
    parser.add_argument("--matrix-lr", type=float, default=0.02)
    parser.add_argument("--vector-lr", type=float, default=4e-3)
    parser.add_argument("--revisit", type=float, default=0.25)
    parser.add_argument("--stage-minutes", type=float, default=12.0)
    parser.add_argument("--first-stage", type=int, default=0)
    parser.add_argument("--max-positions", type=int, default=32768)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--probe", type=Path, help="file that keeps the probe between runs"
    )
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Train and export, as the command line says."""
    given = parse(argv)
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)
    built = tokenizer.build()
    if given.continue_from is None:
        stages, net = curriculum.SINGLE, Net(NetConfig(built.get_vocab_size()))
        initialise(net, given.seed)
    else:
        stages, net = curriculum.MULTI, checkpoint.load(given.continue_from)
    settings = Settings(
        **{name: getattr(given, name) for name in Settings.__dataclass_fields__}
    )
    trainer = Trainer(net, BatchMaker(built), stages, settings)
    if given.probe and given.probe.exists():
        trainer.probe.load_state_dict(torch.load(given.probe))

    def save() -> None:
        checkpoint.export(net, given.out, given.max_positions)
        tokenizer.save(built, given.out, given.max_positions)
        if given.probe:
            torch.save(trainer.probe.state_dict(), given.probe)

    seconds = run(trainer, save)
    for stage in range(trainer.stage + 1):
        single, multi = trainer.exact(stage)
        print(f"final stage {stage} single {single:.3f} multi {multi:.3f}", flush=True)
    summary = {
        "argv": argv,
        "tokens": trainer.tokens,
        "steps": trainer.steps,
        "seconds": round(seconds),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main(sys.argv[1:])
