"""Decode steps: compile-time parameters of each codec's decoding in the kernel."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

MOST_TILE = 32
"""Maximum tokens per tile; 64 exceed the registers of 4 warps at D = 128."""
LEAST_TILE = 16
"""Minimum rows of a tensor-core product."""


@dataclass(frozen=True)
class DecodeStep(ABC):
    """The compile-time parameters of one codec's decoding.

    Attributes:
        name: Name of the file ``triton_<name>.py`` with the device functions.
        fields: Names of the draft KV's fields, keys before values, in the order of
            ``PackedRows.offsets``.
        wants: Optional fields of ``PackedRows`` that the step needs.
        registers: Maximum registers per thread; 168 allows 3 programs of 4 warps per
            multiprocessor. Without a limit the assembler spills for more programs.
    """

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    wants: ClassVar[tuple[str, ...]] = ()
    registers: ClassVar[int] = 168

    @property
    @abstractmethod
    def numbers(self) -> tuple[int, ...]:
        """Parameters passed to the device functions as ``STEP``."""

    @property
    def tile(self) -> int:
        """Tokens per tile, a power of two."""
        return MOST_TILE

    def check(self, kv_heads: int, dim: int) -> None:
        """Validate shapes.

        Raises:
            ValueError: A parameter does not fit; the message names it.
        """
        _ = self.tile

    def _tile_of(self, group: int) -> int:
        """Return the largest tile that divides a group of tokens.

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
    """Segments that were decoded before the kernel, for codecs without a step.

    The fields are the result of ``Codec.decode``: keys and values, [H, t, D].
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
    """Codec ``kivi`` without its exact tail, which belongs to the exact slots.

    Segments must be whole groups.

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
    """Codec ``kvquant``; its sinks belong to the exact slots, not to segments.

    ``PackedRows.tables`` of a layer holds the offsets [C] and scales [C] of the key
    channels, then the codebooks of keys and of values, [2**bits] each; C = H * D.

    Attributes:
        bits: Width of a code, 2 to 8.
        places: Numbers that a row of C stores exactly; each costs a comparison per
            number of the row.
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
    """Codec ``rotatekv``; its sinks belong to the exact slots, not to segments.

    ``PackedRows.order`` of a layer is the index of each rotated key channel in a row of
    codes: the inverse of ``RotateKVTables.order[layer]``.

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
        """See ``DecodeStep.tile``; the rotation matrix also needs registers."""
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
