"""Timings of the kernels that move KV, join planes, choose and accept tokens."""

from __future__ import annotations

from functools import partial

import torch

from gpu.floor_attention import DTYPE, arena, split_planes
from gpu.floor_shapes import Case, Shape, Timing


def cases() -> list[Case]:
    """Return the kernels that are no attention."""
    return [
        Case("split segment", partial(moved, joins=False)),
        Case("join segment", partial(moved, joins=True)),
        Case("join planes E3M1", planes),
        Case("next tokens, greedy", partial(chosen, noise=False)),
        Case("next tokens, drawn", partial(chosen, noise=True), False),
        Case("board commit", committed, False),
    ]


def moved(shape: Shape, device: str, *, joins: bool) -> Timing:
    """Split the KV of a prompt into what is kept and what leaves, or undo it."""
    from vericache_kernels.split_segment import (
        Cut,
        bytes_moved,
        join_segment,
        split_segment,
    )

    size = (shape.tokens + shape.kept, shape.heads, shape.dim)
    pool = tuple(torch.zeros(size, dtype=DTYPE, device=device) for _ in range(2))
    places = torch.randperm(size[0], device=device)
    order = torch.stack(
        [torch.randperm(shape.tokens, device=device) for _ in range(shape.heads)]
    )
    halves = (order[:, : shape.kept], order[:, shape.kept :])
    sorted_ = [half.sort().values.to(torch.int32).contiguous() for half in halves]
    cut = Cut(places[: shape.tokens].contiguous(), *sorted_)
    target = places[shape.tokens :].contiguous()
    rest = (shape.tokens - shape.kept, shape.heads, shape.dim)
    block = tuple(torch.zeros(rest, dtype=DTYPE, device=device) for _ in range(2))
    move = join_segment if joins else split_segment
    return Timing(partial(move, pool, cut, target, block), bytes_moved(pool, cut))


def planes(shape: Shape, device: str) -> Timing:
    """Join the planes of a prompt into slots of a pool."""
    from vericache_kernels.join_planes import (
        DraftPlanes,
        Residuals,
        Target,
        bytes_moved,
        join_planes,
    )

    codec, step, _ = split_planes(3, 1, shape)
    size = (shape.heads, shape.segment, shape.dim)
    draft, residual = codec.encode(*(torch.randn(size).to(DTYPE) for _ in range(2)))
    segments = shape.tokens // shape.segment
    sides = [
        arena(draft, fields, segments) for fields in (step.fields[:2], step.fields[2:])
    ]
    rest = arena(residual, ("key_rest", "value_rest", "escapes"), segments)
    counts = torch.full((segments,), shape.segment, dtype=torch.int32, device=device)
    escapes = int(residual.extent.escapes)
    pool = (shape.tokens, shape.heads, shape.dim)
    target = Target(
        *(torch.zeros(pool, dtype=DTYPE, device=device) for _ in range(2)),
        slots=torch.randperm(shape.tokens, device=device),
        places=torch.arange(shape.tokens, dtype=torch.int32, device=device)
        .expand(shape.heads, -1)
        .contiguous(),
        first=counts.cumsum(0) - counts,
        most_tokens=shape.segment,
    )
    call = partial(
        join_planes,
        DraftPlanes(
            *(content.to(device) for content, _ in sides),
            torch.cat([offsets for _, offsets in sides], dim=1).to(device),
            counts,
        ),
        Residuals(
            rest[0].to(device),
            rest[1].to(device),
            torch.full((segments,), escapes, dtype=torch.int32, device=device),
        ),
        step,
        target,
    )
    nbytes = bytes_moved(step, target, shape.tokens, segments, escapes * segments)
    return Timing(call, nbytes)


def chosen(shape: Shape, device: str, *, noise: bool) -> Timing:
    """Choose the token of every position of as many verifications as there are rows."""
    from vericache_kernels.next_tokens import Noise, bytes_moved, next_tokens

    count = shape.rows * (shape.drafts + 1)
    scores = torch.randn(count, shape.vocabulary, device=device).to(DTYPE)
    given = None
    if noise:
        numbers = torch.arange(count, device=device)
        given = Noise(numbers, numbers)
    return Timing(partial(next_tokens, scores, given), bytes_moved(scores, given))


def committed(shape: Shape, device: str) -> Timing:
    """Accept the drafts of as many verifications as there are rows."""
    from vericache_kernels.board_commit import (
        EMIT,
        Board,
        BoardRows,
        board_commit,
        bytes_moved,
    )

    count, queries = shape.rows, shape.drafts + 1
    board = Board(
        torch.zeros(count, shape.drafts + 2, dtype=torch.int64, device=device),
        torch.zeros(count, dtype=torch.int32, device=device),
    )
    rows = BoardRows(
        torch.arange(count, device=device),
        torch.arange(0, (count + 1) * queries, queries, device=device),
        torch.full((count,), EMIT, dtype=torch.int32, device=device),
        torch.full((count,), shape.drafts, dtype=torch.int32, device=device),
    )
    target = torch.zeros(count * queries, dtype=torch.int64, device=device)
    call = partial(board_commit, board, rows, target)
    return Timing(call, bytes_moved(board, rows, target))
