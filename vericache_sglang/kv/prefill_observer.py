"""What a selector asked to see of a prompt, collected while SGLang runs it."""

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
"""Called with a layer, its queries, keys and attention inputs, and returns whether
anybody reads what the layer attends to; see ``observe``."""


class PromptWatch:
    """Shows a selector what it declared the need of; observes nothing else.

    Scores of single tokens (``Selector.update``) are kept per slot of the KV pool: a
    token in the prefix cache keeps its score for the next prompt, and a slot that is
    written anew gets a new one, because decoding is watched too.

    Args:
        selector: Bound to the model; None watches nothing.
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
        """Takes what a probe's forward shows, while one runs."""

    def __len__(self) -> int:
        """Requests something is kept for."""
        return len(self._open | set(self.tails.rids))

    @property
    def reprefill_tail(self) -> int:
        """Tokens SGLang is to run again where its prefix cache has them."""
        return self.tails.width

    def watch(self, model: torch.nn.Module) -> None:
        """Have the layers of ``model`` report what is needed; else leave them alone.

        The hook on ``RadixAttention.forward`` (patches: layers_radix_attention) calls
        the attribute set here; the input of the attention module is seen by torch's
        own hook.
        """
        if self._selector is None:
            return
        needs = self._selector.needs
        if not (needs.q_tail or needs.q_stream or needs.hidden or needs.probes):
            return
        for layer, parent in attention_parents(model):
            layer.vericache_observer = self.observe
            if needs.hidden:
                parent.register_forward_pre_hook(
                    self._input_of(layer.layer_id), with_kwargs=True
                )

    def observe(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, batch: Any
    ) -> bool:
        """Take in one layer of one forward.

        Args:
            layer: Layer index.
            queries: [N, Hq, D] post-RoPE, the new tokens of all requests in a row.
            keys: [N, H, D], as ``queries``.
            batch: SGLang's ``ForwardBatch``; one without request ids (a warm-up) is
                passed over.

        Returns:
            False where nobody reads what the layer would attend to, so that the
            attention may be left out; always True outside a probe.
        """
        hidden = self._hidden.pop(layer, None)
        if self.probe is not None:
            return self.probe(layer, queries, keys, hidden)
        if self._selector is None or batch.rids is None:
            return True
        mode, needs = batch.forward_mode, self._selector.needs
        prefill = mode.is_extend() and not mode.is_target_verify()
        if prefill and needs.q_tail:
            self.tails.observe(layer, queries, batch)
        if hidden is not None or (prefill and needs.q_stream):
            self._update(layer, queries, hidden, batch)
        return True

    def ready(self, rid: str) -> bool:
        """Say whether the last queries are there, where they are asked for."""
        return not self.tails.width or len(self.tails.of(rid)) == self._geometry.layers

    def seen(self, rid: str, layer: int, slots: torch.Tensor) -> Seen:
        """Return what was collected of a prompt in one layer; opens the request.

        Args:
            rid: Request id.
            layer: Layer index.
            slots: [T] int64, where its tokens are, in order.
        """
        self.open(rid)
        noted = None if self._noted is None else self._noted[layer][:, slots]
        return Seen(tail=self.tails.of(rid).get(layer), noted=noted)

    def noted(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """Return the scores [H, T] of tokens by layer; empty where there are none."""
        return [] if self._noted is None else list(self._noted[:, :, slots])

    def share(self, slots: torch.Tensor) -> float | None:
        """Return the share of these tokens the method wants kept; None: any.

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
        """Give tokens that changed their slots their scores back.

        Args:
            slots: [T] int64, where they are now.
            scores: As ``noted`` returned them.
        """
        if scores:  # also the first ones, of a prefix that comes from the store
            table = self._table()
            table[:, :, slots] = placed(torch.stack(scores), table.device)

    def forget(self, rid: str) -> None:
        """Drop what is kept by request; nothing happens when there is nothing."""
        self.tails.forget(rid)
        if rid in self._open:
            self._open.remove(rid)
            self._require().close(rid)

    def open(self, rid: str) -> None:
        """Have the selector begin a request, once."""
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
        lengths, starts = _extents(batch)
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
            raise RuntimeError("nobody watches prompts")
        return self._selector

    def _table(self) -> torch.Tensor:
        """Return scores [L, H, slots], NaN where nobody scored; made at first use."""
        if self._noted is None:
            keys = self._pool.k_buffer[0]
            shape = (self._geometry.layers, self._geometry.kv_heads, len(keys))
            self._noted = torch.full(shape, torch.nan, device=keys.device)
        return self._noted


def attention_parents(model: torch.nn.Module) -> list[tuple[Any, torch.nn.Module]]:
    """Return every ``RadixAttention`` of a model with the module it belongs to."""
    layers = set(attention_layers(model))
    return [
        (child, module)
        for module in model.modules()
        for child in module.children()
        if child in layers
    ]


def _extents(batch: Any) -> tuple[list[int], list[int | None]]:
    """Return the new tokens of each request, and the position of its first one.

    From the host's lists; it does not know yet where decoded tokens stand.
    """
    mode, requests = batch.forward_mode, len(batch.rids)
    if mode.is_decode():
        return [1] * requests, [None] * requests
    lengths = list(batch.extend_seq_lens_cpu)
    if mode.is_target_verify():
        return lengths, [None] * requests
    return lengths, list(batch.extend_prefix_lens_cpu)
