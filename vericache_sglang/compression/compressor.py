"""A compressor: a selector that drops tokens, a codec that packs the rest, or both."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from vericache_sglang.compression.about import About
from vericache_sglang.compression.base import NOTHING, Needs, Selector
from vericache_sglang.compression.budget import (
    Budget,
    budget_for,
    keep_indices,
    residual_indices,
)
from vericache_sglang.compression.codecs.base import Codec, PartSpec
from vericache_sglang.compression.compressed import (
    CompressedKV,
    Entries,
    Residual,
    gathered,
    tokens_of,
)
from vericache_sglang.errors import CompressionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vericache_sglang.compression.base import (
        ModelSpec,
        Probe,
        ProbeLayer,
        Seen,
        Services,
        Step,
    )
    from vericache_sglang.compression.compressed import KV

    Replay = Callable[[Probe], Iterable[ProbeLayer]]

TRIAL = 64
"""Minimum tokens of the trial encoding of a codec."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Compressor:
    """A selector, a codec or both: the value of ``--vericache-compressor``.

    Also usable as a library, with the paper's interface. The order is fixed, because
    dequantized keys would change the ranks of scores: score the exact KV, drop tokens,
    sort the kept ones by position, encode them.

    Scope as in the paper's section 6: (i) all heads of a layer drop equally many
    tokens, at different positions; here all layers do too. (ii) and (iv) one compressor
    serves a process from start to end. (iii) one codec encodes all layers and tokens.
    Unlike in the paper, dropping and encoding combine.

    Shapes: L layers, H KV heads, T prompt tokens, n kept ones, D and Dv head dims.

    Attributes:
        line: The line as the user wrote it.
        selector: Chooses the tokens to keep; None: all are kept.
        codec: Encodes the kept tokens; None: they stay exact.
        selector_identity: Name, version and options of the selector; derived from its
            class if "".
        sink_tokens: First tokens that ``compress`` always keeps; the server passes its
            own setting.
        recent_tokens: Last tokens that ``compress`` always keeps, likewise.

    Raises:
        CompressionError: Both are None, a part has another type, or no scenario fits
            both.
    """

    line: str
    selector: Selector | None = None
    codec: Codec | None = None
    selector_identity: str = ""
    sink_tokens: int = 4
    recent_tokens: int = 32

    def __post_init__(self) -> None:
        for field, kind in (("selector", Selector), ("codec", Codec)):
            part = getattr(self, field)
            if part is not None and not isinstance(part, kind):
                raise CompressionError(
                    f"compressor {self.line!r}: {field} must be a {kind.__name__}, "
                    f"got a {type(part).__name__}"
                )
        if self.selector is None and self.codec is None:
            raise CompressionError(
                f"compressor {self.line!r}: it has neither a selector nor a codec"
            )
        if not self.about.scenarios:
            raise CompressionError(
                f"compressor {self.line!r}: no scenario fits both of its parts"
            )

    @property
    def needs(self) -> Needs:
        """The selector's needs; empty without a selector."""
        return self.selector.needs if self.selector else Needs(keys=False)

    @property
    def token_align(self) -> int:
        """Kept counts are multiples of this many tokens, for selector and codec."""
        codec = self.codec.needs.token_align if self.codec else 1
        return math.lcm(self.needs.token_align, codec)

    @property
    def about(self) -> About:
        """Description of the compressor; of a pair, ``kind`` is the codec's."""
        parts = [part.about for part in (self.selector, self.codec) if part]
        first, last = parts[0], parts[-1]
        if first is last:
            return first
        return About(
            paper="; ".join(filter(None, (first.paper, last.paper))),
            kind=last.kind,
            mode="offline" if "offline" in (first.mode, last.mode) else "online",
            scenarios=tuple(s for s in first.scenarios if s in last.scenarios),
            licence="; ".join(filter(None, (first.licence, last.licence))),
        )

    @property
    def identity(self) -> str:
        """Names, versions and options; equal identities share compressed KV."""
        names = [self.codec.identity] if self.codec else []
        if self.selector:
            kind = type(self.selector)
            seed = getattr(self.selector, "seed", 0)
            made_up = f"{kind.__module__}.{kind.__qualname__}(seed={seed})"
            names.insert(0, self.selector_identity or made_up)
        return "+".join(names)

    def bind(self, services: Services) -> Compressor:
        """Bind to the model, once, before any request; the selector binds in place.

        Args:
            services: Services of the model shard on this rank.

        Returns:
            The compressor with its codec bound to the KV heads of this rank.

        Raises:
            CompressionError: A part does not fit the model.
        """
        codec, spec = self.codec, services.spec
        if codec is not None:
            every = spec.all_kv_heads or spec.kv_heads
            codec.check_model(replace(spec, kv_heads=every))
            codec = codec.of_heads(spec.first_kv_head, spec.kv_heads, every)
            if codec.needs.rope:
                codec = codec.bind(services.rope)
            _try(codec, spec)
        if self.selector is not None:
            self.selector.bind(services)
        return replace(self, codec=codec)

    def open(self, rid: str) -> None:
        """Start a request; see ``Selector.open``."""
        if self.selector is not None:
            self.selector.open(rid)

    def close(self, rid: str) -> None:
        """Drop a request's state, if any; see ``Selector.close``."""
        if self.selector is not None:
            self.selector.close(rid)

    def update(self, step: Step) -> torch.Tensor | None:
        """Process new tokens; arguments and result as ``Selector.update``."""
        return self.selector.update(step) if self.selector else None

    def compress(
        self,
        full_kv: KV,
        keep: float | None = None,
        *,
        rid: str = "",
        token_ids: Sequence[int] = (),
        seen: Sequence[Seen] = (),
        replay: Replay | None = None,
    ) -> CompressedKV:
        """Compress the KV of a prompt into draft KV and residual KV.

        Args:
            full_kv: Per layer, keys [H, T, D] post-RoPE of positions 0 to T - 1 and
                values [H, T, Dv], bfloat16, float16 or float32; not modified.
            keep: Share of tokens to keep, in (0, 1], rounded up to ``token_align``;
                None: the selector's own threshold, or all where there is no selector.
            rid: Open request, updated as ``needs`` require; "": a temporary request
                for this call.
            token_ids: Token ids of the prompt, at least T; required with ``replay``.
            seen: Per layer, the inputs that ``needs`` ask for; empty: none.
            replay: Required if ``needs.probes`` and ``observe`` was not called: runs a
                probe after the prompt and returns each layer's ``observe`` argument,
                in order.

        Raises:
            CompressionError: An argument or the selector's result is malformed.
        """
        tokens = tokens_of(full_kv)
        if seen and len(seen) != len(full_kv):
            raise CompressionError(f"seen: {len(seen)} layers, KV of {len(full_kv)}")
        if not rid:
            self.open(rid)
        try:
            self._probe(rid, token_ids, tokens, replay)
            budget = self._budget(tokens, keep, seen)
            layers = [
                self._layer(rid, i, kv, seen[i] if seen else NOTHING, budget)
                for i, kv in enumerate(full_kv)
            ]
        finally:
            if not rid:
                self.close(rid)
        dropped, payload, residual = zip(*layers, strict=True)
        return CompressedKV(
            identity=self.identity,
            tokens=tokens,
            dropped_indices=dropped,
            payload=payload,
            residual=residual,
        )

    def decompress(self, compressed: CompressedKV, layer: int) -> Entries:
        """Return the kept entries a draft attends to, sorted by position.

        Args:
            compressed: From a compressor of the same identity.
            layer: Layer index.

        Returns:
            Keys [H, n, D] post-RoPE, rotated to their original positions, and values
            [H, n, Dv].

        Raises:
            CompressionError: Written by another compressor, or corrupt.
        """
        self._check(compressed)
        if self.codec is None:
            return compressed.entries(layer)
        return Entries(*self.codec.decode(compressed.parts(layer)[0]))

    def restore(self, compressed: CompressedKV, layer: int) -> Entries:
        """Restore a layer's KV bit for bit.

        Args:
            compressed: From a compressor of the same identity.
            layer: Layer index.

        Returns:
            Keys [H, T, D] and values [H, T, Dv].

        Raises:
            CompressionError: Written by another compressor, or corrupt.
        """
        self._check(compressed)
        if self.codec is None:
            kept = compressed.entries(layer)
        else:
            kept = Entries(*self.codec.join(*compressed.parts(layer)))
        return compressed.whole(layer, kept)

    def _probe(
        self, rid: str, token_ids: Sequence[int], tokens: int, replay: Replay | None
    ) -> None:
        """Run the selector's probes.

        Raises:
            CompressionError: See ``compress``.
        """
        if self.selector is None or not self.needs.probes:
            return
        if replay is None:
            if rid:  # the caller may have called ``observe``
                return
            raise CompressionError(
                f"{self.line}: it runs probes, so compress needs token_ids and replay"
            )
        if len(token_ids) < tokens:
            raise CompressionError(
                f"token_ids must be those of {tokens} tokens, got {len(token_ids)}"
            )
        for probe in self.selector.probes(rid, token_ids):
            for layer in replay(probe):
                self.selector.observe(rid, probe, layer)

    def _budget(self, tokens: int, keep: float | None, seen: Sequence[Seen]) -> Budget:
        """Return the token counts that hold for every layer.

        Raises:
            CompressionError: The kept share is not in (0, 1].
        """
        if self.selector is None:
            if keep not in (None, 1):
                raise CompressionError(
                    f"{self.line}: a codec alone drops nothing, keep must be 1, "
                    f"got {keep}"
                )
            return Budget(tokens, tokens, 0, 0)
        if keep is None:
            noted = [each.noted for each in seen if each.noted is not None]
            keep = self.selector.keep_share(noted)
        if keep is None or not 0 < keep <= 1:
            raise CompressionError(
                f"{self.line}: keep must be a share in (0, 1], got {keep}"
            )
        protected = self.sink_tokens, self.recent_tokens
        return budget_for(tokens, keep, *protected, self.token_align)

    def _layer(
        self,
        rid: str,
        layer: int,
        kv: tuple[torch.Tensor, torch.Tensor],
        seen: Seen,
        budget: Budget,
    ) -> tuple[torch.Tensor, PartSpec | Entries, Residual]:
        """Return dropped indices, draft KV and residual KV of one layer."""
        keys, values = kv
        heads, tokens, _ = keys.shape
        if self.selector is None:
            index = torch.arange(tokens, device=keys.device).expand(heads, -1)
        else:
            scores = self.selector.scores(rid, layer, keys, values, seen)
            if scores.shape != keys.shape[:2]:
                raise CompressionError(
                    f"{self.line}: scores of layer {layer} must be [{heads}, "
                    f"{tokens}], got {tuple(scores.shape)}"
                )
            index = keep_indices(scores, budget)
        away = residual_indices(index, tokens)
        dropped = Entries(gathered(keys, away), gathered(values, away))
        kept = Entries(gathered(keys, index), gathered(values, index))
        payload: PartSpec | Entries = kept
        coded = None
        if self.codec is not None:
            payload, coded = self.codec.encode(*kept, layer=layer, positions=index)
        return away.to(torch.int32), payload, Residual(coded, dropped)

    def _check(self, compressed: CompressedKV) -> None:
        """Refuse KV compressed by another compressor.

        Raises:
            CompressionError: The identities differ; the message names both.
        """
        if compressed.identity != self.identity:
            raise CompressionError(
                f"compressed by {compressed.identity}, not by {self.identity}"
            )


def _try(codec: Codec, spec: ModelSpec) -> None:
    """Refuse at boot a codec that does not fit the model.

    Raises:
        CompressionError: It does not fit; the message names the cause.
    """
    align = codec.needs.token_align
    tokens = -(-TRIAL // align) * align
    zeros = torch.zeros(spec.kv_heads, tokens, spec.head_dim, dtype=torch.bfloat16)
    for layer in sorted({0, spec.layers - 1}):
        where = torch.arange(tokens)
        draft, _ = codec.encode(zeros, zeros, layer=layer, positions=where)
        codec.decode(draft)
