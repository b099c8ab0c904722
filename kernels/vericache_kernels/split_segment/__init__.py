"""Splits one layer's prompt KV into draft and residual KV, and restores it.

The kept tokens differ by head. Kept entries are copied to pool slots, the others to a
contiguous block that a single copy moves to the host. Entries are copied as integers,
so the copy is bitwise exact, including NaN payloads. ``join_segment`` is the inverse of
``split_segment``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_kernels.split_segment.cut import Cut
from vericache_kernels.split_segment.ref import join_entries, split_entries

if TYPE_CHECKING:
    import torch

    from vericache_kernels.split_segment.cut import Pair

__all__ = ["Cut", "bytes_moved", "join_segment", "split_segment"]

SLOT_BYTES = 8
"""Bytes of a slot id."""


def split_segment(
    pool: Pair, cut: Cut, target: torch.Tensor, block: Pair, *, in_place: bool = False
) -> None:
    """Copy kept entries to ``target`` and the others to ``block``.

    Head h of slot ``target[i]`` receives token ``cut.kept[h, i]``, row i of head h in
    ``block`` receives token ``cut.rest[h, i]``. On a GPU this is one launch without
    synchronisation or bounds checks on indices. On a CPU the reference runs.

    Args:
        pool: Keys [slots, H, D] and values [slots, H, Dv] of a layer, any dtype of 1,
            2, 4 or 8 bytes, contiguous in D; written at ``target``.
        cut: Kept and remaining tokens; all tensors are on the device of the pool.
        target: [n] int64, unique pool slots.
        block: Keys [m, H, D] and values [m, H, Dv], contiguous, dtype of the pool;
            overwritten.
        in_place: ``target`` and ``cut.slots`` may overlap. The kept entries are then
            buffered, which doubles their traffic. Without it, the contents of
            overlapping slots are undefined.

    Raises:
        ValueError: Shapes, dtypes, strides or devices do not fit.
    """
    check(pool, cut, target, block)
    if pool[0].device.type == "cpu":
        split_entries(pool, cut, target, block)
        return
    from vericache_kernels.split_segment.triton_impl import launch_split

    launch_split(pool, cut, target, block, in_place=in_place)


def join_segment(
    pool: Pair, cut: Cut, source: torch.Tensor, block: Pair, *, in_place: bool = False
) -> None:
    """Copy all entries to ``cut.slots``, in token order: inverts ``split_segment``.

    Args:
        pool: As for ``split_segment``; written at ``cut.slots`` for the tokens in
            ``cut.kept`` and ``cut.rest``.
        cut: See ``split_segment``.
        source: [n] int64, the pool slots with the kept entries.
        block: See ``split_segment``; read only.
        in_place: ``source`` and ``cut.slots`` may overlap; see ``split_segment``.

    Raises:
        ValueError: Shapes, dtypes, strides or devices do not fit.
    """
    check(pool, cut, source, block)
    if pool[0].device.type == "cpu":
        join_entries(pool, cut, source, block)
        return
    from vericache_kernels.split_segment.triton_impl import launch_join

    launch_join(pool, cut, source, block, in_place=in_place)


def bytes_moved(pool: Pair, cut: Cut) -> int:
    """Return a lower bound on the bytes of one call: each entry read and written.

    Indices count once; the buffering of an in-place call is excluded.

    Args:
        pool: See ``split_segment``.
        cut: See ``split_segment``.
    """
    heads, kept = cut.kept.shape
    named = heads * (kept + cut.rest.shape[1])
    entry = sum(side.shape[2] * side.element_size() for side in pool)
    indices = named * cut.kept.element_size() + (len(cut.slots) + kept) * SLOT_BYTES
    return 2 * named * entry + indices


def check(pool: Pair, cut: Cut, listed: torch.Tensor, block: Pair) -> None:
    """Validate shapes, dtypes, strides and devices; does not read tensor contents.

    Raises:
        ValueError: See ``split_segment``.
    """
    heads, kept = cut.kept.shape
    rest = cut.rest.shape[1]
    if cut.rest.shape[0] != heads or cut.kept.dtype != cut.rest.dtype:
        raise ValueError(
            f"cut.kept is {tuple(cut.kept.shape)} {cut.kept.dtype}, "
            f"cut.rest {tuple(cut.rest.shape)} {cut.rest.dtype}"
        )
    if tuple(listed.shape) != (kept,):
        raise ValueError(f"{kept} kept entries, slots for {tuple(listed.shape)}")
    for name, side, part in zip(("keys", "values"), pool, block, strict=True):
        if side.dim() != 3 or side.shape[1] != heads or side.stride(2) != 1:
            raise ValueError(
                f"the pool's {name} must be [slots, {heads}, D], contiguous in D, are "
                f"{tuple(side.shape)} with strides {side.stride()}"
            )
        wanted = (rest, heads, side.shape[2])
        if tuple(part.shape) != wanted or not part.is_contiguous():
            raise ValueError(
                f"the block's {name} must be {wanted}, contiguous, are "
                f"{tuple(part.shape)} with strides {part.stride()}"
            )
        if part.dtype != side.dtype:
            raise ValueError(f"{name}: the block is {part.dtype}, pool {side.dtype}")
    tensors = (*pool, *block, listed, cut.slots, cut.kept, cut.rest)
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError(f"on several devices: {[str(t.device) for t in tensors]}")
    if not (cut.kept.is_contiguous() and cut.rest.is_contiguous()):
        raise ValueError("cut.kept and cut.rest must be contiguous")
