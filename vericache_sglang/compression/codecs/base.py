"""The interface of a codec: encodes a layer's KV as draft KV and residual KV."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from vericache_sglang.compression.about import UNKNOWN, About
from vericache_sglang.errors import CompressionError
from vericache_sglang.registry import Registry

if TYPE_CHECKING:
    from vericache_sglang.compression.base import ModelSpec

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of every tensor of a part, by field name."""

Tensors = Mapping[str, torch.Tensor]
"""Tensors of a part, by field name."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of KV that codecs take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecNeeds:
    """Inputs that a codec needs from the runtime; static, read once at boot.

    Attributes:
        artifact: Kind of calibration file the codec is built from; "": none.
        rope: ``bind`` must be called with the model's rotary embedding, and ``encode``
            with the positions of the keys.
        resid_in: ``encode`` needs ``sinks`` found in the layer's input.
        token_align: A prompt cut at multiples of this many tokens is encoded the same,
            wherever it is cut.
    """

    artifact: str = ""
    rope: bool = False
    resid_in: bool = False
    token_align: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PartShape:
    """The parameters that determine the size of a part.

    Attributes:
        heads: H, KV heads.
        tokens: T, slots of each head, >= 1.
        key_dim: D, elements of one key.
        value_dim: Dv, elements of one value.
        dtype: Dtype of the KV: bfloat16, float16 or float32.
        exact_tokens: Number of slots with exact keys and values in the draft KV.
        escapes: Number of exponents listed in the residual (``split-planes``).
    """

    heads: int
    tokens: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    exact_tokens: int = 0
    escapes: int = 0

    @property
    def elements(self) -> int:
        """Elements of keys and values together."""
        return self.heads * self.tokens * (self.key_dim + self.value_dim)

    @property
    def raw_bytes(self) -> int:
        """Bytes of the keys and values before encoding."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class PartSpec:
    """The draft KV or the residual of one layer; opaque to the runtime.

    Attributes:
        codec: ``Codec.identity`` of the codec that wrote it.
        part_shape: Shape of the encoded KV.
        layer: Layer index.
        positions: As given to ``encode``. The runtime owns them: not in ``nbytes``.
        tensors: By field name, as in ``Codec.draft_layout`` or ``residual_layout``.
    """

    codec: str
    part_shape: PartShape
    layer: int
    positions: torch.Tensor | None
    tensors: Mapping[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def bits(self) -> float:
        """Measured bits per element of the KV, every overhead included."""
        return 8 * self.nbytes / self.part_shape.elements


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The checked arguments of one call of ``Codec.encode``."""

    part_shape: PartShape
    keys: torch.Tensor
    values: torch.Tensor
    layer: int
    positions: torch.Tensor | None
    sinks: torch.Tensor | None


class Rotation(Protocol):
    """The model's rotary embedding, as a function."""

    def __call__(
        self, keys: torch.Tensor, positions: torch.Tensor, *, inverse: bool = False
    ) -> torch.Tensor:
        """Rotate keys [H, T, D] at positions [T] or [H, T]; float32 in and out."""


class Codec(ABC):
    """Encodes one layer's KV as draft KV and residual, and restores it.

    Shapes: H = KV heads, T = tokens (slots), D and Dv = head dims of keys and values.
    The draft KV alone decodes to an approximation; with the residual the KV is restored
    bit for bit. A codec is a frozen dataclass of its parameters and keeps no state.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    about: ClassVar[About] = UNKNOWN

    @property
    def identity(self) -> str:
        """Name, version and parameters; codecs of equal identity share parts."""
        given = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if field.metadata.get("identity", True)
        ]
        return f"{self.name}@{self.version}({','.join(given)})"

    @property
    def needs(self) -> CodecNeeds:
        """Inputs the runtime must supply; default: none."""
        return CodecNeeds()

    @property
    def splits(self) -> bool:
        """Whether the residual holds only what the draft KV lacks, not the full KV."""
        return type(self)._join is not Codec._join

    def bind(self, rope: Rotation) -> Codec:
        """Return the codec with the model's rotary embedding; default: itself."""
        return self

    def of_heads(self, first: int, heads: int, all_heads: int) -> Codec:
        """Return the codec for the KV heads of one rank.

        Default: itself, for codecs without per-head tables.

        Args:
            first: Index of the rank's first head, in [0, ``all_heads``).
            heads: Number of consecutive heads.
            all_heads: KV heads of the model.
        """
        return self

    def check_model(self, spec: ModelSpec) -> None:
        """Refuse a model other than the calibrated one; default: no calibration file.

        Args:
            spec: The served model, over all ranks.

        Raises:
            CompressionError: The models differ; the message names file and difference.
        """

    def without_tail(self) -> Codec:
        """Return the codec without exact recent tokens; the caller keeps those itself.

        Any ``token_align`` tokens can then be encoded on their own; default: itself.
        """
        return self

    @abstractmethod
    def draft_layout(self, part_shape: PartShape) -> Layout:
        """Return the fields of the draft KV.

        Raises:
            CompressionError: ``part_shape`` cannot be encoded; the message has the
                reason.
        """

    def residual_layout(self, part_shape: PartShape) -> Layout:
        """Return the fields of the residual; default: the full KV."""
        heads, tokens = part_shape.heads, part_shape.tokens
        return {
            "keys": (part_shape.dtype, (heads, tokens, part_shape.key_dim)),
            "values": (part_shape.dtype, (heads, tokens, part_shape.value_dim)),
        }

    def draft_bits(self, part_shape: PartShape) -> float:
        """Return the bits per element of the draft KV, scales and sinks included."""
        return 8 * _layout_bytes(self.draft_layout(part_shape)) / part_shape.elements

    def transfer_fraction(self, part_shape: PartShape) -> float:
        """Return the residual's bytes over those of the full KV."""
        return _layout_bytes(self.residual_layout(part_shape)) / part_shape.raw_bytes

    def encode(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        layer: int = 0,
        positions: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> tuple[PartSpec, PartSpec]:
        """Encode one layer.

        Args:
            keys: [H, T, D] post-RoPE, a dtype of ``FLOATS``; not modified.
            values: [H, T, Dv], dtype and device of ``keys``; not modified.
            layer: Layer index, for codecs with tables per layer.
            positions: [T] or [H, T] integers, RoPE position of each key; None: unknown,
                refused if ``needs.rope``.
            sinks: [n] integers, slots to keep exact, ascending and unique; None: the
                codec's own rule. Ignored by codecs that have no exact tokens.

        Returns:
            Draft KV and residual. A part may share memory with the given tensors.

        Raises:
            CompressionError: Shapes, dtypes or positions are malformed.
        """
        source = self._source(keys, values, layer, positions, sinks)
        part_shape, draft, residual = self._encode(source)
        return self._part(source, part_shape, draft), self._part(
            source, part_shape, residual
        )

    def encode_draft(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        layer: int = 0,
        positions: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> PartSpec:
        """Encode one layer's draft KV alone, without a host sync.

        The residual is not computed, so ``escapes`` of its ``part_shape`` is 0.

        Args:
            keys: As for ``encode``.
            values: As for ``encode``.
            layer: As for ``encode``.
            positions: As for ``encode``.
            sinks: As for ``encode``; if there are any, or the codec finds its own, the
                host reads their slots.

        Raises:
            CompressionError: See ``encode``.
        """
        source = self._source(keys, values, layer, positions, sinks)
        return self._part(source, *self._encode_draft(source))

    def _source(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer: int,
        positions: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> Source:
        """Check the arguments of ``encode``.

        Raises:
            CompressionError: See ``encode``.
        """
        part_shape = check_kv(keys, values)
        if positions is None:
            if self.needs.rope:
                raise CompressionError(f"{self.name}: positions of the keys are needed")
        elif positions.shape not in (keys.shape[1:2], keys.shape[:2]):
            raise CompressionError(
                f"positions must be [{part_shape.tokens}] or [{part_shape.heads}, "
                f"{part_shape.tokens}], got {tuple(positions.shape)}"
            )
        return Source(part_shape, keys, values, layer, positions, sinks)

    def _part(
        self, source: Source, part_shape: PartShape, tensors: Tensors
    ) -> PartSpec:
        return PartSpec(
            self.identity, part_shape, source.layer, source.positions, tensors
        )

    def decode(self, draft: PartSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode the draft KV alone, an approximation of the KV.

        Returns:
            Keys [H, T, D] post-RoPE and values [H, T, Dv] in the KV's dtype.

        Raises:
            CompressionError: Another codec wrote the part, or a field is malformed.
        """
        self._check("draft", draft, self.draft_layout(draft.part_shape))
        return self._decode(draft)

    def join(
        self, draft: PartSpec, residual: PartSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Restore the KV: every bit, NaN payloads included.

        Returns:
            Keys [H, T, D] and values [H, T, Dv] as they were given to ``encode``.

        Raises:
            CompressionError: Parts of another codec or of different KV, or a field
                of the wrong shape.
        """
        self._check("draft", draft, self.draft_layout(draft.part_shape))
        self._check("residual", residual, self.residual_layout(residual.part_shape))
        if (draft.part_shape, draft.layer) != (residual.part_shape, residual.layer):
            raise CompressionError(
                f"{self.name}: draft of layer {draft.layer}, {draft.part_shape}, and "
                f"residual of layer {residual.layer}, {residual.part_shape}, "
                "do not belong together"
            )
        return self._join(draft, residual)

    @abstractmethod
    def _encode_draft(self, source: Source) -> tuple[PartShape, Tensors]:
        """Return the shape and the fields of the draft KV."""

    def _encode(self, source: Source) -> tuple[PartShape, Tensors, Tensors]:
        """Return the final shape and the fields of draft KV and residual.

        Default: the residual is the full KV.
        """
        whole = {"keys": source.keys, "values": source.values}
        return *self._encode_draft(source), whole

    @abstractmethod
    def _decode(self, draft: PartSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``decode``; the part is checked."""

    def _join(
        self, draft: PartSpec, residual: PartSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``join``; default: the residual is the full KV."""
        return residual.tensors["keys"], residual.tensors["values"]

    def _check(self, kind: str, part: PartSpec, layout: Layout) -> None:
        """Check a part against the layout of its ``part_shape``.

        Raises:
            CompressionError: A field differs; the message names it.
        """
        if part.codec != self.identity:
            raise CompressionError(
                f"{kind} was written by {part.codec}, not by {self.identity}"
            )
        found = {name: (t.dtype, tuple(t.shape)) for name, t in part.tensors.items()}
        for name in sorted(set(layout) | set(found)):
            if layout.get(name) != found.get(name):
                raise CompressionError(
                    f"{self.name} {kind}: field {name!r} should be "
                    f"{layout.get(name, 'absent')}, is {found.get(name, 'absent')}"
                )


CODECS: Registry[Callable[..., Codec]] = Registry("codec")
"""Codec classes by name; keyword arguments are their parameters."""


def _layout_bytes(layout: Layout) -> int:
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in layout.values())


def check_kv(keys: torch.Tensor, values: torch.Tensor) -> PartShape:
    """Check the KV of one layer: see ``Codec.encode``.

    Returns:
        Its shape, without exact tokens and escapes.

    Raises:
        CompressionError: The message names the argument and its expected shape or
            dtype.
    """
    for field, entries in (("keys", keys), ("values", values)):
        if entries.dim() != 3 or 0 in entries.shape:
            raise CompressionError(
                f"{field} must be [heads, tokens, dim], got {tuple(entries.shape)}"
            )
        if entries.dtype not in FLOATS:
            raise CompressionError(
                f"{field} must be bfloat16, float16 or float32, got {entries.dtype}"
            )
    if keys.shape[:2] != values.shape[:2] or keys.dtype != values.dtype:
        raise CompressionError(
            f"values {tuple(values.shape)} {values.dtype} do not go with "
            f"keys {tuple(keys.shape)} {keys.dtype}"
        )
    heads, tokens, key_dim = keys.shape
    return PartShape(
        heads=heads,
        tokens=tokens,
        key_dim=key_dim,
        value_dim=values.shape[2],
        dtype=keys.dtype,
    )
