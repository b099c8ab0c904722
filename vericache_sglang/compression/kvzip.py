"""Keep tokens that repeating the prompt attends to (KVzip, arXiv:2505.23416)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch

from vericache_sglang.compression.about import About
from vericache_sglang.compression.base import (
    SELECTORS,
    Needs,
    Probe,
    ProbeLayer,
    Seen,
    Selector,
    Services,
)
from vericache_sglang.compression.chunks import DEVICE_ELEMENTS
from vericache_sglang.errors import CompressionError

if TYPE_CHECKING:
    from collections.abc import Sequence

REPEAT_ALL = "\n\nRepeat the previous context exactly."
"""Instruction of the first probe, as in the official code (``self_task``)."""

REPEAT_PART = "\n\nRepeat the part of the previous context exactly, starting with "
"""Instruction of later probes; the last space is the official code's, not kvpress'."""

LEAD = 8
"""Last tokens of the previous chunk, given to a probe as its starting point."""

SINKS = 4
"""Minimum sink tokens in a later chunk's softmax (kvpress ``n_sink``)."""

CACHED_ELEMENTS = 2**18
"""Maximum attention weights computed at once on a CPU: 1 MiB, to fit its caches."""


KEPT = torch.finfo(torch.float32).max
"""Score of the template prefix: above every measured score."""

UNSCORED = torch.finfo(torch.float32).min
"""Score of a token that no probe reached: below every measured score."""


