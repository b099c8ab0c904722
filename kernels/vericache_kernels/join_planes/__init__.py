"""Restores KV bitwise from draft and residual planes of ``split-planes``.

A number's code (sign, distance to a shared exponent, top mantissa bits) stays on the
device. The residual holds its other mantissa bits and the exponents of escaped numbers,
which are too far from the shared exponent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_kernels.join_planes.planes import (
    FORMATS,
    DraftPlanes,
    PlaneFormat,
    PlaneTarget,
    Residuals,
)
from vericache_kernels.join_planes.ref import join_rows
from vericache_kernels.packed_attention.steps import SplitPlanesStep

if TYPE_CHECKING:
    import torch

__all__ = [
    "DraftPlanes",
    "PlaneFormat",
    "PlaneTarget",
    "Residuals",
    "SplitPlanesStep",
    "bytes_moved",
    "join_planes",
]


def join_planes(
    draft: DraftPlanes, residual: Residuals, step: SplitPlanesStep, target: PlaneTarget
) -> torch.Tensor:
    """Write the exact entries of all segments of a layer to their slots.

    On a GPU this takes two launches without synchronisation; the grid depends only on
    shapes and ``target.most_tokens``. The first launch counts escapes, because the
    residual lists their exponents without indices; the second writes the entries. A
    segment whose count differs from its residual's is corrupt: missing exponents are
    read as 0, nothing outside the residual is read, and the returned count shows it. On
    a CPU the reference runs.

    Args:
        draft: Codes and shared exponents.
        residual: Remaining mantissa bits and escaped exponents.
        step: Parameters of the codec, as for ``packed_attention``.
        target: Destination of the entries; its slots must not overlap ``draft``.

    Returns:
        [S] int32, escapes in each segment's codes; equal to ``residual.escapes`` if the
        segment is intact.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit; ``step.block`` is no multiple
            of 16 tokens.
    """
    check(draft, residual, step, target)
    if draft.key_bytes.device.type == "cpu":
        return join_rows(draft, residual, step, target)
    from vericache_kernels.join_planes.triton_impl import launch

    return launch(draft, residual, step, target)


def bytes_moved(
    step: SplitPlanesStep, target: PlaneTarget, tokens: int, segments: int, escapes: int
) -> int:
    """Return a lower bound on the bytes of one call: planes in, entries out.

    Excludes the second read of the codes, which counts escapes.

    Args:
        step: As for ``join_planes``.
        target: As for ``join_planes``; only its shapes are used.
        tokens: Tokens of all segments.
        segments: S.
        escapes: Escapes of all segments.
    """
    form = FORMATS[target.k_buffer.dtype]
    heads, keys = target.k_buffer.shape[1:]
    values = target.v_buffer.shape[2]
    bits = 1 + form.exponent + form.mantissa
    # Code and residual bits (all but the exponent's), then the entry.
    number = 1 + step.exponent_bits + form.mantissa + bits
    blocks = max(segments, -(-tokens // step.block))
    shared = heads * (blocks * keys + tokens) * form.exponent
    plane = heads * tokens * (keys + values) * number
    indices = heads * tokens * target.places.element_size() + tokens * 8
    return (plane + shared + escapes * form.exponent) // 8 + indices


def check(
    draft: DraftPlanes, residual: Residuals, step: SplitPlanesStep, target: PlaneTarget
) -> None:
    """Validate shapes, dtypes and devices; does not read tensor contents.

    Raises:
        ValueError: See ``join_planes``.
    """
    _check_numbers(step, target)
    segments = len(draft.tokens)
    wanted = {
        "draft.offsets": (draft.offsets, (segments, len(step.fields))),
        "residual.offsets": (residual.offsets, (segments, 3)),
        "residual.escapes": (residual.escapes, (segments,)),
        "target.first": (target.first, (segments,)),
    }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, is {tuple(tensor.shape)}")
    if target.most_tokens < 1:
        raise ValueError(f"most_tokens must be >= 1, is {target.most_tokens}")
    _ = step.tile  # refuses a block that no tile fits


def _check_numbers(step: SplitPlanesStep, target: PlaneTarget) -> None:
    """Validate that KV dtype and code widths match.

    Raises:
        ValueError: See ``join_planes``.
    """
    if target.k_buffer.dtype not in FORMATS:
        raise ValueError(f"KV is {target.k_buffer.dtype}: one of {list(FORMATS)}")
    if target.v_buffer.dtype != target.k_buffer.dtype:
        raise ValueError(
            f"keys are {target.k_buffer.dtype}, values {target.v_buffer.dtype}"
        )
    mantissa = FORMATS[target.k_buffer.dtype].mantissa
    if not 0 <= step.mantissa_bits < mantissa:
        raise ValueError(f"mantissa_bits {step.mantissa_bits} is not below {mantissa}")
    if 1 + step.exponent_bits + step.mantissa_bits > 8:
        raise ValueError(f"codes of {step} have more than 8 bits")
    heads = target.places.shape[0]
    if not target.places.is_contiguous():
        raise ValueError("target.places must be contiguous")
    for name, side in (("keys", target.k_buffer), ("values", target.v_buffer)):
        dim = side.shape[-1]
        if side.dim() != 3 or side.shape[1] != heads or side.stride(2) != 1:
            raise ValueError(
                f"{name} must be [slots, {heads}, D], contiguous in D, are "
                f"{tuple(side.shape)} with strides {side.stride()}"
            )
        if not 8 <= dim <= 256 or dim & (dim - 1):
            raise ValueError(f"{name}: D must be a power of two, 8 to 256, is {dim}")
