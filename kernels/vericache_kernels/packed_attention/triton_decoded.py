"""Decode step of ``decoded``: keys and values that the codec already decoded."""
# Only ``triton_impl`` imports this file, on a machine that runs Triton.
# ruff: noqa: TID253, N803, PLR0913

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _entries(
    base: tl.tensor,
    at: tl.tensor,
    head: tl.tensor,
    start: tl.tensor,
    tokens: tl.tensor,
    KV: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Read a tile [TILE, D] of entries [H, tokens, D] that start at byte ``at``."""
    token = start + tl.arange(0, TILE)
    entries = (base + tl.multiple_of(at, 16)).to(tl.pointer_type(KV), bitcast=True)
    row = (head * tokens + token).to(tl.int64)[:, None]
    there = (token < tokens)[:, None]
    return tl.load(entries + row * D + tl.arange(0, D)[None, :], there, other=0.0)


@triton.jit
def decoded_keys(
    key_bytes: tl.tensor,
    offsets: tl.tensor,
    head: tl.tensor,
    start: tl.tensor,
    tokens: tl.tensor,
    places: tl.tensor,
    tables: tl.tensor,
    order: tl.tensor,
    rope: tl.tensor,
    STEP: tl.constexpr,
    KV: tl.constexpr,
    PRODUCT: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Read keys [TILE, D]; see ``triton_impl`` for the arguments."""
    at = tl.load(offsets)
    return _entries(key_bytes, at, head, start, tokens, KV, D, TILE)


@triton.jit
def decoded_values(
    value_bytes: tl.tensor,
    offsets: tl.tensor,
    head: tl.tensor,
    start: tl.tensor,
    tokens: tl.tensor,
    tables: tl.tensor,
    STEP: tl.constexpr,
    KV: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Read values [TILE, D]; see ``triton_impl`` for the arguments."""
    at = tl.load(offsets + 1)
    return _entries(value_bytes, at, head, start, tokens, KV, D, TILE)
