"""Gathers or scatters the KV entries of tokens selected per head.

Row i of head h is token ``index[h, i]``. Entries are copied as integers, so the copy is
bitwise exact, including NaN payloads. ``put_entries`` is the inverse of
``pick_entries``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vericache_kernels.head_entries.ref import pick_rows, put_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["bytes_moved", "pick_entries", "put_entries"]

MOST_SIDES = 2


def pick_entries(
    layer: Sequence[torch.Tensor],
    index: torch.Tensor,
    slots: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Gather entries per head.

    On a GPU this is one launch for keys and values, without synchronisation or bounds
    checks on indices. On a CPU the reference runs.

    Args:
        layer: One or two tensors (keys, values), [T, H, D] each, D may differ; any
            dtype of 1, 2, 4 or 8 bytes, contiguous in D. A pool's buffers with
            ``slots``. On a GPU also page-locked host memory, which the kernel reads
            over the link: no other bytes cross it.
        index: [H, n] int32 or int64 in [0, T), copied if it is not contiguous; on the
            device of the result.
        slots: [tokens] int64, pool slot of each token; ``index`` then refers to tokens.
            None: token i is entry i.

    Returns:
        [n, H, D] for each tensor of ``layer``, contiguous.

    Raises:
        ValueError: Shapes, dtypes, strides or devices do not fit.
    """
    check(layer, index, slots)
    if index.device.type == "cpu":
        return pick_rows(layer, index, slots)
    from vericache_kernels.head_entries.triton_impl import launch

    heads, count = index.shape
    rows = [
        torch.empty(count, heads, side.shape[2], dtype=side.dtype, device=index.device)
        for side in layer
    ]
    launch(layer, index.contiguous(), rows, slots, put=False)
    return rows


def put_entries(
    layer: Sequence[torch.Tensor],
    index: torch.Tensor,
    rows: Sequence[torch.Tensor],
    slots: torch.Tensor | None = None,
) -> None:
    """Scatter entries per head.

    Args:
        layer: See ``pick_entries``, on the device of ``index``; entries selected by
            ``index`` are overwritten.
        index: See ``pick_entries``; unique per head.
        rows: [n, H, D] for each tensor of ``layer``, same dtype; copied if they are not
            contiguous.
        slots: See ``pick_entries``; unique.

    Raises:
        ValueError: Shapes, dtypes, strides or devices do not fit.
    """
    check(layer, index, slots)
    check_rows(layer, index, rows)
    if index.device.type == "cpu":
        put_rows(layer, index, rows, slots)
        return
    from vericache_kernels.head_entries.triton_impl import launch

    dense = [part.contiguous() for part in rows]
    launch(layer, index.contiguous(), dense, slots, put=True)


def bytes_moved(
    layer: Sequence[torch.Tensor],
    index: torch.Tensor,
    slots: torch.Tensor | None = None,
) -> int:
    """Return a lower bound on the bytes of one call: entries in and out, indices.

    Args:
        layer: See ``pick_entries``.
        index: See ``pick_entries``.
        slots: See ``pick_entries``.
    """
    entry = sum(side.shape[2] * side.element_size() for side in layer)
    places = 0 if slots is None else min(len(slots), index.numel()) * slots.itemsize
    return 2 * index.numel() * entry + index.nbytes + places


def check(
    layer: Sequence[torch.Tensor], index: torch.Tensor, slots: torch.Tensor | None
) -> None:
    """Validate shapes, dtypes, strides and devices; does not read tensor contents.

    Raises:
        ValueError: See ``pick_entries``.
    """
    if not 1 <= len(layer) <= MOST_SIDES:
        raise ValueError(f"a layer has one or two sides, got {len(layer)}")
    if index.dim() != 2 or index.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"index must be [H, n] int32 or int64, is {tuple(index.shape)} "
            f"{index.dtype}"
        )
    for side in layer:
        # The stride of a dimension of size 0 or 1 is meaningless.
        spread = side.numel() > 0 and side.shape[-1] > 1 and side.stride(-1) != 1
        if side.dim() != 3 or side.shape[1] != len(index) or spread:
            raise ValueError(
                f"a side must be [T, {len(index)}, D], contiguous in D, is "
                f"{tuple(side.shape)} with strides {side.stride()}"
            )
    apart = [side for side in layer if side.device != index.device]
    if index.is_cuda:
        apart = [s for s in apart if s.device.type != "cpu" or not s.is_pinned()]
    tensors = [index, *apart, *([] if slots is None else [slots])]
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError(f"on several devices: {[str(t.device) for t in tensors]}")


def check_rows(
    layer: Sequence[torch.Tensor], index: torch.Tensor, rows: Sequence[torch.Tensor]
) -> None:
    """Validate rows against a layer and an index that were already validated.

    Raises:
        ValueError: See ``put_entries``.
    """
    if len(rows) != len(layer):
        raise ValueError(f"{len(layer)} sides, rows of {len(rows)}")
    heads, count = index.shape
    for side, part in zip(layer, rows, strict=True):
        wanted = (count, heads, side.shape[2])
        if tuple(part.shape) != wanted:
            raise ValueError(f"rows must be {wanted}, are {tuple(part.shape)}")
        if part.dtype != side.dtype or part.device != side.device:
            raise ValueError(
                f"rows are {part.dtype} on {part.device}, the layer {side.dtype} on "
                f"{side.device}"
            )
