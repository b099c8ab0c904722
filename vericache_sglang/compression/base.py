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
    """What a selector asks of the runtime; static, read once at boot.

    What nobody asks for is neither observed nor kept.

    Attributes:
        keys: Scores are computed from the keys; otherwise ``scores`` gets them but
            promises not to read them.
        q_tail: w, last post-RoPE queries of the prompt that ``scores`` wants, in
            tokens; 0: none, and nothing is collected.
        q_stream: ``update`` is called with the queries of every token that is run.
        hidden: ``update`` is called with the attention inputs of every token run.
        probes: ``probes`` is asked for further forwards over the prompt's KV, and
            ``observe`` shown what they read. Needs the prompt's token ids.
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
        first_kv_head: Number of this rank's first one among them.
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
    """What the runtime hands to ``Selector.bind``; no model object leaks out."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """New tokens of one request in one layer, while a forward runs them.

    Attributes:
        rid: Request id, open.
        layer: Layer index in [0, L).
        start: Position of the first of the n tokens; None of decoded ones, where the
            host may not know it yet. A prefill comes in chunks, each beginning where
            the last one ended; one that begins elsewhere starts anew. Tokens a prefix
            cache answers for are not run.
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
    """Tokens to run behind a prompt, over its KV, which stays as it is.

    Attributes:
        tokens: Token ids; the first stands at position ``len(prompt)``.
        start: First prompt token the probe is to score.
        stop: The one behind the last.
    """

    tokens: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLayer:
    """What one layer read while a probe of n tokens ran.

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
    """What the runtime collected of a prompt in one layer, for ``scores``.

    Attributes:
        tail: The last queries; None unless ``Needs.q_tail`` asks for them.
        noted: [H, T] what ``update`` returned for these tokens, float32, NaN for a
            token nobody scored; None where it returned nothing.
    """

    tail: QueryTail | None = None
    noted: torch.Tensor | None = None


NOTHING = Seen()


class Selector(ABC):
    """Scores prompt tokens per layer and KV head; the higher a score, the longer kept.

    Shapes: H = KV heads and Hq = query heads on this rank, D = head dim, T = prompt
    tokens offered: the whole pages of the prompt, positions 0 to T - 1.

    A selector never touches the cache, a stream or a request; it may return anything,
    NaN included: the runtime turns scores into indices and stays exact whatever they
    are (``vericache_sglang.compression.budget``).

    Calls for one request: ``open``; ``update`` and ``observe`` as its needs say;
    ``scores`` once per layer; ``close``, at any time.

    Args:
        seed: ``VeriCacheConfig.seed``; a method that draws nothing ignores it.
    """

    needs: ClassVar[Needs] = Needs()
    about: ClassVar[About] = UNKNOWN
    version: ClassVar[int] = 1

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def bind(self, services: Services) -> None:
        """Learn the model once, before any request; default: nothing to learn.

        Raises:
            CompressionError: The method does not fit the model, or a calibration file
                does not; the message names both.
        """

    def open(self, rid: str) -> None:
        """Start a request; default: no state per request."""

    def close(self, rid: str) -> None:
        """Forget a request, open or not; default: no state per request."""

    def update(self, step: Step) -> torch.Tensor | None:
        """Take in new tokens; called only where ``q_stream`` or ``hidden`` is set.

        Args:
            step: The tokens; its tensors are copied from, not kept.

        Returns:
            [H, n] scores that depend on each token alone: the runtime keeps them with
            the token's KV, also in the prefix cache, and gives them to ``scores``.
            None where scores need more than one token; the selector keeps what it
            needs itself.
        """
        return None

    def probes(self, rid: str, prompt: Sequence[int]) -> Sequence[Probe]:
        """Return what to run before ``scores``; only where ``Needs.probes``.

        Args:
            rid: Request id, open.
            prompt: Token ids of the whole prompt.
        """
        return ()

    def observe(self, rid: str, probe: Probe, layer: ProbeLayer) -> None:
        """Take in one layer of one probe; called for every layer in order."""

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
            rid: Request id, open.
            layer: Layer index in [0, L).
            keys: [H, T, D] post-RoPE keys, any float dtype; not modified.
            values: [H, T, D], as ``keys``.
            seen: What was collected for ``needs``; not modified.

        Returns:
            [H, T], any float dtype, on the device of ``keys``.
        """


SELECTORS: Registry[Callable[..., Selector]] = Registry("compressor")
"""Factories by name; called with ``VeriCacheConfig.seed`` and a method's options."""
