"""Draft attention over packed codes: decoded block by block, never as a whole.

A row is [coded segments | exact slots]. A segment is the draft part of some hundred
tokens; the exact slots hold what was decoded since, the query tokens last. Every query
sees every coded token, and of the exact slots those that do not follow it.

On the CPU ``attend_packed`` takes segments as functions that decode themselves, so it
serves every codec. ``packed_attention`` is the Triton kernel: decoding happens in the
loop, and a ``DecodeStep`` says how. The two agree to rounding.
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
"""Programs that share a row and a KV head where the caller does not say."""


def packed_attention(
    q: torch.Tensor,
    packed: PackedRows,
    exact: ExactRows,
    step: DecodeStep,
    scaling: float,
    *,
    splits: int = SPLITS,
) -> torch.Tensor:
    """Attend queries of many rows to packed codes and exact slots, on the device.

    Safe in a CUDA graph: the grid is R * H * splits, lengths are read on the device
    and nothing waits for the host. Segments and pieces of the exact slots go round
    robin over the splits, whose results a second kernel weighs by log-sum-exp.
    A row with nothing to see gives zeros. A row depends on itself alone: NaN and
    infinities stay in the row and KV head that holds them. Unlike in ``attend_packed``
    they also reach earlier queries of a row with several.

    Args:
        q: [R, N, Hq, D] bfloat16, float16 or float32, contiguous; D a power of two
            from 16 to 128.
        packed: The coded part of the rows.
        exact: The exact part of the rows; KV heads H divide Hq.
        step: How the codec's fields become keys and values.
        scaling: Factor on the scores, usually D ** -0.5.
        splits: Programs that share a row and a KV head, a power of two.

    Returns:
        [R, N, Hq, D], dtype of ``q``. Products are taken in that dtype and summed in
        float32.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or there is no device for
            Triton (its interpreter, ``TRITON_INTERPRET=1``, takes CPU tensors).
    """
    check_rows(q, packed, exact, step, splits)
    from vericache_kernels.packed_attention.triton_impl import launch

    return launch(q, packed, exact, step, scaling, splits)
