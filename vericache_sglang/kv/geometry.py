"""Shapes and bytes of the KV cache: arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """Sizes of one rank's KV cache.

    Attributes:
        layers: Layers that own KV.
        kv_heads: KV heads on this rank.
        head_dim: Elements of one key.
        v_head_dim: Elements of one value.
        page_size: Slots of one page, one token each.
    """

    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    element_bytes: int
    page_size: int

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes over all layers, keys and values."""
        width = self.head_dim + self.v_head_dim
        return self.layers * self.kv_heads * width * self.element_bytes
