"""The interface of a token-dropping compressor: needs, services, scores, lifetime."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from vericache_sglang.compression.about import UNKNOWN, About
from vericache_sglang.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Inputs that a selector needs from the runtime; static, read once at boot.

    The runtime collects only the inputs that are asked for.

    Attributes:
        keys: Scores depend on the keys; otherwise ``scores`` receives them but must
            not read them.
        q_tail: w, number of last post-RoPE queries of the prompt for ``scores``, in
            tokens; 0: none are collected.
        q_stream: ``update`` receives the queries of every token that is run.
        hidden: ``update`` receives the attention inputs of every token that is run.
        probes: The runtime runs the forwards that ``probes`` returns over the prompt's
            KV and passes their reads to ``observe``. Needs the prompt's token ids.
        token_align: Kept counts must be multiples of this many tokens.
    """

    keys: bool = True
    q_tail: int = 0
    q_stream: bool = False
    hidden: bool = False
    probes: bool = False
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
        hidden_size: d, elements of an attention input.
        name: Folder or name the model was loaded from, for messages.
        all_kv_heads: KV heads on all ranks; 0: this rank has them all.
        first_kv_head: Index of this rank's first KV head among all.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int = 0
    name: str = ""
    all_kv_heads: int = 0
    first_kv_head: int = 0


class Services(Protocol):
    """Model access for ``Selector.bind``, without the model object itself."""

    @property
    def spec(self) -> ModelSpec:
        """Shapes of the model."""

    def rope(
        self, keys: torch.Tensor, positions: torch.Tensor, *, inverse: bool = False
    ) -> torch.Tensor:
        """Rotate [H, T, D] at positions [T] or [H, T]; float32 in and out."""

    def output_weight(self, layer: int) -> torch.Tensor:
        """Return W_O of one layer, [Hq, D, d], in the model's dtype."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text`` without special tokens."""


@dataclass(frozen=True, slots=True)
class QueryTail:
    """The last queries of a prompt in one layer, with their positions.

    Attributes:
        rows: [Hq, w', D] post-RoPE, the dtype of the model; row i is the query of
            position ``end - w' + i``. 1 <= w' <= ``Needs.q_tail``: fewer if the prompt
            is shorter, or if its tokens were prefix-cache hits.
        end: Prompt tokens, including those of the last, partial page: >= T.
    """

    rows: torch.Tensor
    end: int

    @property
    def start(self) -> int:
        """Position of the first row, in tokens."""
        return self.end - self.rows.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """New tokens of one request in one layer, during a forward.

    Attributes:
        rid: Id of an open request.
        layer: Layer index in [0, L).
        start: Position of the first of the n tokens; None for decoded tokens, whose
            position the host may not know yet. Each chunk of a prefill starts at the
            end of the previous chunk; any other start restarts the request. Prefix-
            cache hits are not run.
        queries: [Hq, n, D] post-RoPE; promised only with ``Needs.q_stream``.
        hidden: [n, d] inputs of the attention module, behind the input norm (not the
            residual stream); None unless ``Needs.hidden``.
    """

    rid: str
    layer: int
    start: int | None
    queries: torch.Tensor | None = None
    hidden: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Tokens to run after a prompt, over its KV, which is not modified.

    Attributes:
        tokens: Token ids; the first is at position ``len(prompt)``.
        start: First prompt token that the probe scores.
        stop: End of the scored tokens, exclusive.
    """

    tokens: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLayer:
    """Attention inputs of one layer during a probe of n tokens.

    Attributes:
        layer: Layer index.
        queries: [Hq, n, D] post-RoPE, of the probe.
        probe_keys: [H, n, D] post-RoPE, of the probe; query i sees keys 0 to i.
        keys: [H, T, D] post-RoPE, of the prompt, all T tokens.
        values: [H, T, D], as ``keys``.
        hidden: [n, d] attention inputs of the probe; None unless ``Needs.hidden``.
    """

    layer: int
    queries: torch.Tensor
    probe_keys: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    hidden: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Data collected for a prompt in one layer, for ``scores``.

    Attributes:
        tail: The last queries; None unless ``Needs.q_tail`` asks for them.
        noted: [H, T] scores that ``update`` returned, float32, NaN for tokens without
            a score; None if it returned none.
    """

    tail: QueryTail | None = None
    noted: torch.Tensor | None = None


NOTHING = Seen()


class Selector(ABC):
    """Scores prompt tokens per layer and KV head; tokens with high scores are kept.

    Shapes: H = KV heads and Hq = query heads on this rank, D = head dim, T = prompt
    tokens offered: the whole pages of the prompt, positions 0 to T - 1.

    A selector never accesses the cache, a stream or a request. Scores may have any
    value, NaN included: the runtime turns them into indices, and its output is exact
    whatever they are (``vericache_sglang.compression.budget``).

    Calls for one request: ``open``; ``update`` and ``observe`` according to ``needs``;
    ``scores`` once per layer; ``close``, at any time.

    Args:
        seed: ``VeriCacheConfig.seed``; ignored by deterministic methods.
    """

    needs: ClassVar[Needs] = Needs()
    about: ClassVar[About] = UNKNOWN
    version: ClassVar[int] = 1

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def bind(self, services: Services) -> None:
        """Bind to the model, once, before any request; default: no-op.

        Raises:
            CompressionError: The method or its calibration file does not fit the
                model; the message names both.
        """

    def open(self, rid: str) -> None:
        """Start a request; default: no state per request."""

    def close(self, rid: str) -> None:
        """Drop a request's state, if any; default: no state per request."""

    def update(self, step: Step) -> torch.Tensor | None:
        """Process new tokens; called only if ``q_stream`` or ``hidden`` is set.

        Args:
            step: The tokens; implementations must copy its tensors, not store them.

        Returns:
            [H, n] scores that depend on each token alone: the runtime stores them with
            the token's KV, also in the prefix cache, and passes them to ``scores``.
            None if scores depend on several tokens; the selector then holds its own
            state.
        """
        return None

    def probes(self, rid: str, prompt: Sequence[int]) -> Sequence[Probe]:
        """Return the probes to run before ``scores``; called only if ``Needs.probes``.

        Args:
            rid: Id of an open request.
            prompt: Token ids of the whole prompt.
        """
        return ()

    def observe(self, rid: str, probe: Probe, layer: ProbeLayer) -> None:
        """Process one layer of one probe; called for every layer in order."""

    @property
    def follows_keep(self) -> bool:
        """Whether ``keep_share`` is None for every prompt."""
        return type(self).keep_share is Selector.keep_share

    def keep_share(self, noted: Sequence[torch.Tensor]) -> float | None:
        """Return the share of a prompt's tokens to keep; None: as configured.

        For methods with a threshold instead of a share.

        Args:
            noted: Per layer, ``Seen.noted``; empty where ``update`` returned nothing.

        Returns:
            In (0, 1], or None.
        """
        return None

    @abstractmethod
    def scores(
        self,
        rid: str,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: Seen,
    ) -> torch.Tensor:
        """Score the prompt tokens of one layer.

        Args:
            rid: Id of an open request.
            layer: Layer index in [0, L).
            keys: [H, T, D] post-RoPE keys, any float dtype; not modified.
            values: [H, T, D], as ``keys``.
            seen: Data collected for ``needs``; not modified.

        Returns:
            [H, T], any float dtype, on the device of ``keys``.
        """


SELECTORS: Registry[Callable[..., Selector]] = Registry("compressor")
"""Factories by name; called with ``VeriCacheConfig.seed`` and a method's options."""
