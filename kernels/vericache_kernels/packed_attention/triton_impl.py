"""Triton kernels of ``packed_attention``: the shared loop and the launch.

Requires Triton; nothing here runs before ``launch``. Decode steps are pairs of device
functions with the arguments

    bytes, offsets      buffer of the fields, and this segment's row of offsets
    head, start, tokens KV head, first token of the tile, tokens of the segment
    places              pointer to the positions of the segment's tokens in this head
                        (keys only)
    tables, order, rope as in ``PackedRows``, undefined if the step needs none
    STEP, KV, PRODUCT   the step's parameters, dtype of the KV, dtype of the products
    H, D, TILE          KV heads, head dim, tokens of a tile

that return [TILE, D] of dtype KV, zeros for tokens past the segment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from vericache_kernels.packed_attention.triton_bits import unchanged
from vericache_kernels.packed_attention.triton_decoded import (
    decoded_keys,
    decoded_values,
)
from vericache_kernels.packed_attention.triton_kivi import kivi_keys, kivi_values
from vericache_kernels.packed_attention.triton_kvquant import (
    kvquant_keys,
    kvquant_values,
)
from vericache_kernels.packed_attention.triton_rotatekv import (
    rotatekv_finish,
    rotatekv_keys,
    rotatekv_values,
)
from vericache_kernels.packed_attention.triton_split_planes import (
    split_planes_keys,
    split_planes_values,
)
from vericache_kernels.split_softmax.triton_impl import (
    LEAST_LANES,
    LOG2_E,
    merge,
    product_dtype,
    room,
    store_split,
)

if TYPE_CHECKING:
    from vericache_kernels.packed_attention.rows import ExactRows, PackedRows
    from vericache_kernels.packed_attention.steps import DecodeStep

FUNCTIONS = {
    "decoded": (decoded_keys, decoded_values, unchanged),
    "split_planes": (split_planes_keys, split_planes_values, unchanged),
    "kivi": (kivi_keys, kivi_values, unchanged),
    "kvquant": (kvquant_keys, kvquant_values, unchanged),
    "rotatekv": (rotatekv_keys, rotatekv_values, rotatekv_finish),
}
"""``DecodeStep.name`` -> functions for keys, values and the weighted sum of values."""

EXACT_PIECE = tl.constexpr(256)
"""Exact slots that are assigned to a split at a time."""
EXACT_TILE = tl.constexpr(32)
NUM_WARPS = 4


@triton.jit
def _add(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    acc: tl.tensor,
    top: tl.tensor,
    mass: tl.tensor,
    PRODUCT: tl.constexpr,
) -> tl.tensor:
    """Add a tile to the running softmax.

    Args:
        q: [M, D] PRODUCT.
        keys: [T, D].
        values: [T, D], finite where masked for all queries.
        seen: bool mask, broadcastable to [M, T].
        scale: Factor on the scores, times log2(e).
        acc: [M, D] float32, values weighted by ``2 ** (score - top)``.
        top: [M] float32, the largest score so far, -inf before the first.
        mass: [M] float32, sum of the weights.
        PRODUCT: Dtype of the products.

    Returns:
        The new ``acc``, ``top`` and ``mass``.
    """
    scores = tl.dot(q, tl.trans(keys.to(PRODUCT)), input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    # For a fully masked row, -inf - -inf would be NaN.
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - finite[:, None])
    kept = tl.exp2(top - finite)
    mass = mass * kept + tl.sum(weights, 1)
    acc = acc * kept[:, None]
    acc += tl.dot(weights.to(PRODUCT), values.to(PRODUCT), input_precision="ieee")
    return acc, higher, mass


@triton.jit
def attend_kernel(
    q_at: tl.tensor,
    out_at: tl.tensor,
    lse_at: tl.tensor,
    key_bytes: tl.tensor,
    value_bytes: tl.tensor,
    offsets: tl.tensor,
    segment_tokens: tl.tensor,
    first_segment: tl.tensor,
    positions: tl.tensor,
    places: tl.tensor,
    tables: tl.tensor,
    order: tl.tensor,
    rope: tl.tensor,
    k_buffer: tl.tensor,
    v_buffer: tl.tensor,
    slots: tl.tensor,
    first_slot: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    scale: tl.tensor,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    FINISH: tl.constexpr,
    STEP: tl.constexpr,
    FIELDS: tl.constexpr,
    POSITIONED: tl.constexpr,
    PRODUCT: tl.constexpr,
    QUERIES: tl.constexpr,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Compute attention of one row and KV head over every SPLITS-th piece of the row.

    Grid (R, H, SPLITS). ``out_at`` and ``lse_at`` are as in ``store_split``, with
    R * QUERIES tokens.
    """
    KV: tl.constexpr = k_buffer.dtype.element_ty  # noqa: N806
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place, dim = tl.arange(0, M), tl.arange(0, D)
    query, member = place // GROUP, place % GROUP
    asked = place < QUERIES * GROUP
    token = (row * QUERIES + query).to(tl.int64)
    lane = token * (H * GROUP) + head * GROUP + member
    asked_at = q_at + lane[:, None] * D + dim[None, :]
    q = tl.load(asked_at, mask=asked[:, None], other=0.0).to(PRODUCT)
    acc = tl.zeros([M, D], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)

    first, last = tl.load(first_segment + row), tl.load(first_segment + row + 1)
    for segment in range(first + split, last, SPLITS):
        tokens = tl.load(segment_tokens + segment)
        fields = offsets + segment * FIELDS
        own_places = positions
        if POSITIONED:
            own_places += tl.load(places + segment * H + head)
        for start in range(0, tokens, TILE):
            keys = KEYS(
                *(key_bytes, fields, head, start, tokens, own_places),
                *(tables, order, rope, STEP, KV, PRODUCT, H, D, TILE),
            )
            values = VALUES(
                *(value_bytes, fields, head, start, tokens, tables),
                *(STEP, KV, H, D, TILE),
            )
            seen = (start + tl.arange(0, TILE) < tokens)[None, :]
            acc, top, mass = _add(q, keys, values, seen, scale, acc, top, mass, PRODUCT)
    acc = FINISH(acc, mass, PRODUCT, STEP, D)

    begin, end = tl.load(first_slot + row), tl.load(first_slot + row + 1)
    # The round robin over exact pieces continues after the last segment.
    turn = (split - (last - first) % SPLITS + SPLITS) % SPLITS
    hidden_from = end - begin - QUERIES + query
    for piece in range(begin + turn * EXACT_PIECE, end, SPLITS * EXACT_PIECE):
        for start in range(piece, min(piece + EXACT_PIECE, end), EXACT_TILE):
            entry = start + tl.arange(0, EXACT_TILE)
            there = entry < end
            slot = tl.load(slots + entry, mask=there, other=0).to(tl.int64)
            source = slot[:, None] * slot_stride + head * head_stride + dim[None, :]
            keys = tl.load(k_buffer + source, mask=there[:, None], other=0.0)
            values = tl.load(v_buffer + source, mask=there[:, None], other=0.0)
            seen = there[None, :] & (entry[None, :] - begin <= hidden_from[:, None])
            acc, top, mass = _add(q, keys, values, seen, scale, acc, top, mass, PRODUCT)
    store_split(
        *(out_at, lse_at, token, H * GROUP, head * GROUP + member, asked),
        *(acc, top, mass, D, SPLITS),
    )


