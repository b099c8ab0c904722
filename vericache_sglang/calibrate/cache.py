"""Caches for Hugging Face models: one rounds to the pool's dtype, one records KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import DynamicCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class KV(NamedTuple):
    """Keys behind RoPE and values of one layer, [H, T, D] and [H, T, Dv]."""

    keys: torch.Tensor
    values: torch.Tensor

    def tokens(self, start: int, stop: int) -> KV:
        """Return a range of tokens, views."""
        return KV(self.keys[:, start:stop], self.values[:, start:stop])


class RoundedCache(DynamicCache):
    """KV cache rounded to a server pool's ``dtype``, stored in the model's dtype.

    Attention reads the rounded KV, including that of the tokens being run.

    Args:
        dtype: Dtype of the pool.
        past: Initial KV per layer, of any float dtype.
        like: Tensor with the model's dtype and device; required with ``past``.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        past: Sequence[KV] = (),
        like: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self._dtype = dtype
        self.append(past, like)

    def append(self, tokens: Sequence[KV], like: torch.Tensor | None) -> None:
        """Append the KV of tokens that were run elsewhere; see the class."""
        for layer, kv in enumerate(tokens):
            assert like is not None
            self.update(kv.keys[None].to(like), kv.values[None].to(like), layer)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [1, H, t, D] and return the whole layer; called by the model."""
        rounded = (
            states.to(self._dtype).to(states.dtype)
            for states in (key_states, value_states)
        )
        found: tuple[torch.Tensor, torch.Tensor] = super().update(
            *rounded, layer_idx, *args, **kwargs
        )
        return found

    def exact(self) -> list[KV]:
        """Return every layer in the dtype of the pool."""
        return [
            KV(layer.keys[0].to(self._dtype), layer.values[0].to(self._dtype))
            for layer in self.layers
        ]


class RecordingCache(DynamicCache):
    """Records the KV of one forward over a whole prompt, with its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, KV] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record [1, H, T, D] and return it unchanged; called by the model."""
        for states in (key_states, value_states):
            if states.requires_grad:
                states.retain_grad()
        self.seen[layer_idx] = KV(key_states, value_states)
        return key_states, value_states