@SELECTORS.register("kvzip")
class KVzip(Selector):
    """Largest attention a token receives while the model repeats the prompt.

    The prompt is repeated chunk by chunk, each in one probe over the prompt's whole KV.
    The score is taken over all queries of the probe and of the KV head's group. As in
    the official code (``KVScore._get_score``) the softmax runs over a subset of keys:
    the sinks, the chunk, and the probe up to the query itself; unlike there, in
    float32. The sinks are the prompt's first tokens before the chunk: the template
    prefix, and ``SINKS`` where that is shorter. Scores lie in [0, 1].

    KVzip+ (kvpress ``kvzip_plus_normalization``; the target of KVzap, arXiv:2601.07891)
    weights the attention of query j to token t by ``||W_O v_t|| / ||x_j||``.

    A request's scores take 4 bytes per token, KV head and layer until it is closed;
    KVzip+ keeps Hq * D * min(d, D) float32 per layer.

    Args:
        seed: Unused; the method is deterministic.
        chunk: Prompt tokens that one probe repeats, >= 1; kvpress 2048, official 2000.
        plus: KVzip+; needs the attention inputs as well.
        prefix: P, first prompt tokens that belong to the chat template; never repeated,
            always kept. 0 without a template.
        suffix: Text between the instruction to repeat and the repetition. The
            references put the chat template's turn change here; kvpress has a newline
            without a template.

    Raises:
        CompressionError: ``chunk`` is below 1 or ``prefix`` below 0.
    """

    needs: ClassVar[Needs] = Needs(keys=False, probes=True)
    about: ClassVar[About] = About(
        paper="KVzip, arXiv:2505.23416",
        mode="offline",
        licence="MIT (snu-mllab/KVzip); Apache-2.0 (kvpress)",
    )

    def __init__(
        self,
        seed: int = 0,
        *,
        chunk: int = 2048,
        plus: bool = False,
        prefix: int = 0,
        suffix: str = "\n",
    ) -> None:
        super().__init__(seed)
        if chunk < 1:
            raise CompressionError(f"kvzip: chunk must be >= 1 token, got {chunk}")
        if prefix < 0:
            raise CompressionError(f"kvzip: prefix must be >= 0 tokens, got {prefix}")
        if plus:
            # Set per instance: this option changes which inputs are collected.
            self.needs = Needs(  # type: ignore[misc]
                keys=False, probes=True, hidden=True
            )
        self._chunk = chunk
        self._prefix = prefix
        self._suffix = suffix
        self._output_norms: list[torch.Tensor] = []
        self._services: Services | None = None
        self._states: dict[str, dict[int, torch.Tensor]] = {}

    def bind(self, services: Services) -> None:
        """See ``Selector.bind``; KVzip+ reduces W_O of every layer, O(Hq * d * D^2)."""
        self._services = services
        if self.needs.hidden:
            self._output_norms = [
                _same_norm(services.output_weight(layer))
                for layer in range(services.spec.layers)
            ]

    def open(self, rid: str) -> None:
        """Start a request without scores; drops those of an earlier one with its id."""
        self._states[rid] = {}

    def close(self, rid: str) -> None:
        """Drop a request's scores, if any."""
        self._states.pop(rid, None)

    def probes(self, rid: str, prompt: Sequence[int]) -> Sequence[Probe]:
        """Return one probe per chunk of the context, in order.

        A probe is the instruction to repeat, from the second probe on the ``LEAD``
        tokens before the chunk, the suffix, and the chunk's tokens. Their positions
        follow the prompt's, so the model's context must include them.

        Raises:
            CompressionError: ``bind`` was not called.
        """
        if self._services is None:
            raise CompressionError("kvzip: probes() before bind()")
        repeat_all = tuple(self._services.encode(REPEAT_ALL))
        repeat_part = tuple(self._services.encode(REPEAT_PART))
        suffix = tuple(self._services.encode(self._suffix))
        found = []
        for start in range(self._prefix, len(prompt), self._chunk):
            stop = min(start + self._chunk, len(prompt))
            asked = repeat_all
            if start > self._prefix:
                asked = repeat_part + tuple(
                    prompt[start - min(LEAD, self._chunk) : start]
                )
            found.append(Probe(asked + suffix + tuple(prompt[start:stop]), start, stop))
        return found

    def observe(self, rid: str, probe: Probe, layer: ProbeLayer) -> None:
        """See ``Selector.observe``; O(Hq * n * (S + m + n / 2) * D), S sinks.

        Probes may come in any order; a repeated probe replaces its scores. Probes of
        closed requests are ignored. Temporary memory: the subset's keys of one KV head,
        and a few blocks of ``CACHED_ELEMENTS`` weights on a CPU, of ``DEVICE_ELEMENTS``
        elsewhere.

        Raises:
            CompressionError: KVzip+, and ``layer.hidden`` is None, or ``bind`` was not
                called.
        """
        held = self._states.get(rid)
        if held is None:
            return
        tokens = layer.keys.shape[1]
        start, stop = probe.start, min(probe.stop, tokens)
        if start >= stop:
            return
        scores = held.get(layer.layer)
        if scores is None or scores.shape[1] < tokens:
            held[layer.layer] = scores = _resized(scores, layer.keys)
        scores[:, start:stop] = self._score(layer, start, stop)

    def _score(self, layer: ProbeLayer, start: int, stop: int) -> torch.Tensor:
        """Score prompt tokens ``start`` to ``stop - 1``: [H, m], float32."""
        sinks = min(start, max(self._prefix, SINKS))
        decay = self._decay(layer)
        heads = len(layer.keys)
        groups = layer.queries.view(heads, -1, *layer.queries.shape[1:])
        norms = None
        if decay is not None:
            norms = self._output_norms[layer.layer]
            norms = norms.view(heads, -1, *norms.shape[1:])
        rows = []
        # A CPU's caches hold one head; elsewhere launches cost more than memory.
        together = 1 if layer.keys.is_cpu else heads
        for first in range(0, heads, together):
            part = slice(first, first + together)
            keys = layer.keys[part]
            pieces = keys[:, :sinks], keys[:, start:stop], layer.probe_keys[part]
            subset = torch.cat(pieces, dim=1)
            received = _largest_attention(groups[part], subset, sinks, decay)
            if norms is not None:
                written = layer.values[part, None, start:stop].to(torch.float32)
                received *= torch.linalg.vector_norm(
                    written @ norms[part].transpose(2, 3), dim=3
                )
            rows.append(received.amax(1))
        return torch.cat(rows)

    def _decay(self, layer: ProbeLayer) -> torch.Tensor | None:
        """Return [n] ``1 / ||x_j||`` for KVzip+, None otherwise."""
        if not self.needs.hidden:
            return None
        if layer.hidden is None:
            raise CompressionError(
                "kvzip: plus needs the probe's attention inputs, and "
                f"ProbeLayer.hidden of layer {layer.layer} is None"
            )
        if not self._output_norms:
            raise CompressionError("kvzip: observe() with plus before bind()")
        norms = torch.linalg.vector_norm(layer.hidden, dim=1, dtype=torch.float32)
        # A zero input, of a pad token, would outweigh every other query.
        return torch.where(norms > 0, 1 / norms, 0.0)

    def scores(
        self,
        rid: str,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: Seen,
    ) -> torch.Tensor:
        """See ``Selector.scores``; O(H * T), reads no key."""
        heads, tokens, _ = keys.shape
        result = torch.full(
            (heads, tokens), UNSCORED, dtype=torch.float32, device=keys.device
        )
        scores = self._states.get(rid, {}).get(layer)
        if scores is not None:
            known = min(tokens, scores.shape[1])
            result[:, :known] = scores[:, :known]
        result[:, : self._prefix] = KEPT
        return result


