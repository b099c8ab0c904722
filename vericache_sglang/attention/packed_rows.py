"""Draft rows with leading codes, in the form that packed attention reads on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from vericache_kernels.packed_attention import (
    DecodedStep,
    ExactRows,
    packed_attention,
)
from vericache_sglang.attention.codec_steps import codec_step
from vericache_sglang.attention.packed_readers import DecodedRows, Images
from vericache_sglang.compression.budget import Budget
from vericache_sglang.device.upload import upload
from vericache_sglang.errors import CompressionError
from vericache_sglang.kv.calibration import TIMED_ROWS, seconds_of
from vericache_sglang.kv.segment_length import SEGMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_kernels.ragged_attention import RaggedRows
    from vericache_sglang.attention.forward_row import ForwardRow
    from vericache_sglang.attention.packed_readers import KV, CodeReader
    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.kv.packed_drafts import Codes
    from vericache_sglang.kv.request import RequestState

MOST_KNOWN = 16
"""Most known tokens of a coded row in one forward (``Extend``)."""

TIMED_SEGMENTS = 1, 8
"""Segments per row in the timings at startup."""


@dataclass(frozen=True, slots=True, eq=False)
class CodedRows:
    """The rows of R that begin with codes; stored as ``spec_info.coded``.

    Attributes:
        codes: Reader of the codes.
        begin: [R] int32, leading code slots of each row; 0 for an uncoded row.
        first: [R + 1] int32; row r has the segments ``first[r]`` to ``first[r + 1]``.
        exact: Upper bound on the exact entries of all coded rows together.
        queries: N, most query tokens of a coded row; the kernel is compiled for it.
    """

    codes: CodeReader
    begin: torch.Tensor
    first: torch.Tensor
    exact: int
    queries: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class CodedForward:
    """Kernel inputs of the coded rows of one forward; the same for every layer.

    Attributes:
        codes: Reader of the codes.
        segments: [R + 1] int32, first segment of every row.
        slots: [exact] int32, exact slots of the coded rows, row after row.
        first_slot: [R + 1] int32, start of each row in ``slots``.
        query: [R, N] int64, last tokens of every row; a row with fewer begins with
            its first token several times.
        row_of: [T] int64, row of every token.
        place: [T] int64, where ``query`` has the token, if its row is coded.
        coded: [T] bool, whether that row is coded.
    """

    codes: CodeReader
    segments: torch.Tensor
    slots: torch.Tensor
    first_slot: torch.Tensor
    query: torch.Tensor
    row_of: torch.Tensor
    place: torch.Tensor
    coded: torch.Tensor

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        kv: KV,
        scaling: float,
        others: torch.Tensor,
    ) -> torch.Tensor:
        """Compute attention of the coded rows; return it merged with the other rows.

        Args:
            layer: Layer index.
            queries: [T, Hq, D].
            kv: K and V buffers of the layer.
            scaling: Factor on the scores.
            others: [T, Hq, D], attention output of the rows without codes.
        """
        asked = queries[self.query]
        found = torch.zeros_like(asked)
        step = self.codes.step
        for rows, packed in self.codes.rows(layer, kv, self.segments):
            exact = ExactRows(
                *kv, self.slots, self.first_slot[rows.start : rows.stop + 1]
            )
            found[rows] = packed_attention(asked[rows], packed, exact, step, scaling)
        own = found[self.row_of, self.place]
        return torch.where(self.coded[:, None, None], own, others)


class DraftCodes:
    """Lists the codes of a forward's draft rows without waiting for the device.

    Args:
        codes: Codes of compressed requests.
        handles: KV pool and block table.
        positions: Number of positions that tokens can have.
        proposals: Most tokens that an inner drafter proposes in a row.

    Raises:
        CompressionError: K and V differ in width.
    """

    def __init__(
        self, codes: Codes, handles: KVHandles, positions: int, proposals: int = 0
    ) -> None:
        self._codes, self._handles = codes, handles
        self._most_queries = 1 + proposals
        geometry = handles.geometry
        if geometry.head_dim != geometry.v_head_dim:
            raise CompressionError(
                f"{codes.codec.name}: the kernel needs K and V of one width, got "
                f"{geometry.head_dim} and {geometry.v_head_dim}"
            )
        self._step = codec_step(codes.codec, geometry, positions, handles.device)
        self._slot_bytes = (
            geometry.kv_heads * geometry.head_dim * geometry.element_bytes
        )
        self._fields = cache(self._fields_of)

    @property
    def in_kernel(self) -> bool:
        """Whether the attention kernel decodes the codes; else torch does before it."""
        return not isinstance(self._step.step, DecodedStep)

    def of(self, rows: Sequence[ForwardRow]) -> CodedRows | None:
        """Return the rows' leading codes, for ``spec_info.coded``.

        Args:
            rows: Rows of a mixed forward; those with ``packed`` are drafts whose
                block-table row lists the code slots first.

        Returns:
            None if no row has codes.
        """
        begins, counts, exact, queries = [], [], 0, 1
        states: dict[int, RequestState] = {}
        for i, row in enumerate(rows):
            if row.packed is None:
                begins.append(0)
                counts.append(0)
                continue
            states[i] = row.packed
            budget = row.packed.split.budget
            begins.append(budget.code_slots)
            counts.append(len(self._codes.layout(budget).segments))
            length = row.prefix + row.pending_max + len(row.columns)
            exact += length - budget.code_slots
            queries = max(queries, self._compiled_for(len(row.columns)))
        if not states:
            return None
        if self.in_kernel:
            parts = [state.split for state in states.values()]
            codes: CodeReader = self._images(
                [part.budget for part in parts],
                [self._handles.table[rows[i].table_row] for i in states],
                [part.coded for part in parts],
            )
        else:
            codes = self._decoded(states)
        first = accumulate(counts, initial=0)
        sent = upload(self._handles.device, begins, list(first))
        begin, firsts = (column.to(torch.int32) for column in sent)
        return CodedRows(codes, begin, firsts, exact, queries)

    def _compiled_for(self, queries: int) -> int:
        """Return for how many the kernel is compiled: of three, not for every number.

        Args:
            queries: Query tokens of a row: one, with proposals, or known ones.
        """
        numbers = 1, self._most_queries, MOST_KNOWN
        return next(each for each in numbers if queries <= each)

    def seconds_per_token(self) -> float:
        """Time attention over codes in one layer; return seconds per coded token.

        Reads arbitrary pool contents as codes and writes nothing. Only valid if a
        kernel decodes the codes. The kernel of rows with proposals is compiled too.
        """
        if self._most_queries > 1:
            self._seconds(TIMED_SEGMENTS[0], self._most_queries)
        few, many = (self._seconds(count) for count in TIMED_SEGMENTS)
        tokens = TIMED_ROWS * SEGMENT * (TIMED_SEGMENTS[1] - TIMED_SEGMENTS[0])
        return max(0.0, many - few) / tokens

    def _seconds(self, segments: int, queries: int = 1) -> float:
        """Return the seconds of attention over full segments and one exact slot."""
        geometry, device = self._handles.geometry, self._handles.device
        heads, dim, rows = geometry.kv_heads, geometry.head_dim, TIMED_ROWS
        coded = segments * SEGMENT
        budget = Budget(coded, coded, 0, 0, coded=coded)
        slots = torch.arange(rows * self._codes.layout(budget).slots, device=device)
        pool = self._handles.pool
        kv = pool.k_buffer[0], pool.v_buffer[0]
        where = torch.arange(coded, dtype=torch.int32, device=device)
        row = torch.arange(rows + 1, device=device)
        forward = CodedForward(
            codes=self._images(
                [budget] * rows,
                (slots % len(kv[0])).chunk(rows),
                [where.expand(geometry.layers, heads, coded)] * rows,
            ),
            segments=(row * segments).to(torch.int32),
            slots=row[:-1].to(torch.int32),
            first_slot=row.to(torch.int32),
            query=row[:-1, None].expand(-1, queries),
            row_of=row[:-1],
            place=torch.full_like(row[:-1], queries - 1),
            coded=row[:-1] >= 0,
        )
        q = torch.zeros(rows, heads, dim, dtype=kv[0].dtype, device=device)
        return seconds_of(lambda: forward.attend(0, q, kv, 1.0, q), device)

    def _images(
        self,
        budgets: Sequence[Budget],
        slots: Sequence[torch.Tensor],
        positions: Sequence[torch.Tensor],
    ) -> Images:
        """Return the codes of rows that a kernel decodes.

        Args:
            budgets: Counts of each row.
            slots: Slots of each row, code slots first.
            positions: Per row [L, H, coded] int32.
        """
        offsets: list[int] = []
        tokens: list[int] = []
        starts: list[int] = []
        lengths: list[int] = []
        coded = [budget.coded for budget in budgets]
        for budget, before in zip(budgets, accumulate(coded, initial=0), strict=False):
            layout, at = self._codes.layout(budget), sum(lengths) * self._slot_bytes
            fields = self._fields(budget.coded, budget.run)
            for segment, handles in zip(layout.segments, fields, strict=True):
                offsets += [at + place for place in handles]
                tokens.append(segment.tokens)
                starts.append(before + segment.start)
            lengths.append(layout.used)
        device = self._handles.device
        sent = upload(device, offsets, tokens, starts)
        used = [row[:length] for row, length in zip(slots, lengths, strict=True)]
        made = Images(
            codec=self._step,
            offsets=sent[0].view(-1, len(self._step.step.fields)),
            tokens=sent[1].to(torch.int32),
            slots=torch.cat(used).to(torch.int64),
        )
        if "positions" not in self._step.step.wants:
            return made
        heads = self._handles.geometry.kv_heads
        alike = all(each.stride(1) == 0 for each in positions)  # views of one head's
        head = torch.arange(heads, device=device) * (0 if alike else sum(coded))
        return replace(
            made,
            positions=[each[:, : 1 if alike else heads] for each in positions],
            places=sent[2][:, None] + head,
        )

    def _decoded(self, states: dict[int, RequestState]) -> DecodedRows:
        """Return the codes that torch decodes; ``states`` maps row -> request."""
        offsets: list[int] = []
        tokens: list[int] = []
        for state in states.values():
            at = 0
            for segment in self._codes.layout(state.split.budget).segments:
                size = segment.tokens * self._slot_bytes
                offsets += [at, at + size]
                tokens.append(segment.tokens)
                at += 2 * size
        sent = upload(self._handles.device, offsets, tokens)
        decode = {row: self._codes.segments(state) for row, state in states.items()}
        return DecodedRows(decode, sent[0].view(-1, 2), sent[1].to(torch.int32))

    def _fields_of(self, coded: int, run: int) -> list[list[int]]:
        """Return the byte offsets of the fields in a row's codes, in step order."""
        budget = Budget(coded, coded, 0, 0, coded=coded, run=run)
        found, layout = [], self._codes.layout(budget)
        for segment in layout.segments:
            at, offsets = segment.first * self._slot_bytes, layout.offsets(segment)
            found.append([at + offsets[name] for name in self._step.step.fields])
        return found


