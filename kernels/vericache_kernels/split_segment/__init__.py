"""One layer's prompt KV in two parts, moved straight from the pool and back.

Which tokens stay differs by head; what stays goes to slots of the pool, what leaves to
a block that one copy takes to the host. Entries move as integers, so every bit arrives,
NaN payloads too. ``split_segment`` and ``join_segment`` undo each other.
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
"""Of a slot id."""


def split_segment(
    pool: Pair, cut: Cut, target: torch.Tensor, block: Pair, *, in_place: bool = False
) -> None:
    """Copy kept entries to ``target`` and the others to ``block``.

    Entry i of head h at ``target[i]`` is then token ``cut.kept[h, i]``, row i of head h
    in ``block`` is token ``cut.rest[h, i]``. On a GPU it is one launch, reads nothing
    on the host and looks at no index: one outside its bounds is followed. On a CPU the
    reference runs.

    Args:
        pool: Keys [slots, H, D] and values [slots, H, Dv] of a layer, any dtype of 1,
            2, 4 or 8 bytes, contiguous in D; written at ``target``.
        cut: What goes where; on the device of the pool, like all tensors here.
        target: [n] int64, unique pool slots.
        block: Keys [m, H, D] and values [m, H, Dv], contiguous, dtype of the pool;
            overwritten.
        in_place: ``target`` and ``cut.slots`` may share slots. The kept entries then
            wait in a block of their own, which doubles their traffic. Without it,
            shared slots hold whatever was written last.

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
    """Copy both parts to ``cut.slots``, in token order: undoes ``split_segment``.

    Args:
        pool: As for ``split_segment``; written at those of ``cut.slots`` that ``cut``
            names.
        cut: See there.
        source: [n] int64, the pool slots with the kept entries.
        block: See there; read.
        in_place: ``source`` and ``cut.slots`` may share slots; see there.

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
    """Return the least bytes one call moves, either way: each entry read and written.

    Indices count once, an in-place call's second trip does not.

    Args:
        pool: As for ``split_segment``.
        cut: See there.
    """
    heads, kept = cut.kept.shape
    named = heads * (kept + cut.rest.shape[1])
    entry = sum(side.shape[2] * side.element_size() for side in pool)
    indices = named * cut.kept.element_size() + (len(cut.slots) + kept) * SLOT_BYTES
    return 2 * named * entry + indices


def check(pool: Pair, cut: Cut, listed: torch.Tensor, block: Pair) -> None:
    """Refuse what the kernel would misread; looks at shapes only, never at contents.

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
