"""The last queries of every prompt, collected while SGLang prefills it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from vericache_sglang.compression.base import QueryTail

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class QueryTails:
    """Keeps per request and layer the last post-RoPE queries its prefill ran.

    A chunk that continues where the last one ended extends the tail; any other one
    begins a prefill anew and replaces it. Tokens from the prefix cache are not run,
    so a tail may be shorter than ``width``, but never empty: SGLang always runs the
    last token. Reads host lists only, and copies what it keeps.

    Args:
        width: w, most queries kept, in tokens; 0 observes nothing.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._tails: dict[str, dict[int, QueryTail]] = {}

    def __len__(self) -> int:
        return len(self._tails)

    def observe(self, layer: int, queries: torch.Tensor, batch: Any) -> None:
        """Record one layer of one prefill forward.

        Args:
            layer: Layer index.
            queries: [N, Hq, D] post-RoPE, the new tokens of all requests, concatenated;
                copied.
            batch: SGLang's ``ForwardBatch``; one without request ids (a warm-up) is
                ignored.
        """
        if batch.rids is None:
            return
        stop = 0
        for rid, prefix, count in zip(
            batch.rids,
            batch.extend_prefix_lens_cpu,
            batch.extend_seq_lens_cpu,
            strict=True,
        ):
            stop += count
            if count:
                new = queries[stop - min(count, self.width) : stop].transpose(0, 1)
                self._extend(rid, layer, new, prefix, prefix + count)

    @property
    def rids(self) -> Collection[str]:
        """Requests with a tail."""
        return self._tails.keys()

    def of(self, rid: str) -> Mapping[int, QueryTail]:
        """Return the tails of a request by layer; empty if none is known."""
        return self._tails.get(rid, {})

    def forget(self, rid: str) -> None:
        """Drop a request's tails; no effect without any."""
        self._tails.pop(rid, None)

    def _extend(
        self, rid: str, layer: int, new: torch.Tensor, prefix: int, end: int
    ) -> None:
        tails = self._tails.setdefault(rid, {})
        old = tails.get(layer)
        if old is not None and old.end == prefix and new.shape[1] < self.width:
            new = torch.cat([old.rows, new], dim=1)[:, -self.width :]
        # A view would keep the queries of the whole chunk alive.
        rows = new.clone(memory_format=torch.contiguous_format)
        tails[layer] = QueryTail(rows, end)


def attention_layers(model: torch.nn.Module) -> list[RadixAttention]:
    """Return the attention layers of an SGLang model, in order."""
    return [module for module in model.modules() if isinstance(module, RadixAttention)]