def coded_forward(
    coded: CodedRows, rows: RaggedRows, tokens: int
) -> tuple[CodedForward, RaggedRows]:
    """Separate the coded rows of a forward from the others, without synchronising.

    Args:
        coded: Covers the first rows; later rows are not coded.
        rows: All rows of the forward, from their first entry.
        tokens: T, query tokens including padding.

    Returns:
        The coded rows, and all rows with empty ranges in place of the coded ones.
    """
    count, device = len(rows.row), rows.row.device
    begin = torch.zeros(count, dtype=torch.int64, device=device)
    begin[: len(coded.begin)] = coded.begin
    segments = coded.first[-1:].expand(count + 1).clone()
    segments[: len(coded.first)] = coded.first
    is_coded = begin > 0
    exact = torch.where(is_coded, rows.end - begin, 0)
    first = torch.nn.functional.pad(exact.cumsum(0), (1, 0))
    place = torch.arange(coded.exact, device=device)
    owner = torch.searchsorted(first[1:], place, right=True).clamp(max=count - 1)
    entry = begin[owner] + place - first[owner]
    entry = entry.clamp(max=rows.table.shape[1] - 1)
    token = torch.arange(tokens, device=device)
    bounds = rows.first.to(torch.int64)
    row_of = torch.searchsorted(bounds[1:], token, right=True).clamp(max=count - 1)
    # The kernel's rows have equally many queries, and their last ones are right: before
    # them a shorter row asks its first token again, which sees less than it should.
    last = torch.arange(-coded.queries, 0, device=device)
    query = torch.maximum(bounds[1:, None] + last, bounds[:-1, None])
    place = token - bounds[1:][row_of] + coded.queries
    forward = CodedForward(
        codes=coded.codes,
        segments=segments.to(torch.int32),
        slots=rows.table[rows.row[owner].to(torch.int64), entry],
        first_slot=first.to(torch.int32),
        query=query.clamp(max=tokens - 1),
        row_of=row_of,
        place=place.clamp(0, coded.queries - 1),
        coded=is_coded[row_of] & (token < bounds[-1]),
    )
    end = torch.where(is_coded, rows.begin, rows.end)
    return forward, replace(rows, end=end)
