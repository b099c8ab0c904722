"""Keep heavy hitters: tokens the prompt's queries attended to (arXiv:2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vericache_sglang.compression.about import About
from vericache_sglang.compression.base import SELECTORS, Needs, Seen, Selector, Step
from vericache_sglang.compression.chunks import rows_at_once
from vericache_sglang.errors import CompressionError


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Every s-th query of the tokens run for one layer.

    Attributes:
        start: Position of the first token run.
        end: End position of the tokens run, exclusive.
        stride: s, a power of two; sampled positions are multiples of s.
        rows: [Hq, m, D] post-RoPE, in the dtype of the model.
    """

    start: int
    end: int
    stride: int
    rows: torch.Tensor

    @property
    def first(self) -> int:
        """Position of the first row."""
        return _next_multiple(self.start, self.stride)

    def extended(self, queries: torch.Tensor, most: int) -> Sample:
        """Append the next queries, and double the stride until ``most`` rows suffice.

        The result depends on ``start`` and ``end`` alone, not on the steps between.

        Args:
            queries: [Hq, n, D] of positions ``end`` to ``end + n - 1``; copied from.
            most: Rows to hold at most, >= 1.
        """
        end, stride = self.end + queries.shape[1], self.stride
        while _multiples(self.start, end, stride) > most:
            stride *= 2
        skip = (_next_multiple(self.start, stride) - self.first) // self.stride
        old = self.rows[:, skip :: stride // self.stride]
        new = queries[:, _next_multiple(self.end, stride) - self.end :: stride]
        return Sample(self.start, end, stride, torch.cat([old, new], dim=1))


@SELECTORS.register("observed")
class Observed(Selector):
    """Attention a token received, summed over a sample of the prompt's queries.

    H2O accumulates the attention of every query (Zhang et al., NeurIPS 2023), which
    costs T * T weights per head. Here every s-th query counts, s times, with s the
    smallest power of two that leaves at most ``queries`` of them: exactly H2O's sum for
    prompts of up to ``queries`` tokens, an estimate for longer ones.

    Other differences: the sum is averaged over a KV head's group, since its query heads
    must keep the same tokens; decoded tokens do not count; H2O's recent tokens are
    ``recent_tokens`` of the configuration, not half of the budget. Tokens of the last,
    partial page are not offered, so the softmax lacks their keys. Prefix-cache hits are
    not run and do not count.

    State per request and layer: Hq * ``queries`` * D elements at most.

    Args:
        seed: Unused; the method is deterministic.
        queries: Maximum number of sampled queries, >= 1.
        mean: Divide by the number of queries that could see the token, as kvpress'
            ``ObservedAttentionPress`` does. Without it early tokens gather most.

    Raises:
        CompressionError: ``queries`` is below 1.
    """

    needs: ClassVar[Needs] = Needs(q_stream=True)
    about: ClassVar[About] = About(
        paper="H2O, arXiv:2306.14048, on a sample of the queries",
        licence="none at top level (FMInference/H2O); no code shared",
    )

    def __init__(
        self, seed: int = 0, *, queries: int = 512, mean: bool = False
    ) -> None:
        super().__init__(seed)
        if queries < 1:
            raise CompressionError(f"observed: queries must be >= 1, got {queries}")
        self._most = queries
        self._mean = mean
        self._open: dict[str, dict[int, Sample]] = {}

    def open(self, rid: str) -> None:
        """See ``Selector.open``."""
        self._open[rid] = {}

    def close(self, rid: str) -> None:
        """See ``Selector.close``; frees the sample."""
        self._open.pop(rid, None)

    def update(self, step: Step) -> None:
        """See ``Selector.update``; copies the sample once.

        Raises:
            CompressionError: The step has no queries, or is not part of a prefill.
        """
        queries, start = step.queries, step.start
        if queries is None or start is None:
            raise CompressionError("observed: a step without queries")
        layers = self._open[step.rid]
        known = layers.get(step.layer)
        if known is None or known.end != start:
            known = Sample(start, start, 1, queries[:, :0])
        layers[step.layer] = known.extended(queries, self._most)

    def scores(
        self,
        rid: str,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: Seen,
    ) -> torch.Tensor:
        """See ``Selector.scores``; O(Hq * m * T * D).

        The tokens after the last sampled query, fewer than s, have no attention sum:
        they score above every other token and ascending.

        Raises:
            CompressionError: ``update`` was never called for this layer.
        """
        known = self._open.get(rid, {}).get(layer)
        if known is None:
            raise CompressionError("observed: no query of the prompt was run")
        heads, tokens, dim = keys.shape
        voters = known.rows.shape[1]
        groups = known.rows.view(heads, -1, voters, dim).transpose(1, 2)
        scores = _received(groups, keys, known) * (known.stride / groups.shape[2])
        places = torch.arange(tokens, device=keys.device)
        if self._mean:
            turns = torch.arange(voters, device=keys.device)
            positions = known.first + known.stride * turns
            sighted = voters - torch.searchsorted(positions, places)
            scores /= sighted.clamp(min=1) * known.stride
        unseen = known.first + known.stride * (voters - 1) + 1
        # A query's weights sum to 1, so no score exceeds the weighted query count.
        highest = known.stride * voters
        scores[:, unseen:] = (highest + 1 + places[unseen:]).to(scores.dtype)
        return scores


def _received(
    queries: torch.Tensor, keys: torch.Tensor, sample: Sample
) -> torch.Tensor:
    """Sum the attention that keys receive from their group, in float32.

    Args:
        queries: [H, m, G, D] of each KV head's group, the rows of ``sample``.
        keys: [H, T, D] at positions 0 to T - 1.
        sample: Positions of the queries; each sees the keys up to its own.

    Returns:
        [H, T], >= 0.
    """
    heads, voters, group, dim = queries.shape
    tokens = keys.shape[1]
    total = keys.new_zeros(heads, tokens, dtype=torch.float32)
    transposed = keys.to(torch.float32).transpose(1, 2)
    places = torch.arange(tokens, device=keys.device)
    chunk = rows_at_once(heads * group * tokens, keys.device)
    for begin in range(0, voters, chunk):
        block = queries[:, begin : begin + chunk].to(torch.float32) * dim**-0.5
        count = block.shape[1]
        start = sample.first + sample.stride * begin
        stop = start + sample.stride * (count - 1) + 1
        own = torch.arange(start, stop, sample.stride, device=keys.device)
        # Keys behind the block's last query are left out, not computed and masked.
        logits = block.reshape(heads, -1, dim) @ transposed[:, :, :stop]
        logits = logits.view(heads, count, group, -1)
        later = places[:stop] > own[:, None]
        logits.masked_fill_(later[:, None], -torch.inf)
        total[:, :stop] += torch.softmax(logits, dim=3).sum((1, 2))
    return total


def _next_multiple(position: int, stride: int) -> int:
    """Return the first multiple of ``stride`` that is no less than ``position``."""
    return -(-position // stride) * stride


def _multiples(start: int, end: int, stride: int) -> int:
    """Count the multiples of ``stride`` in [start, end)."""
    return -(-end // stride) - -(-start // stride)
