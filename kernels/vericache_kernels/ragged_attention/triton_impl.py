"""Triton kernel of ``ragged_attention``, followed by a merge of the splits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from vericache_kernels.split_softmax.triton_impl import (
    LEAST_LANES,
    LOG2_E,
    merge,
    product_dtype,
    room,
    store_split,
)

if TYPE_CHECKING:
    from vericache_kernels.ragged_attention.rows import RaggedRows

BLOCK_BYTES = 64
"""Maximum lanes of a block, and entries of a tile, times the bytes of a number, to fit
the registers of 4 warps at D = 128. A row with more queries takes several blocks."""
NO_LANE = tl.constexpr(1 << 30)
LEAST_ROWS = 16
"""Minimum of ROWS, the row count rounded up to a power of two; limits compilations."""
NUM_WARPS = 4
REGISTERS = {2: 168, 4: 255}
"""Bytes of a number -> maximum registers per thread; 168 allows 3 programs per
multiprocessor, but float32 would spill."""


@triton.jit
def _add_tile(
    q: tl.tensor,
    k_buffer: tl.tensor,
    v_buffer: tl.tensor,
    slots: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    shared: tl.tensor,
    visible: tl.tensor,
    slot_stride: tl.tensor,
    scale: tl.tensor,
    acc: tl.tensor,
    top: tl.tensor,
    mass: tl.tensor,
    LAST: tl.constexpr,
    PRODUCT: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Add the entries ``start`` to ``start + TILE`` of a row to the running softmax.

    Args:
        q: [M, D] PRODUCT.
        k_buffer: Keys of this KV head.
        v_buffer: Values of this KV head.
        slots: The row's slots.
        start: First entry.
        end: One past the row's last entry.
        shared: Every query of the row sees the entries before this one.
        visible: [M], each query sees the entries before this one.
        slot_stride: Elements from one slot to the next.
        scale: Factor on the scores, times log2(e), positive.
        acc: [M, D] float32, values weighted by ``2 ** (score - top)``.
        top: [M] float32, the largest score so far, -inf before the first.
        mass: [M] float32, sum of the weights.
        LAST: Whether entries may be missing, or masked for some queries.
        PRODUCT: Dtype of the products.
        D: Head dim.
        TILE: Entries.

    Returns:
        The new ``acc``, ``top`` and ``mass``.
    """
    entry, dim = start + tl.arange(0, TILE), tl.arange(0, D)
    if LAST:
        there = entry < end
        slot = tl.load(slots + entry, mask=there, other=0).to(tl.int64)
        source = slot[:, None] * slot_stride + dim[None, :]
        keys = tl.load(k_buffer + source, mask=there[:, None], other=0.0)
        values = tl.load(v_buffer + source, mask=there[:, None], other=0.0)
        # Zero times NaN is NaN. Entries with values that are not finite are therefore
        # zeroed if some query must not see them; the queries that do get NaN below.
        wide = values.to(tl.float32)
        bad = there & (entry >= shared) & (tl.sum(wide - wide, 1) != 0)
        values = tl.where(bad[:, None], 0.0, wide).to(values.dtype)
    else:
        slot = tl.load(slots + entry).to(tl.int64)
        source = slot[:, None] * slot_stride + dim[None, :]
        keys = tl.load(k_buffer + source)
        values = tl.load(v_buffer + source)
    # Both kinds of tile do the same operations, for bitwise equal results: masking
    # comes before the product with the scale, which may be fused.
    scores = tl.dot(q, tl.trans(keys.to(PRODUCT)), input_precision="ieee")
    if LAST:
        seen = entry[None, :] < visible[:, None]
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    # For a query that has seen no entry, -inf - -inf would be NaN.
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * scale - finite[:, None])
    kept = tl.exp2(top - finite)
    mass = mass * kept + tl.sum(weights, 1)
    acc = acc * kept[:, None]
    if LAST:
        hit = tl.max((seen & bad[None, :]).to(tl.int32), 1) > 0
        acc = tl.where(hit[:, None], float("nan"), acc)
    acc += tl.dot(weights.to(PRODUCT), values.to(PRODUCT), input_precision="ieee")
    return acc, higher, mass


