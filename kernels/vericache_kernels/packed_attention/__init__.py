"""Draft attention over packed codes, decoded block by block inside the kernel.

A row is [coded segments | exact slots]. A segment is the draft KV of a few hundred
tokens; the exact slots hold later tokens, the query tokens last. Every query sees all
coded tokens and the exact slots up to its own.

On the CPU ``attend_packed`` takes segments as functions that return decoded KV, so it
supports every codec. ``packed_attention`` is the Triton kernel, which decodes in its
loop as specified by a ``DecodeStep``. Their results are equal up to rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_kernels.packed_attention.ref import Segment, attend_packed
from vericache_kernels.packed_attention.rows import ExactRows, PackedRows, check_rows
from vericache_kernels.packed_attention.steps import (
    DecodedStep,
    DecodeStep,
    KIVIStep,
    KVQuantStep,
    RotateKVStep,
    SplitPlanesStep,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "DecodeStep",
    "DecodedStep",
    "ExactRows",
    "KIVIStep",
    "KVQuantStep",
    "PackedRows",
    "RotateKVStep",
    "Segment",
    "SplitPlanesStep",
    "attend_packed",
    "packed_attention",
]

SPLITS = 16
"""Default number of programs that share a row and a KV head."""


def packed_attention(
    q: torch.Tensor,
    packed: PackedRows,
    exact: ExactRows,
    step: DecodeStep,
    scaling: float,
    *,
    splits: int = SPLITS,
) -> torch.Tensor:
    """Compute attention of R rows over packed codes and exact slots, on the device.

    Safe in a CUDA graph: the grid is R * H * splits, lengths are read on the device
    and nothing synchronises. Segments and pieces of the exact slots are assigned to
    splits round robin, and a second kernel merges the splits by log-sum-exp. An empty
    row yields zeros. Rows are independent: NaN and infinities affect only the row and
    KV head that hold them. Unlike in ``attend_packed`` they also affect earlier queries
    of a row with several.

    Args:
        q: [R, N, Hq, D] bfloat16, float16 or float32, contiguous; D a power of two
            from 16 to 128.
        packed: The coded segments of the rows.
        exact: The exact slots of the rows; KV heads H divide Hq.
        step: Decode step of the codec.
        scaling: Factor on the scores, usually D ** -0.5.
        splits: Programs that share a row and a KV head, a power of two.

    Returns:
        [R, N, Hq, D], dtype of ``q``. Products are taken in that dtype and summed in
        float32.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or the device is not supported
            by Triton (its interpreter, ``TRITON_INTERPRET=1``, takes CPU tensors).
    """
    check_rows(q, packed, exact, step, splits)
    from vericache_kernels.packed_attention.triton_impl import launch

    return launch(q, packed, exact, step, scaling, splits)
