"""Draft rows that begin with codes, as the GPU's packed attention reads them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

from vericache_kernels.packed_attention import ExactRows, PackedRows, packed_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from vericache_kernels.packed_attention import DecodeStep
    from vericache_kernels.ragged_attention import RaggedRows

LayerTables = dict[str, torch.Tensor]
"""Optional fields of ``PackedRows`` by name, those its step wants."""


def _no_tables(layer: int) -> LayerTables:
    return {}


@dataclass(frozen=True, slots=True, eq=False)
class CodedRows:
    """Which of R rows begin with codes and where these lie; on ``spec_info.coded``.

    A coded row has one query token. Its codes lie in the same slots of every layer, so
    one list of offsets serves all of them. All tensors are on the device.

    Attributes:
        step: How the codec's fields become keys and values.
        begin: [R] int32, slots of codes a row begins with; 0: it has none.
        first: [R + 1] int32; row r has the segments ``first[r]`` to ``first[r + 1]``.
        offsets: [S, F] int64, bytes from the start of a layer's K buffer (key fields)
            or V buffer (value fields) to each field of a segment.
        tokens: [S] int32, coded tokens of a segment.
        exact: At least as many as the coded rows have entries behind their codes, all
            rows together.
        tables: What the step reads besides, by layer.
    """

    step: DecodeStep
    begin: torch.Tensor
    first: torch.Tensor
    offsets: torch.Tensor
    tokens: torch.Tensor
    exact: int
    tables: Callable[[int], LayerTables] = _no_tables


@dataclass(frozen=True, slots=True, eq=False)
class CodedForward:
    """The coded rows of one forward, in the kernel's terms; the same for every layer.

    Attributes:
        step: See ``CodedRows``, like ``offsets``, ``tokens`` and ``tables``.
        offsets: See there.
        tokens: See there.
        segments: [R + 1] int32, first segment of every row.
        slots: [exact] int32, exact slots of the coded rows, row after row.
        first_slot: [R + 1] int32, where each row's begin among them.
        query: [R] int64, first token of every row.
        row_of: [T] int64, row of every token.
        coded: [T] bool, whether that row is coded.
        tables: See ``CodedRows``.
    """

    step: DecodeStep
    offsets: torch.Tensor
    tokens: torch.Tensor
    segments: torch.Tensor
    slots: torch.Tensor
    first_slot: torch.Tensor
    query: torch.Tensor
    row_of: torch.Tensor
    coded: torch.Tensor
    tables: Callable[[int], LayerTables]

    def attend(
        self,
        queries: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        scaling: float,
        layer: int,
        others: torch.Tensor,
    ) -> torch.Tensor:
        """Attend the coded rows; the tokens of other rows keep what they have.

        Args:
            queries: [T, Hq, D].
            kv: K and V [slots, H, D] of the layer, contiguous.
            scaling: Factor on the scores.
            layer: Layer index, for ``tables``.
            others: [T, Hq, D], of the rows without codes.
        """
        keys, values = (buffer.view(torch.uint8).view(-1) for buffer in kv)
        packed = PackedRows(
            keys,
            values,
            self.offsets,
            self.tokens,
            self.segments,
            **self.tables(layer),
        )
        exact = ExactRows(*kv, self.slots, self.first_slot)
        asked = queries[self.query].unsqueeze(1)
        found = packed_attention(asked, packed, exact, self.step, scaling)
        return torch.where(self.coded[:, None, None], found[self.row_of, 0], others)

    def copy(self) -> CodedForward:
        """Return the same rows in tensors of their own."""
        own = {name: getattr(self, name).clone() for name in self._tensors()}
        return replace(self, **own)

    def refill(self, live: CodedForward | None) -> None:
        """Take over another forward's rows in place, for a captured graph.

        Args:
            live: Of as many rows and tokens, with at most as many segments and exact
                slots; None: no row is coded.

        Raises:
            ValueError: It is larger than this one, or of another codec.
        """
        if live is None:
            for tensor in (self.segments, self.first_slot, self.coded):
                tensor.zero_()
            return
        if live.step != self.step:
            raise ValueError(f"captured for {self.step}, the batch has {live.step}")
        for name in self._tensors():
            own, new = getattr(self, name), getattr(live, name)
            if len(new) > len(own):
                raise ValueError(
                    f"coded rows: {len(new)} {name}, captured for {len(own)}"
                )
            own[: len(new)].copy_(new)

    def _tensors(self) -> list[str]:
        names = (item.name for item in fields(self))
        return [name for name in names if isinstance(getattr(self, name), torch.Tensor)]


def coded_forward(
    coded: CodedRows, rows: RaggedRows, tokens: int
) -> tuple[CodedForward, RaggedRows]:
    """Part the coded rows of a forward from the others; waits for nothing.

    Args:
        coded: Of the first rows; those behind it are not coded.
        rows: All rows of the forward, from their first entry on.
        tokens: T, query tokens, those of no row included.

    Returns:
        The coded rows, and all rows with nothing to see in coded ones.
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
    forward = CodedForward(
        step=coded.step,
        offsets=coded.offsets,
        tokens=coded.tokens,
        segments=segments.to(torch.int32),
        slots=rows.table[rows.row[owner].to(torch.int64), entry],
        first_slot=first.to(torch.int32),
        query=bounds[:-1].clamp(max=tokens - 1),
        row_of=row_of,
        coded=is_coded[row_of] & (token < bounds[-1]),
        tables=coded.tables,
    )
    end = torch.where(is_coded, rows.begin, rows.end)
    return forward, replace(rows, end=end)
