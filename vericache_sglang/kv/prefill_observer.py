"""Collects the observations a selector needs of a prompt while SGLang runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vericache_sglang.compression.base import Seen, Step
from vericache_sglang.compression.placed import placed
from vericache_sglang.errors import CompressionError
from vericache_sglang.kv.query_tails import QueryTails, attention_layers

if TYPE_CHECKING:
    from vericache_sglang.compression.base import Selector
    from vericache_sglang.kv.handles import KVHandles


ProbeObserver = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor | None], bool]
"""Called with a layer, its queries, keys and attention inputs; returns whether the
attention output of the layer is needed; see ``observe``."""


class PrefillObserver:
    """Passes a selector the observations it declared in ``needs``, and no others.

    Scores of single tokens (``Selector.update``) are kept per slot of the KV pool: a
    token in the prefix cache keeps its score for the next prompt, and a slot that is
    rewritten gets a new one, because decoding is observed too.

    Args:
        selector: Bound to the model; None observes nothing.
        handles: Pool and geometry.
    """

    def __init__(self, selector: Selector | None, handles: KVHandles) -> None:
        self._selector = selector
        self._geometry = handles.geometry
        self._pool = handles.pool
        self.tails = QueryTails(selector.needs.q_tail if selector else 0)
        self._noted: torch.Tensor | None = None
        self._hidden: dict[int, torch.Tensor] = {}
        self._open: set[str] = set()
        self.probe: ProbeObserver | None = None
        """Receives the layers of a probe's forward; None while no probe runs."""

    def __len__(self) -> int:
        """Number of requests with stored observations."""
        return len(self._open | set(self.tails.rids))

    def attach(self, model: torch.nn.Module) -> None:
        """Hook the layers of ``model`` for what the selector needs, if anything.

        ``forward`` of each attention layer is wrapped in the instance: torch's forward
        pre-hook, which captures the input of the layer's parent, can neither leave out
        the attention nor see a model that calls ``forward`` itself.
        """
        if self._selector is None:
            return
        needs = self._selector.needs
        if not (needs.q_tail or needs.q_stream or needs.hidden or needs.probes):
            return
        for layer, parent in attention_parents(model):
            layer.forward = observed(layer, self.observes, self.observe)
            if needs.hidden:
                parent.register_forward_pre_hook(
                    self._input_of(layer.layer_id), with_kwargs=True
                )

    def observes(self, batch: Any) -> bool:
        """Return whether ``observe`` has to be called for the layers of a forward."""
        return self.probe is not None or (
            self._selector is not None
            and batch.rids is not None
            and (self._selector.needs.hidden or _is_prefill(batch.forward_mode))
        )

    def observe(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, batch: Any
    ) -> bool:
        """Record one layer of one forward.

        Args:
            layer: Layer index.
            queries: [N, Hq, D] post-RoPE, the new tokens of all requests, concatenated.
            keys: [N, H, D], as ``queries``.
            batch: SGLang's ``ForwardBatch``, of which ``observes`` was True.

        Returns:
            False where the attention output of the layer is not needed and may be
            skipped; always True outside a probe.
        """
        hidden = self._hidden.pop(layer, None)
        if self.probe is not None:
            return self.probe(layer, queries, keys, hidden)
        needs, prefill = self._require().needs, _is_prefill(batch.forward_mode)
        if prefill and needs.q_tail:
            self.tails.observe(layer, queries, batch)
        if hidden is not None or (prefill and needs.q_stream):
            self._update(layer, queries, hidden, batch)
        return True

    def ready(self, rid: str) -> bool:
        """Return whether a request's last queries were collected, if needed."""
        return not self.tails.width or len(self.tails.of(rid)) == self._geometry.layers

    def seen(self, rid: str, layer: int, slots: torch.Tensor) -> Seen:
        """Return the observations of a prompt in one layer; opens the request.

        Args:
            rid: Request id.
            layer: Layer index.
            slots: [T] int64, slots of its tokens, in order.
        """
        self.open(rid)
        noted = None if self._noted is None else self._noted[layer][:, slots]
        return Seen(tail=self.tails.of(rid).get(layer), noted=noted)

    def noted(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """Return the scores [H, T] of tokens by layer; empty where there are none."""
        return [] if self._noted is None else list(self._noted[:, :, slots])

    def share(self, slots: torch.Tensor) -> float | None:
        """Return the share of these tokens the method asks to keep; None: any.

        Raises:
            CompressionError: It is not in (0, 1].
        """
        if self._selector is None:
            return None
        share = self._selector.keep_share(self.noted(slots))
        if share is not None and not 0 < share <= 1:
            raise CompressionError(f"a compressor asked to keep {share} of a prompt")
        return share

    def note(self, slots: torch.Tensor, scores: list[torch.Tensor]) -> None:
        """Store the scores of tokens that moved to other slots.

        Args:
            slots: [T] int64, their present slots.
            scores: As ``noted`` returned them.
        """
        if scores:  # may be the first scores, of a prefix from the store
            table = self._table()
            table[:, :, slots] = placed(torch.stack(scores), table.device)

    def forget(self, rid: str) -> None:
        """Drop all that is stored for a request; no effect without any."""
        self.tails.forget(rid)
        if rid in self._open:
            self._open.remove(rid)
            self._require().close(rid)

    def open(self, rid: str) -> None:
        """Open a request in the selector, once."""
        if self._selector is not None and rid not in self._open:
            self._open.add(rid)
            self._selector.open(rid)

    def _input_of(self, layer: int) -> Any:
        def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found = kwargs.get("hidden_states")
            self._hidden[layer] = args[1] if found is None else found

        return keep

    def _update(
        self, layer: int, queries: torch.Tensor, hidden: torch.Tensor | None, batch: Any
    ) -> None:
        """Call the selector once per request of the forward."""
        lengths, starts = _prefilled(batch)
        stop = 0
        for rid, start, count in zip(batch.rids, starts, lengths, strict=True):
            begin, stop = stop, stop + count
            if not count:
                continue
            self.open(rid)
            step = Step(
                rid=rid,
                layer=layer,
                start=start,
                queries=queries[begin:stop].transpose(0, 1),
                hidden=None if hidden is None else hidden[begin:stop],
            )
            scores = self._require().update(step)
            if scores is not None:
                slots = batch.out_cache_loc[begin:stop].to(torch.int64)
                self._table()[layer][:, slots] = scores.to(torch.float32)

    def _require(self) -> Selector:
        if self._selector is None:
            raise RuntimeError("no prefill is observed")
        return self._selector

    def _table(self) -> torch.Tensor:
        """Return scores [L, H, slots], NaN without a score; allocated at first use."""
        if self._noted is None:
            keys = self._pool.k_buffer[0]
            shape = (self._geometry.layers, self._geometry.kv_heads, len(keys))
            self._noted = torch.full(shape, torch.nan, device=keys.device)
        return self._noted


def observed(
    layer: Any, observes: Callable[[Any], bool], observe: Callable[..., bool]
) -> Callable[..., Any]:
    """Return ``layer.forward``, which first shows ``observe`` queries and keys.

    A layer without keys, one that shares another layer's KV, is not shown. Where
    ``observe`` returns False the attention is left out and its output is zeros.

    Args:
        layer: SGLang's ``RadixAttention``.
        observes: See ``PrefillObserver.observes``; asked at every forward.
        observe: See ``PrefillObserver.observe``.
    """
    attend = layer.forward

    def forward(
        q: Any, k: Any, v: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if k is not None and observes(forward_batch):
            queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
            keys = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
            if not observe(layer.layer_id, queries, keys, forward_batch):
                return v.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        return attend(q, k, v, forward_batch, *args, **kwargs)

    return forward


def attention_parents(model: torch.nn.Module) -> list[tuple[Any, torch.nn.Module]]:
    """Return every ``RadixAttention`` of a model with its parent module."""
    layers = set(attention_layers(model))
    return [
        (child, module)
        for module in model.modules()
        for child in module.children()
        if child in layers
    ]


def _is_prefill(mode: Any) -> bool:
    return bool(mode.is_extend() and not mode.is_target_verify())


def _prefilled(batch: Any) -> tuple[list[int], list[int | None]]:
    """Return each request's count of new tokens and the position of the first one.

    Read from host lists; None where the host does not know the position yet (decoding
    and verification).
    """
    mode, requests = batch.forward_mode, len(batch.rids)
    if mode.is_decode():
        return [1] * requests, [None] * requests
    lengths = list(batch.extend_seq_lens_cpu)
    if mode.is_target_verify():
        return lengths, [None] * requests
    return lengths, list(batch.extend_prefix_lens_cpu)
