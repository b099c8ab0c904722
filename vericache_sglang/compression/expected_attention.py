"""Keep what future queries are expected to attend to (arXiv:2510.00636)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from vericache_sglang.compression.about import About
from vericache_sglang.compression.base import (
    SELECTORS,
    Needs,
    Seen,
    Selector,
    Services,
    Step,
)
from vericache_sglang.compression.chunks import rows_at_once
from vericache_sglang.errors import CompressionError

if TYPE_CHECKING:
    from collections.abc import Callable

FUTURE = 4096
"""Maximum positions after the prompt: the table of rotations ends soon after the
context (``ModelServices.rope`` extends to twice its end)."""


@dataclass(slots=True, eq=False)
class Statistics:
    """Running mean and co-moment of one layer's queries before RoPE.

    Batches are merged by the pairwise form of Welford's update (Chan, Golub, LeVeque
    1979): no difference of large sums, so any cut into batches gives the same result
    up to rounding.

    Attributes:
        mean: [Hq, D] float32.
        comoment: [Hq, D, D] float32, sum of outer products of (query - mean); None
            if not needed.
        count: Queries merged so far.
        end: End position of the tokens that were run, exclusive.
    """

    mean: torch.Tensor
    comoment: torch.Tensor | None
    end: int
    count: int = 0

    def add(self, queries: torch.Tensor) -> None:
        """Merge queries into the statistics.

        Args:
            queries: [Hq, n, D] float32, n >= 1; not modified.
        """
        new = queries.shape[1]
        total = self.count + new
        mean = queries.mean(1)
        shift = mean - self.mean
        if self.comoment is not None:
            centred = queries - mean[:, None]
            self.comoment.baddbmm_(centred.transpose(1, 2), centred)
            weight = self.count * new / total
            self.comoment.baddbmm_(shift[:, :, None], shift[:, None], alpha=weight)
        self.mean += shift * (new / total)
        self.count = total


@SELECTORS.register("expected-attention")
class ExpectedAttention(Selector):
    """Expected attention of Gaussian queries at the next positions, times ``|v|``.

    As in kvpress (``ExpectedAttentionPress``): mean and covariance of the prompt's
    queries before RoPE, per query head; both rotated by the average rotation of the
    next ``future`` positions; softmax over the tokens of the mean of a log-normal
    weight, averaged over a KV head's group. The paper's derivation has ``|W_O v|``;
    kvpress and this implementation have ``|v|``.

    Differences: everything is float32; tokens of the last, partial page are not
    offered, so the softmax lacks their keys, while their queries count. Prefix-cache
    hits are not run: the statistics are those of the other queries, which are only the
    question's if the whole prefix was cached.

    State per request and layer: Hq * (D + D * D) floats, without covariance Hq * D.

    Args:
        seed: Unused; the method is deterministic.
        future: F, next positions to average over, in tokens, 1 to 4096.
        sinks: Number of first tokens that get the highest score and do not contribute
            queries, >= 0.
        covariance: Use the covariance of the queries, not only their mean.
        value_norm: Weight a token by the norm of its value.
        epsilon: Added to the attention before that weighting, >= 0; kvpress'
            leaderboard uses 0.01.

    Raises:
        CompressionError: An option is out of its bounds.
    """

    needs: ClassVar[Needs] = Needs(q_stream=True)
    about: ClassVar[About] = About(
        paper="Expected Attention, arXiv:2510.00636",
        licence="Apache-2.0 (NVIDIA/kvpress)",
    )

    def __init__(
        self,
        seed: int = 0,
        *,
        future: int = 512,
        sinks: int = 4,
        covariance: bool = True,
        value_norm: bool = True,
        epsilon: float = 0.0,
    ) -> None:
        super().__init__(seed)
        for name, value, least in (
            ("future", future, 1),
            ("sinks", sinks, 0),
            ("epsilon", epsilon, 0),
        ):
            if not value >= least:  # NaN as well
                raise CompressionError(
                    f"expected-attention: {name} must be >= {least}, got {value}"
                )
        if future > FUTURE:
            raise CompressionError(
                f"expected-attention: future must be <= {FUTURE}, got {future}"
            )
        self._future = future
        self._sinks = sinks
        self._covariance = covariance
        self._value_norm = value_norm
        self._epsilon = epsilon
        self._services: Services | None = None
        self._open: dict[str, dict[int, Statistics]] = {}
        self._rotation: tuple[int, torch.Tensor] | None = None

    def bind(self, services: Services) -> None:
        """See ``Selector.bind``; needs RoPE only, also beyond the model's context."""
        self._services = services
        self._rotation = None

    def open(self, rid: str) -> None:
        """See ``Selector.open``."""
        self._open[rid] = {}

    def close(self, rid: str) -> None:
        """See ``Selector.close``; frees the statistics."""
        self._open.pop(rid, None)

    def update(self, step: Step) -> None:
        """See ``Selector.update``; O(Hq * n * D * D).

        Raises:
            CompressionError: ``bind`` was not called, or the step has no queries or
                does not belong to a prefill.
        """
        queries, start = step.queries, step.start
        if queries is None or start is None:
            raise CompressionError("expected-attention: a step without queries")
        heads, tokens, dim = queries.shape
        layers = self._open[step.rid]
        known = layers.get(step.layer)
        if known is None or known.end != start:
            known = layers[step.layer] = self._empty(queries, start)
        known.end = start + tokens
        rope = self._rope()
        chunk = rows_at_once(heads * dim, queries.device)
        for begin in range(max(0, self._sinks - start), tokens, chunk):
            part = queries[:, begin : begin + chunk].to(torch.float32)
            first = start + begin
            places = torch.arange(first, first + part.shape[1], device=part.device)
            known.add(rope(part, places, inverse=True))

    def scores(
        self,
        rid: str,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: Seen,
    ) -> torch.Tensor:
        """See ``Selector.scores``; O(Hq * T * D * D).

        The first ``sinks`` tokens get the highest score of the layer plus 1.

        Raises:
            CompressionError: ``update`` was never called for this layer.
        """
        known = self._open.get(rid, {}).get(layer)
        if known is None:
            raise CompressionError("expected-attention: no query of the prompt was run")
        mean, spread = self._exponent(known)
        heads, tokens, _ = keys.shape
        scores = torch.ones(heads, tokens, dtype=torch.float32, device=keys.device)
        rest = slice(self._sinks, None)
        if tokens <= self._sinks:
            return scores
        exponents = _expected(keys[:, rest], mean, spread)
        scores[:, rest] = torch.softmax(exponents, dim=1).mean(2)
        if self._value_norm:
            scores[:, rest] += self._epsilon
            scores[:, rest] *= torch.linalg.vector_norm(
                values[:, rest], dim=-1, dtype=torch.float32
            )
        scores[:, : self._sinks] = scores[:, rest].max() + 1
        return scores

    def _exponent(self, known: Statistics) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the linear and the quadratic form in a key, [Hq, D], [Hq, D, D]."""
        dim = known.mean.shape[1]
        rotation = self._average_rotation(known.end, known.mean)
        mean = known.mean @ rotation * dim**-0.5
        if known.comoment is None:
            return mean, None
        spread = known.comoment / (2 * dim * max(1, known.count))
        return mean, rotation.t() @ spread @ rotation

    def _average_rotation(self, end: int, like: torch.Tensor) -> torch.Tensor:
        """Average the rotations of the positions from ``end`` on.

        Returns:
            [D, D] float32, row i is the average image of unit vector i. A contraction:
            fast pairs turn several times in F positions and cancel out.
        """
        if self._rotation is not None:
            of, rotation = self._rotation
            if of == end and rotation.device == like.device:
                return rotation  # one computation for all layers of a request
        rope, dim = self._rope(), like.shape[1]
        rotation = like.new_zeros(dim, dim)
        units = torch.eye(dim, device=like.device)[:, None]
        chunk = rows_at_once(dim * dim, like.device)
        places = torch.arange(end, end + self._future, device=like.device)
        for part in places.split(chunk):
            rotation += rope(units.expand(-1, len(part), -1), part).sum(1)
        rotation /= self._future
        self._rotation = end, rotation
        return rotation

    def _empty(self, queries: torch.Tensor, start: int) -> Statistics:
        heads, _, dim = queries.shape
        mean = queries.new_zeros(heads, dim, dtype=torch.float32)
        comoment = mean.new_zeros(heads, dim, dim) if self._covariance else None
        return Statistics(mean, comoment, start)

    def _rope(self) -> Callable[..., torch.Tensor]:
        if self._services is None:
            raise CompressionError("expected-attention: used before bind")
        return self._services.rope


def _expected(
    keys: torch.Tensor, mean: torch.Tensor, spread: torch.Tensor | None
) -> torch.Tensor:
    """Evaluate the exponent of the expected weight for keys.

    Args:
        keys: [H, T, D] post-RoPE, any float dtype.
        mean: [Hq, D] linear form of each query head, KV head by KV head.
        spread: [Hq, D, D] quadratic form, or None.

    Returns:
        [H, T, G] float32, of each query head of a group.
    """
    heads, _, dim = keys.shape
    means = mean.view(heads, -1, dim)
    group = means.shape[1]
    if spread is None:
        return keys.to(torch.float32) @ means.transpose(1, 2)
    # The quadratic forms of a group are concatenated: one product per key for all.
    forms = spread.view(heads, group, dim, dim).transpose(1, 2)
    forms = forms.reshape(heads, dim, group * dim)
    offsets = means.reshape(heads, 1, group * dim)
    parts = []
    # (mean + key S) . key: the [Hq, T, D] product is never materialised as a whole.
    for part in keys.split(rows_at_once(heads * group * dim, keys.device), dim=1):
        rows = part.to(torch.float32)
        lifted = torch.baddbmm(offsets, rows, forms).view(*rows.shape[:2], group, dim)
        parts.append(lifted.mul_(rows[:, :, None]).sum(3))
    return torch.cat(parts, dim=1)
