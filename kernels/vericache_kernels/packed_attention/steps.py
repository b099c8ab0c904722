"""How a codec's fields become keys and values in the kernel: one record a codec."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

MOST_TILE = 32
"""Tokens decoded at a time; 64 do not fit the registers of 4 warps at D = 128."""
LEAST_TILE = 16
"""Fewest rows that the tensor cores multiply."""


@dataclass(frozen=True)
class DecodeStep(ABC):
    """The parameters of one codec's decoding, fixed when the kernel is compiled.

    Attributes:
        name: Of the file ``triton_<name>.py`` that has the device functions.
        fields: Names of the draft part's fields, keys before values; their order is
            that of ``PackedRows.offsets``.
        wants: Optional fields of ``PackedRows`` that must be given.
        registers: Most a thread may use; 168 lets 3 programs of 4 warps share a
            multiprocessor. Unasked, the assembler spills to make room for more.
    """

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    wants: ClassVar[tuple[str, ...]] = ()
    registers: ClassVar[int] = 168

    @property
    @abstractmethod
    def numbers(self) -> tuple[int, ...]:
        """What the device functions get as ``STEP``."""

    @property
    def tile(self) -> int:
        """Tokens decoded at a time, a power of two."""
        return MOST_TILE

    def check(self, kv_heads: int, dim: int) -> None:
        """Refuse shapes that cannot be decoded.

        Raises:
            ValueError: Naming the parameter.
        """
        _ = self.tile

    def _tile_of(self, group: int) -> int:
        """Return the largest tile that lies in one group of tokens.

        Raises:
            ValueError: There is none.
        """
        tile = math.gcd(group, MOST_TILE)
        if tile < LEAST_TILE:
            raise ValueError(
                f"{self.name}: the kernel needs groups of a multiple of {LEAST_TILE} "
                f"tokens, got {group}"
            )
        return tile


@dataclass(frozen=True)
class DecodedStep(DecodeStep):
    """A codec without a step of its own, whose segments were decoded before.

    The fields are what ``Codec.decode`` returns: keys and values, [H, t, D].
    """

    name: ClassVar[str] = "decoded"
    fields: ClassVar[tuple[str, ...]] = ("keys", "values")

    @property
    def numbers(self) -> tuple[int, ...]:
        """See ``DecodeStep.numbers``."""
        return ()


@dataclass(frozen=True)
class SplitPlanesStep(DecodeStep):
    """Codec ``split-planes``: sign, distance to a shared exponent, top mantissa.

    Attributes:
        exponent_bits: E.
        mantissa_bits: M; a code has 1 + E + M <= 8 bits.
        block: Tokens of a channel that share an exponent, a multiple of 16.
    """

    name: ClassVar[str] = "split_planes"
    fields: ClassVar[tuple[str, ...]] = (
        *("key_codes", "key_shared"),
        *("value_codes", "value_shared"),
    )

    exponent_bits: int
    mantissa_bits: int
    block: int = 64

    @property
    def numbers(self) -> tuple[int, ...]:
        """See ``DecodeStep.numbers``."""
        return self.exponent_bits, self.mantissa_bits, self.block

    @property
    def tile(self) -> int:
        """See ``DecodeStep.tile``: the keys of a tile share their exponents."""
        return self._tile_of(self.block)


@dataclass(frozen=True)
class KIVIStep(DecodeStep):
    """Codec ``kivi`` without a window: its exact tail belongs to the exact slots.

    Segments are whole groups, as the codec asks.

    Attributes:
        bits: Width of a code, 2 to 8.
        group: Tokens (keys) or channels (values) that share step and minimum, a power
            of two from 16 that divides D.
    """

    name: ClassVar[str] = "kivi"
    fields: ClassVar[tuple[str, ...]] = (
        *("key_codes", "key_step", "key_minimum"),
        *("value_codes", "value_step", "value_minimum"),
    )

    bits: int
    group: int = 32

    @property
    def numbers(self) -> tuple[int, ...]:
        """See ``DecodeStep.numbers``."""
        return self.bits, self.group

    @property
    def tile(self) -> int:
        """See ``DecodeStep.tile``: the keys of a tile share steps and minima."""
        return self._tile_of(self.group)

    def check(self, kv_heads: int, dim: int) -> None:
        """See ``DecodeStep.check``."""
        super().check(kv_heads, dim)
        if self.group & (self.group - 1) or dim % self.group:
            raise ValueError(
                f"kivi: group must be a power of two that divides D = {dim}, "
                f"got {self.group}"
            )


@dataclass(frozen=True)
class KVQuantStep(DecodeStep):
    """Codec ``kvquant``; its sinks belong to the exact slots, its parts have none.

    ``PackedRows.tables`` is, of the layer: offsets [C] and reaches [C] of the key
    channels, then the books of keys and of values, [2**bits] each; C = H * D.

    Attributes:
        bits: Width of a code, 2 to 8.
        places: Numbers that a row of C keeps exactly; each costs a comparison for
            every number of the row.
    """

    name: ClassVar[str] = "kvquant"
    fields: ClassVar[tuple[str, ...]] = (
        *("key_codes", "key_columns", "key_exact"),
        *("value_codes", "value_columns", "value_exact"),
        *("value_offset", "value_reach"),
    )
    wants: ClassVar[tuple[str, ...]] = ("positions", "places", "tables", "rope")
    registers: ClassVar[int] = 255

    bits: int
    places: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """See ``DecodeStep.numbers``."""
        return self.bits, self.places


@dataclass(frozen=True)
class RotateKVStep(DecodeStep):
    """Codec ``rotatekv``; its sinks belong to the exact slots, its parts have none.

    ``PackedRows.order`` is, of the layer, the place in a row of codes where each
    rotated key channel is: the inverse of ``RotateKVTables.order[layer]``.

    Attributes:
        bits: Width of a code, 2 to 8.
        group: Channels that share step and zero point; divides C.
        rotated_heads: KV heads whose keys were rotated together, a power of two that
            divides H. Each program decodes the keys of all of them.
    """

    name: ClassVar[str] = "rotatekv"
    fields: ClassVar[tuple[str, ...]] = (
        *("key_codes", "key_step", "key_zero"),
        *("value_codes", "value_step", "value_zero"),
    )
    wants: ClassVar[tuple[str, ...]] = ("positions", "places", "order", "rope")
    registers: ClassVar[int] = 255

    bits: int
    group: int = 128
    rotated_heads: int = 4

    @property
    def numbers(self) -> tuple[int, ...]:
        """See ``DecodeStep.numbers``."""
        return self.bits, self.group, self.rotated_heads

    @property
    def tile(self) -> int:
        """See ``DecodeStep.tile``: the matrix of the rotation takes registers too."""
        return MOST_TILE // 2

    def check(self, kv_heads: int, dim: int) -> None:
        """See ``DecodeStep.check``."""
        super().check(kv_heads, dim)
        heads = self.rotated_heads
        if heads & (heads - 1) or kv_heads % heads or kv_heads * dim % self.group:
            raise ValueError(
                f"rotatekv: {heads} rotated heads or groups of {self.group} do not "
                f"divide {kv_heads} heads of {dim}"
            )
