"""Draft plane and residual plane of ``split-planes`` back to KV, into pool slots.

A number's code (sign, distance to a shared exponent, top mantissa bits) stays on the
device; its other mantissa bits arrive in the residual, with the exponents of numbers
that are too far from the shared one. Put together they are the KV, every bit.
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

    On a GPU two launches, nothing is read on the host and the grid follows from shapes
    and ``target.most_tokens`` alone. The first counts escapes, because the residual
    lists their exponents without saying whose they are; the second joins. A segment
    that shows other than its residual's number of escapes is damaged: the exponents
    that are not there are 0, nothing outside the residual is read, and the result says
    so. On a CPU the reference runs.

    Args:
        draft: Codes and shared exponents.
        residual: What they lack.
        step: Parameters of the codec, as ``packed_attention`` takes them.
        target: Where the entries go; its slots hold no part of ``draft``.

    Returns:
        [S] int32, escapes that each segment's codes show; sound ones equal
        ``residual.escapes``.

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
    """Return the least bytes one call moves: planes once in, entries once out.

    The count of escapes reads the codes again; that is not among them.

    Args:
        step: As for ``join_planes``.
        target: See there; its shapes count.
        tokens: Of all segments.
        segments: S.
        escapes: Of all segments.
    """
    form = FORMATS[target.k_buffer.dtype]
    heads, keys = target.k_buffer.shape[1:]
    values = target.v_buffer.shape[2]
    bits = 1 + form.exponent + form.mantissa
    # Codes and rest have the number's bits but for the exponent's; then the entry.
    number = 1 + step.exponent_bits + form.mantissa + bits
    blocks = max(segments, -(-tokens // step.block))
    shared = heads * (blocks * keys + tokens) * form.exponent
    plane = heads * tokens * (keys + values) * number
    indices = heads * tokens * target.places.element_size() + tokens * 8
    return (plane + shared + escapes * form.exponent) // 8 + indices


def check(
    draft: DraftPlanes, residual: Residuals, step: SplitPlanesStep, target: PlaneTarget
) -> None:
    """Refuse what the kernel would misread; looks at shapes only, never at contents.

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
    """Refuse KV and codes that do not fit each other.

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
