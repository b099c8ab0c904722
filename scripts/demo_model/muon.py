"""Muon: momentum whose update is made orthogonal, for weight matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum (https://kellerjordan.github.io/posts/muon/).

    Matrices of one shape are updated together: one batched product instead of many
    small ones.

    Args:
        params: Matrices only.
        lr: Step, relative to an orthogonal matrix.
        weight_decay: Decoupled, times ``lr``.
    """

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every matrix in place from its gradient."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for weight in group["params"]:
                shapes.setdefault(weight.shape, []).append(weight)
            for weights in shapes.values():
                self.step_shape(weights, group["lr"], group["weight_decay"])

    def step_shape(
        self, weights: list[torch.nn.Parameter], lr: float, weight_decay: float
    ) -> None:
        """Update matrices of one shape, [rows, columns] each."""
        gradient = torch.stack([weight.grad for weight in weights])
        state = self.state[weights[0]]
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        momentum = state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        update = orthogonal(gradient.lerp(momentum, MOMENTUM))
        rows, columns = weights[0].shape
        update *= max(1, rows / columns) ** 0.5
        for weight, change in zip(weights, update, strict=True):
            weight.mul_(1 - lr * weight_decay).add_(change, alpha=-lr)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return about the nearest orthogonal matrices, by five Newton-Schulz steps.

    Args:
        matrices: [count, rows, columns] float32, not modified.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * (square @ square)) @ x
    return x.mT if tall else x
