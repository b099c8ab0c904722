"""Fits the regressors, and evaluates them on held-out texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from vericache_sglang.compression.kvzap_weights import AffineLayer, Scorer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvzap.targets import Layer


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of one layer's regressor on held-out texts.

    Attributes:
        r2: Share of the targets' variance it explains, mean over heads; 1 at best.
        spearman: Rank correlation inside a text, mean over texts and heads.
    """

    r2: float
    spearman: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Training schedule of the MLPs, with the published values.

    Attributes:
        epochs: Passes over the examples; the rate falls with a cosine over them.
        rate: Highest learning rate of AdamW.
        batch: Tokens.
        clip: Longest gradient, over all layers.
    """

    epochs: int = 15
    rate: float = 5e-3
    batch: int = 512
    clip: float = 1.0


def sample(
    layers: Sequence[Layer], tokens: int, generator: torch.Generator
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw tokens of a text, the same in every layer.

    Returns:
        Per layer, inputs [n, d] and targets [n, H]; n is at most ``tokens``.
    """
    order = torch.randperm(len(layers[0].inputs), generator=generator)[:tokens]
    return [(layer.inputs[order], layer.targets[order]) for layer in layers]


def fit_linear(
    inputs: torch.Tensor, targets: torch.Tensor, alpha: float = 1.0
) -> list[Scorer]:
    """Solve a ridge regression per layer; the intercept is not held back.

    Args:
        inputs: [L, n, d].
        targets: [L, n, H].
        alpha: Weight of the squared coefficients.
    """
    found = []
    for x, y in zip(inputs.double(), targets.double(), strict=True):
        x_mean, y_mean = x.mean(0), y.mean(0)
        centred = x - x_mean
        gram = centred.t() @ centred + alpha * torch.eye(x.shape[1]).double()
        weight = torch.linalg.solve(gram, centred.t() @ (y - y_mean)).t()
        bias = y_mean - weight @ x_mean
        found.append(Scorer(AffineLayer(weight.float(), bias.float())))
    return found


class Mlps(nn.Module):
    """One two-map MLP per layer, run together.

    Args:
        layers: L.
        sizes: d, w and H.
        generator: Draws the start, as ``nn.Linear`` does: uniform, within one over
            the root of the inputs.
    """

    def __init__(
        self, layers: int, sizes: tuple[int, int, int], generator: torch.Generator
    ) -> None:
        super().__init__()
        source, width, heads = sizes

        def drawn(fan_in: int, *shape: int) -> nn.Parameter:
            start = torch.rand(layers, *shape, generator=generator)
            return nn.Parameter((2 * start - 1) * fan_in**-0.5)

        self.weight0 = drawn(source, width, source)
        self.bias0 = drawn(source, width)
        self.weight2 = drawn(width, heads, width)
        self.bias2 = drawn(width, heads)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map [L, n, d] to [L, n, H]."""
        inner = torch.baddbmm(self.bias0[:, None], inputs, self.weight0.mT)
        return torch.baddbmm(
            self.bias2[:, None], functional.gelu(inner), self.weight2.mT
        )

    def scorers(self) -> list[Scorer]:
        """Return the regressors, copied."""
        parts = [self.weight0, self.bias0, self.weight2, self.bias2]
        return [
            Scorer(AffineLayer(weight2, bias2), AffineLayer(weight0, bias0))
            for weight0, bias0, weight2, bias2 in zip(
                *(part.detach().clone() for part in parts), strict=True
            )
        ]


def fit_mlp(
    inputs: torch.Tensor,
    targets: torch.Tensor,
    width: int,
    schedule: Schedule,
    generator: torch.Generator,
) -> list[Scorer]:
    """Train an MLP per layer, all at once, on the mean squared error.

    Args:
        inputs: [L, n, d].
        targets: [L, n, H].
        width: w, elements between the two maps.
        generator: Draws start and order; advanced.
    """
    layers, count, source = inputs.shape
    net = Mlps(layers, (source, width, targets.shape[2]), generator)
    optimiser = torch.optim.AdamW(net.parameters(), lr=schedule.rate)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, schedule.epochs)
    for _ in range(schedule.epochs):
        for chosen in torch.randperm(count, generator=generator).split(schedule.batch):
            error = functional.mse_loss(net(inputs[:, chosen]), targets[:, chosen])
            optimiser.zero_grad()
            error.backward()
            nn.utils.clip_grad_norm_(net.parameters(), schedule.clip)
            optimiser.step()
        fall.step()
    return net.scorers()


def spearman(guess: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return the rank correlation along the last dimension; ties by position."""
    ranks = [x.argsort(-1).argsort(-1).double() for x in (guess, truth)]
    a, b = (rank - rank.mean(-1, keepdim=True) for rank in ranks)
    return torch.cosine_similarity(a, b, dim=-1)


def quality(
    scorers: Sequence[Scorer], texts: Sequence[Sequence[Layer]]
) -> list[Quality]:
    """Measure the regressors on texts they were not trained on.

    Args:
        scorers: By layer.
        texts: Per text, its layers; at least one.
    """
    found = []
    for index, scorer in enumerate(scorers):
        truths = [text[index].targets.t() for text in texts]
        guesses = [scorer.score(text[index].inputs) for text in texts]
        ranks = torch.stack(
            [spearman(*pair) for pair in zip(guesses, truths, strict=True)]
        )
        guess, truth = torch.cat(guesses, 1).double(), torch.cat(truths, 1).double()
        missed = (guess - truth).square().sum(1)
        spread = (truth - truth.mean(1, keepdim=True)).square().sum(1)
        found.append(Quality(float((1 - missed / spread).mean()), float(ranks.mean())))
    return found
