"""Triton kernels of ``next_tokens``: the best by splits of a vocabulary, their merge.

Scores are compared as integers in the order of the numbers, NaN on top, so a best score
is one number whatever order the lanes were looked at; of equal ones the first column
wins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from vericache_kernels.next_tokens import Noise

SPLITS = 8
"""Programs that share a position's vocabulary."""
TILE = 1024
NUM_WARPS = 4
# As SGLang cuts the logarithm of a uniform number: finfo(float64).min, and -2**-32, the
# spacing of its hashes.
LEAST_LOG = tl.constexpr(-1.7976931348623157e308)
MOST_LOG = tl.constexpr(-(2.0**-32))
LARGEST_HASH = tl.constexpr(4294967295.0)


@triton.jit
def _rotate(word: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Rotate 32 bits left."""
    return (word << BITS) | (word >> (32 - BITS))


@triton.jit
def _mix(state: tl.tensor, word: tl.tensor) -> tl.tensor:
    """Take one word into a MurmurHash3 state; both uint32."""
    word = _rotate(word * 0xCC9E2D51, 15) * 0x1B873593
    return _rotate(state ^ word, 13) * 5 + 0xE6546B64


@triton.jit
def _gumbel(seed: tl.tensor, position: tl.tensor, column: tl.tensor) -> tl.tensor:
    """Return the noise of a position's columns, float64; see ``ref.gumbel``.

    Args:
        seed: [1] int64.
        position: [1] int64.
        column: [TILE] int32.
    """
    bits = seed.to(tl.uint64, bitcast=True)
    state = tl.zeros([1], tl.uint32)
    state = _mix(state, bits.to(tl.uint32))
    state = _mix(state, (bits >> 32).to(tl.uint32))
    state = _mix(state, position.to(tl.uint64, bitcast=True).to(tl.uint32))
    state = _mix(state, column.to(tl.uint32)) ^ 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    state ^= state >> 16
    uniform = state.to(tl.float64) / tl.full([1], LARGEST_HASH, tl.float64)
    least = tl.full([1], LEAST_LOG, tl.float64)
    most = tl.full([1], MOST_LOG, tl.float64)
    log = tl.minimum(tl.maximum(tl.log(uniform), least), most)
    return -tl.log(-log)


@triton.jit
def _ordered(numbers: tl.tensor) -> tl.tensor:
    """Turn float32 or float64 into integers of the same order, NaN the greatest.

    Zeros are one number, whatever their sign.
    """
    WIDE: tl.constexpr = numbers.dtype == tl.float64  # noqa: N806
    INTEGER: tl.constexpr = tl.int64 if WIDE else tl.int32  # noqa: N806
    MOST: tl.constexpr = (1 << 63) - 1 if WIDE else (1 << 31) - 1  # noqa: N806
    bits = tl.where(numbers == 0, 0.0, numbers).to(INTEGER, bitcast=True)
    # Of negative numbers the larger bits are the smaller number.
    flipped = tl.where(bits < 0, bits ^ MOST, bits)
    return tl.where(numbers != numbers, tl.full([1], MOST, INTEGER), flipped)


@triton.jit
def best_kernel(
    scores: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    keys_at: tl.tensor,
    columns_at: tl.tensor,
    row_stride: tl.tensor,
    NOISY: tl.constexpr,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Find the best column of one position in one chunk of the vocabulary.

    Grid (N, SPLITS). ``keys_at`` [N, SPLITS] gets its score as ``_ordered`` has it,
    int64 with noise, else int32; ``columns_at`` [N, SPLITS] int32 the column. A chunk
    behind the vocabulary has the least key there is, which no score has. CHUNK is a
    multiple of TILE.
    """
    INTEGER: tl.constexpr = tl.int64 if NOISY else tl.int32  # noqa: N806
    LEAST: tl.constexpr = -(1 << 63) if NOISY else -(1 << 31)  # noqa: N806
    row, split = tl.program_id(0), tl.program_id(1)
    begin = split * CHUNK
    lane = tl.arange(0, TILE)
    top = tl.full([TILE], LEAST, INTEGER)
    best = tl.full([TILE], 2147483647, tl.int32)
    own = scores + row.to(tl.int64) * row_stride
    one = tl.arange(0, 1)
    seed = tl.load(seeds + row + one)
    position = tl.load(positions + row + one).to(tl.int64)
    for start in range(begin, min(begin + CHUNK, VOCABULARY), TILE):
        column = start + lane
        there = column < VOCABULARY
        score = tl.load(own + column, mask=there, other=0.0).to(tl.float32)
        if NOISY:
            key = _ordered(_gumbel(seed, position, column) + score.to(tl.float64))
        else:
            key = _ordered(score)
        # Columns ascend in a lane, so of equal keys the first stays.
        better = there & (key > top)
        top = tl.where(better, key, top)
        best = tl.where(better, column, best)
    highest = tl.max(top, 0)
    at = row * SPLITS + split
    tl.store(keys_at + at, highest)
    tl.store(columns_at + at, tl.min(tl.where(top == highest, best, 2147483647), 0))


@triton.jit
def merge_kernel(
    keys_at: tl.tensor,
    columns_at: tl.tensor,
    tokens_at: tl.tensor,
    SPLITS: tl.constexpr,
) -> None:
    """Choose the best of one position's splits; grid (N,)."""
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    key = tl.load(keys_at + row * SPLITS + split)
    column = tl.load(columns_at + row * SPLITS + split)
    first = tl.min(tl.where(key == tl.max(key, 0), column, 2147483647), 0)
    tl.store(tokens_at + row, first.to(tl.int64))


def constants(vocabulary: int) -> dict[str, int]:
    """Return what ``best_kernel`` is compiled for, but for NOISY.

    Args:
        vocabulary: V; fixed, so that scores are read in pieces of 16 bytes where it is
            a multiple of 16.
    """
    return {
        "VOCABULARY": vocabulary,
        "CHUNK": triton.cdiv(triton.cdiv(vocabulary, TILE), SPLITS) * TILE,
        "TILE": TILE,
        "SPLITS": SPLITS,
    }


def launch(scores: torch.Tensor, noise: Noise | None) -> torch.Tensor:
    """See ``next_tokens``; the arguments are checked."""
    count, vocabulary = scores.shape
    tokens = torch.empty(count, dtype=torch.int64, device=scores.device)
    if not count:
        return tokens
    noisy = noise is not None
    integer = torch.int64 if noisy else torch.int32
    keys = torch.empty(count, SPLITS, dtype=integer, device=scores.device)
    columns = torch.empty(count, SPLITS, dtype=torch.int32, device=scores.device)
    best_kernel[(count, SPLITS)](
        scores,
        # Without noise neither is used; any vector of N will do.
        tokens if noise is None else noise.seeds,
        tokens if noise is None else noise.positions,
        *(keys, columns, scores.stride(0)),
        NOISY=noisy,
        **constants(vocabulary),
        num_warps=NUM_WARPS,
    )
    merge_kernel[(count,)](keys, columns, tokens, SPLITS=SPLITS, num_warps=1)
    return tokens