@triton.jit
def _first_lane(
    program: tl.tensor,
    rows: tl.tensor,
    first_at: tl.tensor,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Return the row of a program and the first lane of its block in that row.

    Program r < R has the first M lanes of row r. Later blocks start M lanes apart in a
    row, so at most one of them starts in the lanes ``k * M`` to ``k * M + M``, and its
    row contains lane ``k * M``: program R + k handles it. If there is no such block or
    row, the returned lane is past the row's end.
    """
    row, lane = program, program * 0
    if program >= rows:
        lane = (program - rows) * M
        each = tl.arange(0, ROWS)
        far = lane // GROUP + 1
        ends = tl.load(first_at + 1 + each, mask=each < rows, other=far).to(tl.int32)
        row = tl.sum((ends < far).to(tl.int32), 0)
        own = tl.load(first_at + row).to(tl.int32) * GROUP
        ahead = tl.cdiv(lane - own, M) * M
        # A block that starts with its row belongs to program r.
        lane = tl.where((ahead > 0) & (row < rows), ahead, NO_LANE)
        row = tl.minimum(row, rows - 1)
    return row, lane


@triton.jit
def attend_kernel(
    q_at: tl.tensor,
    out_at: tl.tensor,
    lse_at: tl.tensor,
    k_buffer: tl.tensor,
    v_buffer: tl.tensor,
    table: tl.tensor,
    row_at: tl.tensor,
    first_at: tl.tensor,
    begin_at: tl.tensor,
    end_at: tl.tensor,
    q_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    rows: tl.tensor,
    scale: tl.tensor,
    PRODUCT: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Compute attention of M lanes (query, head) over every SPLITS-th tile of a row.

    Grid (R + cdiv(T * GROUP, M), H, SPLITS), see ``_first_lane``: enough programs for
    any distribution of the tokens over rows. ``out_at`` and ``lse_at`` are as in
    ``store_split``.
    """
    row, lane = _first_lane(tl.program_id(0), rows, first_at, GROUP, M, ROWS)
    head, split = tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    first_token = tl.load(first_at + row).to(tl.int32)
    queries = tl.load(first_at + row + 1).to(tl.int32) - first_token
    if lane < queries * GROUP:
        begin = tl.load(begin_at + row).to(tl.int32)
        end = tl.load(end_at + row).to(tl.int32)
        slots = table + tl.load(row_at + row).to(tl.int64) * table_stride
        k_head = k_buffer + head * head_stride
        v_head = v_buffer + head * head_stride
        place, dim = lane + tl.arange(0, M), tl.arange(0, D)
        query, q_head = place // GROUP, head * GROUP + place % GROUP
        asked = query < queries
        token = (first_token + query).to(tl.int64)
        source = token[:, None] * q_stride + q_head[:, None] * D + dim[None, :]
        q = tl.load(q_at + source, mask=asked[:, None], other=0.0).to(PRODUCT)
        shared = end - queries + 1
        visible = tl.minimum(shared + query, end)
        acc = tl.zeros([M, D], tl.float32)
        top = tl.full([M], float("-inf"), tl.float32)
        mass = tl.zeros([M], tl.float32)
        # Full tiles that every query of the row sees, then the remaining ones.
        whole = tl.maximum(shared - begin, 0) // TILE
        for tile in range(split, whole, SPLITS):
            acc, top, mass = _add_tile(
                *(q, k_head, v_head, slots, begin + tile * TILE, end, shared),
                *(visible, slot_stride, scale, acc, top, mass),
                *(False, PRODUCT, D, TILE),
            )
        turn = whole + (split - whole % SPLITS + SPLITS) % SPLITS
        tiles = tl.cdiv(tl.maximum(end - begin, 0), TILE)
        for tile in tl.range(turn, tiles, SPLITS, num_stages=STAGES):
            acc, top, mass = _add_tile(
                *(q, k_head, v_head, slots, begin + tile * TILE, end, shared),
                *(visible, slot_stride, scale, acc, top, mass),
                *(True, PRODUCT, D, TILE),
            )
        store_split(
            *(out_at, lse_at, token, heads, q_head, asked),
            *(acc, top, mass, D, SPLITS),
        )


def constants(
    product: Any, element_bytes: int, most_queries: int, group: int, dim: int
) -> dict[str, Any]:
    """Return the compile-time arguments of ``attend_kernel`` except ROWS and SPLITS.

    Args:
        product: Triton's dtype of the products.
        element_bytes: Bytes of a number of the KV.
        most_queries: Maximum queries of a row.
        group: Query heads per KV head.
        dim: D.
    """
    lanes = most_queries * group
    most = BLOCK_BYTES // element_bytes
    m = min(most, max(LEAST_LANES, triton.next_power_of_2(lanes)))
    return {
        "PRODUCT": product,
        "GROUP": group,
        "D": dim,
        "M": m,
        "TILE": most,
        # For the tiles at a row's end, one or two per program. A single stage saves
        # registers, except for float32, where shared-memory staging saves them.
        "STAGES": 3 if element_bytes == 4 else 1,
    }


def launch(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    rows: RaggedRows,
    scaling: float,
    most_queries: int,
    splits: int,
) -> torch.Tensor:
    """See ``ragged_attention``; the arguments are validated."""
    tokens, heads, dim = q.shape
    kv_heads, count = kv[0].shape[1], len(rows.row)
    result = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not tokens:
        return result
    if not count:
        return result.zero_()
    out, lse = room(tokens, heads, splits, dim, q.device)
    group = heads // kv_heads
    fixed = constants(product_dtype(q), q.element_size(), most_queries, group, dim)
    blocks = count + triton.cdiv(tokens * group, fixed["M"])
    attend_kernel[(blocks, kv_heads, splits)](
        *(q, out, lse, *kv),
        *(rows.table, rows.row, rows.first, rows.begin, rows.end),
        *(q.stride(0), *kv[0].stride()[:2], rows.table.stride(0)),
        *(count, scaling * LOG2_E),
        **fixed,
        ROWS=max(LEAST_ROWS, triton.next_power_of_2(count)),
        SPLITS=splits,
        num_warps=NUM_WARPS,
        maxnreg=REGISTERS[q.element_size()],
    )
    merge(out, lse, result, rows.first[-1:])
    return result