def constants(
    step: DecodeStep, product: Any, queries: int, kv_heads: int, group: int, dim: int
) -> dict[str, Any]:
    """Return the compile-time arguments of ``attend_kernel`` except SPLITS.

    Args:
        step: Decode step of the codec.
        product: Triton's dtype of the products.
        queries: N, queries per row.
        kv_heads: H.
        group: Query heads per KV head.
        dim: D.
    """
    keys, values, finish = FUNCTIONS[step.name]
    return {
        "KEYS": keys,
        "VALUES": values,
        "FINISH": finish,
        "STEP": step.numbers,
        "FIELDS": len(step.fields),
        "POSITIONED": "positions" in step.wants,
        "PRODUCT": product,
        "QUERIES": queries,
        "H": kv_heads,
        "GROUP": group,
        "D": dim,
        "M": max(LEAST_LANES, triton.next_power_of_2(queries * group)),
        "TILE": step.tile,
    }


def launch(
    q: torch.Tensor,
    packed: PackedRows,
    exact: ExactRows,
    step: DecodeStep,
    scaling: float,
    splits: int,
) -> torch.Tensor:
    """See ``packed_attention``; the arguments are validated."""
    rows, queries, heads, dim = q.shape
    kv_heads = exact.k_buffer.shape[1]
    group = heads // kv_heads
    out, lse = room(rows * queries, heads, splits, dim, q.device)
    result = torch.empty_like(q)
    if not rows * queries:
        return result
    # The pointer of an unneeded table is not dereferenced; any tensor will do.
    attend_kernel[(rows, kv_heads, splits)](
        *(q, out, lse, packed.key_bytes, packed.value_bytes),
        *(packed.offsets, packed.tokens, packed.first),
        packed.tokens if packed.positions is None else packed.positions,
        packed.offsets if packed.places is None else packed.places,
        lse if packed.tables is None else packed.tables,
        packed.tokens if packed.order is None else packed.order,
        lse if packed.rope is None else packed.rope,
        *(exact.k_buffer, exact.v_buffer, exact.slots, exact.first),
        *exact.k_buffer.stride()[:2],
        scaling * LOG2_E,
        **constants(step, product_dtype(q), queries, kv_heads, group, dim),
        SPLITS=splits,
        num_warps=NUM_WARPS,
        maxnreg=step.registers,
    )
    merge(out, lse, result)
    return result
