"""Decode steps of codecs for GPU attention, with their calibration tables."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vericache_kernels.packed_attention import (
    DecodedStep,
    KIVIStep,
    KVQuantStep,
    RotateKVStep,
    SplitPlanesStep,
)
from vericache_sglang.compression.codecs.kivi import KIVI
from vericache_sglang.compression.codecs.kvquant import KVQuant
from vericache_sglang.compression.codecs.rotatekv import RotateKV
from vericache_sglang.compression.codecs.split_planes import SplitPlanes

if TYPE_CHECKING:
    from vericache_kernels.packed_attention import DecodeStep
    from vericache_sglang.compression.codecs.base import Codec, Rotation
    from vericache_sglang.kv.geometry import KVGeometry

logger = logging.getLogger(__name__)

AT_ONCE = 8192
"""Positions that are rotated together."""


@dataclass(frozen=True, slots=True, eq=False)
class CodecStep:
    """A codec's decode step and its device tables; None if the step needs no table.

    Attributes:
        step: Decode step; ``DecodedStep`` if no kernel decodes the codec.
        tables: [L, *] float32, ``PackedRows.tables`` of every layer.
        order: [L, C] int32, ``PackedRows.order`` of every layer.
        rope: [positions, D] float32, ``PackedRows.rope``.
    """

    step: DecodeStep
    tables: torch.Tensor | None = None
    order: torch.Tensor | None = None
    rope: torch.Tensor | None = None


def codec_step(
    codec: Codec, geometry: KVGeometry, positions: int, device: torch.device
) -> CodecStep:
    """Build the decode step of a codec's draft KV; called once at startup.

    Args:
        codec: Bound to the model, without an exact tail.
        geometry: Shapes of the pool.
        positions: Number of positions that keys can have.
        device: Device of the pool.
    """
    try:
        found = _own(codec, geometry, positions, device)
        found.step.check(geometry.kv_heads, geometry.head_dim)
    except ValueError as error:
        logger.warning(
            "VeriCache: torch decodes the codes of %s in every draft: %s",
            codec.name,
            error,
        )
        return CodecStep(DecodedStep())
    return found


def _own(
    codec: Codec, geometry: KVGeometry, positions: int, device: torch.device
) -> CodecStep:
    """Return the codec's own decode step.

    Raises:
        ValueError: The codec has none, or its step does not implement the model's RoPE.
    """
    dim = geometry.head_dim
    if isinstance(codec, KIVI):
        return CodecStep(KIVIStep(codec.bits, codec.group))
    if isinstance(codec, SplitPlanes):
        return CodecStep(
            SplitPlanesStep(codec.exponent_bits, codec.mantissa_bits, codec.block)
        )
    if isinstance(codec, KVQuant):
        places = codec.places(geometry.kv_heads * dim)
        return CodecStep(
            KVQuantStep(codec.tables.bits, places),
            tables=codec.tables.on(device).flat(),
            rope=rope_table(codec.rope, positions, dim, device),
        )
    if isinstance(codec, RotateKV):
        heads = codec.tables.rotated_heads
        order = codec.tables.on(device).order
        return CodecStep(
            RotateKVStep(codec.bits, codec.group, heads),
            order=order.argsort(dim=1).to(torch.int32),
            rope=rope_table(codec.rope, positions, dim, device),
        )
    raise ValueError("no kernel does")


def rope_table(
    rope: Rotation | None, positions: int, dim: int, device: torch.device
) -> torch.Tensor:
    """Tabulate a rotation by applying it to unit vectors.

    Args:
        rope: Rotation of the model.
        positions: Number of positions.
        dim: D.

    Returns:
        [positions, D] float32: cosines, then sines.

    Raises:
        ValueError: There is no rotation, or it is not a rotate-half RoPE over the full
            head dimension.
    """
    if rope is None:
        raise ValueError("the codec is not bound to the model's rotation")
    halves = torch.eye(2, device=device).repeat_interleave(dim // 2, dim=1)
    where = torch.arange(positions, device=device)

    def turned(half: int, at: torch.Tensor) -> torch.Tensor:
        return rope(halves[half].expand(1, len(at), dim), at)[0]

    table = torch.cat([turned(0, part) for part in where.split(AT_ONCE)])
    cosine, sine = table[:AT_ONCE].chunk(2, dim=1)
    if not torch.equal(turned(1, where[:AT_ONCE]), torch.cat([-sine, cosine], dim=1)):
        raise ValueError("RoPE is not of half against half over whole heads")
    return table
