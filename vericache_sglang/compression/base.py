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
        q_tail: w, last post-RoPE queries of the prompt that ``scores`` wants, in
            tokens; 0: none, and nothing is collected.
        token_align: Kept counts must be multiples of this many tokens.
    """

    keys: bool = True
    q_tail: int = 0
    token_align: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shapes of the served model on this rank.

    Attributes:
        layers: L, attention layers that own KV.
        query_heads: Hq, query heads on this rank, a multiple of ``kv_heads``; query
            head i reads KV head i // (Hq // H).
        kv_heads: H, KV heads on this rank.
        head_dim: D, elements of one key.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class QueryTail:
    """The last queries of a prompt in one layer, and where they stand.

    Attributes:
        rows: [Hq, w', D] post-RoPE, the dtype of the model; row i is the query of
            position ``end - w' + i``. 1 <= w' <= ``Needs.q_tail``: fewer where the
            prompt is shorter, or where a prefix cache answered for its tokens.
        end: Prompt tokens, the tail that fills no page included: >= T.
    """

    rows: torch.Tensor
    end: int

    @property
    def start(self) -> int:
        """Position of the first row, in tokens."""
        return self.end - self.rows.shape[1]


class Selector(ABC):
    """Scores prompt tokens per layer and KV head; the higher a score, the longer kept.

    Shapes: H = KV heads and Hq = query heads on this rank, D = head dim, T = prompt
    tokens offered: the whole pages of the prompt, positions 0 to T - 1.

    A selector never touches the cache, a stream or a request; it may return anything,
    NaN included: the runtime turns scores into indices and stays exact whatever they
    are (``vericache_sglang.compression.budget``).

    Args:
        seed: ``VeriCacheConfig.seed``; a method that draws nothing ignores it.
    """

    needs: ClassVar[Needs] = Needs()

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def bind(self, spec: ModelSpec) -> None:
        """Learn the model once, before any request; default: nothing to learn."""

    def open(self, rid: str) -> None:
        """Start a request; default: no state per request."""

    def close(self, rid: str) -> None:
        """Forget a request; called once for every ``open``, also after an abort."""

    @abstractmethod
    def scores(
        self,
        rid: str,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        queries: QueryTail | None,
    ) -> torch.Tensor:
        """Score the prompt tokens of one layer.

        Args:
            rid: Request id, open.
            layer: Layer index in [0, L).
            keys: [H, T, D] post-RoPE keys, any float dtype; not modified.
            values: [H, T, D], as ``keys``.
            queries: The prompt's last queries; None unless ``Needs.q_tail`` asks for
                them. Not modified.

        Returns:
            [H, T], any float dtype, on the device of ``keys``.
        """


SELECTORS: Registry[Callable[[int], Selector]] = Registry("compressor")
"""Factories by name; each is called with ``VeriCacheConfig.seed``."""
