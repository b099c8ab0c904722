"""Split planes: high bits are the draft KV, low bits the residual; both restore it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch.nn import functional

from vericache_sglang.compression.about import About
from vericache_sglang.compression.codecs.base import (
    CODECS,
    Codec,
    CodecNeeds,
    Layout,
    PartShape,
    PartSpec,
    Source,
    Tensors,
)
from vericache_sglang.compression.codecs.floats import (
    FORMATS,
    FloatFormat,
    Numbers,
    put_together,
    take_apart,
)
from vericache_sglang.compression.codecs.packing import (
    pack,
    pack_wide,
    packed_bytes,
    unpack,
    unpack_wide,
)
from vericache_sglang.errors import CompressionError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Plane(NamedTuple):
    """Fields of keys or values in the draft KV, [H, T, D] integers.

    Attributes:
        sign: 0 or 1.
        exponent: Biased; undefined where escaped.
        top: The highest mantissa bits.
        escaped: bool, true where the residual has the exponent.
    """

    sign: torch.Tensor
    exponent: torch.Tensor
    top: torch.Tensor
    escaped: torch.Tensor


class Side(NamedTuple):
    """Fields of keys or values [H, T, D], integers of the numbers' size.

    Attributes:
        sign: 0 or 1.
        exponent: Biased.
        mantissa: Without the leading one.
        shared: Largest finite exponents: [H, blocks, D] of keys, [H, T] of values.
        distance: From the shared exponent.
        escaped: bool, true where ``distance`` exceeds the range of a code.
    """

    sign: torch.Tensor
    exponent: torch.Tensor
    mantissa: torch.Tensor
    shared: torch.Tensor
    distance: torch.Tensor
    escaped: torch.Tensor


@CODECS.register("split-planes")
@dataclass(frozen=True)
class SplitPlanes(Codec):
    """An exact recoding of the KV into a draft plane and a residual plane.

    A block shares the largest exponent of its finite numbers: ``block`` tokens of one
    channel for keys, whose channels differ in size; one token of one head for values.
    A number becomes, from the top bit: sign, ``exponent_bits`` of distance to the
    shared exponent, ``mantissa_bits`` of mantissa. The largest distance is an escape:
    the number is too small for the code, infinite or NaN. The residual holds the other
    mantissa bits of every number and the exponents of the escaped ones, in the order
    of [H, T, D], keys first; the draft plane says where they belong, so they need no
    index. The shared exponents are the only overhead in bits.

    A code decodes to the middle of the numbers that share it: the error of a normal
    number is at most ``2**-(mantissa_bits + 1)`` of its power of two. An escaped number
    decodes to zero of its sign, and a subnormal one is truncated, so zeros stay zeros.
    Draft KV is always finite.

    Attributes:
        exponent_bits: E, 1 to 7.
        mantissa_bits: M, >= 0, with 1 + E + M <= 8.
        block: Tokens of a channel that share an exponent, >= 1; the last block of a
            part may be shorter.

    Raises:
        CompressionError: A parameter is out of its bounds.
    """

    name: ClassVar[str] = "split-planes"
    about: ClassVar[About] = About(
        paper="ours, no paper",
        kind="split",
        licence="ours",
    )

    exponent_bits: int = 4
    mantissa_bits: int = 3
    block: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.exponent_bits <= 7:
            raise CompressionError(
                f"{self.name}: exponent_bits must be 1 to 7, got {self.exponent_bits}"
            )
        if not 0 <= self.mantissa_bits <= 7 - self.exponent_bits:
            raise CompressionError(
                f"{self.name}: mantissa_bits must be 0 to {7 - self.exponent_bits} "
                f"beside {self.exponent_bits} exponent bits, got {self.mantissa_bits}"
            )
        if self.block < 1:
            raise CompressionError(
                f"{self.name}: block must be >= 1 token, got {self.block}"
            )

    @property
    def needs(self) -> CodecNeeds:
        """See ``Codec.needs``: blocks start at multiples of ``block`` tokens."""
        return CodecNeeds(token_align=self.block)

    def draft_layout(self, part_shape: PartShape) -> Layout:
        """See ``Codec.draft_layout``; depends on the shape alone.

        A token's codes fill whole bytes, as a pool of slots requires.
        """
        rows = (part_shape.heads, part_shape.tokens)
        blocks = -(-part_shape.tokens // self.block)
        width = FORMATS[part_shape.dtype].exponent
        shapes = {
            "key_codes": (*rows, packed_bytes(part_shape.key_dim, self._code_bits)),
            "key_shared": (
                part_shape.heads,
                blocks,
                packed_bytes(part_shape.key_dim, width),
            ),
            "value_codes": (*rows, packed_bytes(part_shape.value_dim, self._code_bits)),
            "value_shared": (part_shape.heads, packed_bytes(part_shape.tokens, width)),
        }
        return {field: (torch.uint8, shape) for field, shape in shapes.items()}

    def residual_layout(self, part_shape: PartShape) -> Layout:
        """See ``Codec.residual_layout``; grows with ``part_shape.escapes``."""
        rows = (part_shape.heads, part_shape.tokens)
        form = FORMATS[part_shape.dtype]
        rest = form.mantissa - self.mantissa_bits
        shapes: dict[str, tuple[int, ...]] = {
            "key_rest": (*rows, packed_bytes(part_shape.key_dim, rest)),
            "value_rest": (*rows, packed_bytes(part_shape.value_dim, rest)),
            "escapes": (packed_bytes(part_shape.escapes, form.exponent),),
        }
        return {field: (torch.uint8, shape) for field, shape in shapes.items()}

    @property
    def _code_bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def _escape(self) -> int:
        return (1 << self.exponent_bits) - 1

    def _encode(self, source: Source) -> tuple[PartShape, Tensors, Tensors]:
        form = FORMATS[source.part_shape.dtype]
        draft, residual, escapes = {}, {}, []
        for field, side in self.sides(source.keys, source.values):
            draft.update(self._high(field, side, form))
            residual[f"{field}_rest"] = self.low_bits(side, form)
            escapes.append(side.exponent[side.escaped].to(torch.uint8))
        exponents = torch.cat(escapes)
        residual["escapes"] = pack(exponents, form.exponent)
        part_shape = dataclasses.replace(source.part_shape, escapes=exponents.numel())
        return part_shape, draft, residual

    def _encode_draft(self, source: Source) -> tuple[PartShape, Tensors]:
        form, draft = FORMATS[source.part_shape.dtype], {}
        for field, side in self.sides(source.keys, source.values):
            draft.update(self._high(field, side, form))
        return source.part_shape, draft

    def sides(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> Iterator[tuple[str, Side]]:
        """Yield the fields of keys, then of values [H, T, D]."""
        form = FORMATS[keys.dtype]
        for field, entries in (("key", keys), ("value", values)):
            numbers = take_apart(entries)
            finite = numbers.exponent.where(numbers.exponent != form.non_finite, 0)
            if field == "key":
                shared = self._key_blocks(finite).amax(2)
                over = self._over_tokens(shared, entries.shape[1])
            else:
                shared = finite.amax(2)
                over = shared[..., None]
            distance = over - numbers.exponent
            escaped = (distance < 0) | (distance >= self._escape)
            yield field, Side(*numbers, shared, distance, escaped)

    def _high(
        self, field: str, side: Side, form: FloatFormat
    ) -> dict[str, torch.Tensor]:
        """Return the draft KV's tensors of keys or of values."""
        codes = side.sign << self.exponent_bits
        codes |= side.distance.masked_fill(side.escaped, self._escape)
        codes <<= self.mantissa_bits
        codes |= side.mantissa >> form.mantissa - self.mantissa_bits
        return {
            f"{field}_shared": pack(side.shared.to(torch.uint8), form.exponent),
            f"{field}_codes": pack(codes.to(torch.uint8), self._code_bits),
        }

    def low_bits(self, side: Side, form: FloatFormat) -> torch.Tensor:
        """Return the mantissa bits [H, T, *] uint8 that the codes leave out."""
        rest = form.mantissa - self.mantissa_bits
        return pack_wide(side.mantissa & (1 << rest) - 1, rest)

    def _decode(self, draft: PartSpec) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._shared(draft)
        # A check would need a host sync.
        on_host = not keys.is_cuda
        if on_host and min(int(keys.min()), int(values.min())) >= self._escape:
            return self._decode_normal(draft, keys, values)
        form = FORMATS[draft.part_shape.dtype]
        rest = form.mantissa - self.mantissa_bits
        results = []
        for plane in self._planes(draft):
            exponent = plane.exponent.masked_fill(plane.escaped, 0)
            mantissa = (plane.top << rest).masked_fill(plane.escaped, 0)
            mantissa |= (exponent > 0).to(form.integer) << rest - 1
            numbers = Numbers(plane.sign, exponent, mantissa)
            results.append(put_together(numbers, draft.part_shape.dtype))
        return results[0], results[1]

    def _decode_normal(
        self, draft: PartSpec, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode a part without subnormal numbers: a table of codes times a power of 2.

        Exact, hence bit-identical to the general path, in half the time.

        Args:
            keys: [H, blocks, D] shared exponents of the keys, each at least the escape.
            values: [H, T] shared exponents of the values, likewise.
        """
        part_shape, tensors = draft.part_shape, draft.tensors
        powers = self._over_tokens(_powers(keys, part_shape.dtype), part_shape.tokens)
        fields = (
            ("key_codes", part_shape.key_dim, powers),
            (
                "value_codes",
                part_shape.value_dim,
                _powers(values, part_shape.dtype)[..., None],
            ),
        )
        table = self._factors()
        results = []
        for field, dim, scale in fields:
            codes = unpack(tensors[field], self._code_bits, dim)
            factors = table.index_select(0, codes.to(torch.int32).flatten())
            results.append((factors.view(codes.shape) * scale).to(part_shape.dtype))
        return results[0], results[1]

    def _factors(self) -> torch.Tensor:
        """Return the value of each code, relative to the block's power of two."""
        codes = torch.arange(1 << self._code_bits)
        distance = codes >> self.mantissa_bits & self._escape
        top = (codes & (1 << self.mantissa_bits) - 1) + 0.5
        size = (1 + top / 2**self.mantissa_bits) * 2.0**-distance
        size = size.masked_fill(distance == self._escape, 0.0)
        sign = 1 - 2 * (codes >> self._code_bits - 1)
        factors: torch.Tensor = sign * size
        return factors.to(torch.float32)

    def _join(
        self, draft: PartSpec, residual: PartSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        part_shape, tensors = draft.part_shape, residual.tensors
        form = FORMATS[part_shape.dtype]
        rest = form.mantissa - self.mantissa_bits
        planes = self._planes(draft)
        counts = [int(plane.escaped.count_nonzero()) for plane in planes]
        if sum(counts) != part_shape.escapes:
            raise CompressionError(
                f"{self.name} draft: field 'key_codes' or 'value_codes' has "
                f"{sum(counts)} escapes, the residual lists {part_shape.escapes}"
            )
        exponents = unpack(tensors["escapes"], form.exponent, part_shape.escapes)
        results = []
        for field, plane, listed in zip(
            ("key", "value"), planes, exponents.split(counts), strict=True
        ):
            exponent = plane.exponent.masked_scatter(
                plane.escaped, listed.to(form.integer)
            )
            low = unpack_wide(
                tensors[f"{field}_rest"], rest, exponent.shape[2], form.integer
            )
            numbers = Numbers(plane.sign, exponent, plane.top << rest | low)
            results.append(put_together(numbers, part_shape.dtype))
        return results[0], results[1]

    def _planes(self, draft: PartSpec) -> tuple[Plane, Plane]:
        """Read the draft KV: keys, then values."""
        part_shape, tensors = draft.part_shape, draft.tensors
        form = FORMATS[part_shape.dtype]
        key_shared, value_shared = self._shared(draft)
        keys = self._over_tokens(key_shared, part_shape.tokens).to(form.integer)
        values = value_shared[..., None].to(form.integer)
        return (
            self._plane(tensors["key_codes"], keys, part_shape.key_dim),
            self._plane(tensors["value_codes"], values, part_shape.value_dim),
        )

    def _shared(self, draft: PartSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the shared exponents: of keys [H, blocks, D], of values [H, T]."""
        part_shape, tensors = draft.part_shape, draft.tensors
        width = FORMATS[part_shape.dtype].exponent
        return (
            unpack(tensors["key_shared"], width, part_shape.key_dim),
            unpack(tensors["value_shared"], width, part_shape.tokens),
        )

    def _plane(self, packed: torch.Tensor, shared: torch.Tensor, dim: int) -> Plane:
        """Decode codes [H, T, bytes] with shared exponents that broadcast to them."""
        codes = unpack(packed, self._code_bits, dim).to(shared.dtype)
        distance = codes >> self.mantissa_bits & self._escape
        return Plane(
            sign=codes >> self._code_bits - 1,
            exponent=shared - distance,
            top=codes & (1 << self.mantissa_bits) - 1,
            escaped=distance == self._escape,
        )

    def _key_blocks(self, exponents: torch.Tensor) -> torch.Tensor:
        """Split [H, T, D] into [H, blocks, block, D], the last block zero-padded."""
        heads, tokens, dim = exponents.shape
        blocks = -(-tokens // self.block)
        missing = blocks * self.block - tokens
        filled = functional.pad(exponents, (0, 0, 0, missing))
        return filled.view(heads, blocks, self.block, dim)

    def _over_tokens(self, shared: torch.Tensor, tokens: int) -> torch.Tensor:
        """Repeat [H, blocks, D] for every token of a block: [H, T, D]."""
        wide: torch.Tensor = shared.repeat_interleave(self.block, dim=1)
        return wide[:, :tokens]


def _powers(shared: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 2 to the shared exponents, float32.

    Args:
        shared: Biased as in ``dtype``, above 0.
    """
    above = 127 - (1 << FORMATS[dtype].exponent - 1) + 1
    bits = (shared.to(torch.int32) + above) << 23
    powers: torch.Tensor = bits.view(torch.float32)
    return powers
