"""The interface of a token-dropping compressor: needs, services, scores, lifetime."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vericache_sglang.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a selector asks of the runtime; static, read once at boot.

    Attributes:
        keys: Scores are computed from the keys; otherwise ``scores`` gets them but
            promises not to read them.
        token_align: Kept counts must be multiples of this many tokens.
    """

    keys: bool = True
    token_align: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shapes of the served model on this rank.

    Attributes:
        layers: L, attention layers that own KV.
        kv_heads: H, KV heads on this rank.
        head_dim: D, elements of one key.
    """

    layers: int
    kv_heads: int
    head_dim: int


class Selector(ABC):
    """Scores prompt tokens per layer and KV head; the higher a score, the longer kept.

    Shapes below: H = KV heads on this rank, T = prompt tokens offered, D = head dim.
    A selector never touches the cache, a stream or a request; it may return anything,
    NaN included: the runtime turns scores into indices and stays exact whatever they
    are (``vericache_sglang.compression.budget``).
    """

    needs: ClassVar[Needs] = Needs()

    def bind(self, spec: ModelSpec) -> None:
        """Learn the model once, before any request; default: nothing to learn."""

    def open(self, rid: str) -> None:
        """Start a request; default: no state per request."""

    def close(self, rid: str) -> None:
        """Forget a request; called once for every ``open``, also after an abort."""

    @abstractmethod
    def scores(
        self, rid: str, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Score the prompt tokens of one layer.

        Args:
            rid: Request id, open.
            layer: Layer index in [0, L).
            keys: [H, T, D] post-RoPE keys, any float dtype; not modified.
            values: [H, T, D], as ``keys``.

        Returns:
            [H, T], any float dtype, on the device of ``keys``.
        """


SELECTORS: Registry[Callable[[int], Selector]] = Registry("compressor")
"""Factories by name; each is called with ``VeriCacheConfig.seed``."""