def _resized(scores: torch.Tensor | None, keys: torch.Tensor) -> torch.Tensor:
    """Return scores for all of ``keys`` [H, T, D], unknown ones ``UNSCORED``."""
    result = torch.full(
        keys.shape[:2], UNSCORED, dtype=torch.float32, device=keys.device
    )
    if scores is not None:
        result[:, : scores.shape[1]] = scores
    return result


def _same_norm(weight: torch.Tensor) -> torch.Tensor:
    """Reduce W_O [Hq, D, d] to R [Hq, r, D], r <= D, with ``||R v|| = ||v W_O||``.

    By QR and not by the Gram matrix, which would halve the digits of small norms.
    """
    tall = weight.to(torch.float32).transpose(1, 2)
    triangle: torch.Tensor = torch.linalg.qr(tall, mode="r").R
    return triangle


def _largest_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    sinks: int,
    decay: torch.Tensor | None,
) -> torch.Tensor:
    """Return the maximum attention of each query head to each key of the chunk.

    Args:
        queries: [H, G, n, D] of the probe, by KV head.
        keys: [H, S + m + n, D]: sinks, chunk, probe; query i sees the first S + m + i
            + 1.
        sinks: S, in tokens.
        decay: [n] factors of the queries; None: all are 1.

    Returns:
        [H, G, m], float32.
    """
    heads, group, length, dim = queries.shape
    rows = queries.to(torch.float32) / math.sqrt(dim)
    transposed = keys.to(torch.float32).transpose(1, 2)
    before = keys.shape[1] - length
    best = rows.new_zeros(heads, group, before - sinks)
    block_elements = CACHED_ELEMENTS if keys.is_cpu else DEVICE_ELEMENTS
    step = max(1, block_elements // (heads * group * keys.shape[1]))
    step = min(length, step)
    later = rows.new_ones(step, step, dtype=torch.bool).triu(1)
    for first in range(0, length, step):
        block = rows[:, :, first : first + step]
        width = block.shape[2]
        seen = before + first + width
        # Keys behind the block's last query are left out, not computed and masked.
        logits = block.reshape(heads, -1, dim) @ transposed[:, :, :seen]
        logits = logits.view(heads, group, width, -1)
        logits[..., before + first :].masked_fill_(later[:width, :width], -torch.inf)
        weights = torch.softmax(logits, dim=3)[..., sinks:before]
        if decay is not None:
            weights *= decay[first : first + width, None]
        torch.maximum(best, weights.amax(2), out=best)
    return best
