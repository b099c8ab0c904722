"""Writes what a split has to make of a prompt's segments, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from vericache_sglang.errors import InvariantError
from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.kv.segmented_residual import SegmentedResidual
from vericache_sglang.kv.selection import Chooser, Stretch
from vericache_sglang.kv.split_layers import rest_of
from vericache_sglang.kv.swapped import gathered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vericache_sglang.compression.base import Selector
    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.kv.residual import RawResidual
    from vericache_sglang.kv.selection import Look
    from vericache_sglang.kv.transfers import Transfer
    from vericache_sglang.prefix_cache.segment_copies import SegmentCopies

    Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True, eq=False)
class Missing:
    """What a split has to make of one segment.

    Attributes:
        at: Its number in the prompt.
        name: Its name.
        kept: [L, H, n] int32 on the pool's device, its tokens that stay; None: they are
            to be chosen.
        drafted: Its draft part has to be written.
        wanted: Its complement has to be written.
        slots: [n] int64 where its draft part goes; None: it is there, or it waits.
        rest: Where its complement goes; None: it is on the host.
    """

    at: int
    name: str
    kept: torch.Tensor | None
    drafted: bool
    wanted: bool
    slots: torch.Tensor | None = None
    rest: RawResidual | None = None

    @property
    def tokens(self) -> slice:
        """Its tokens in the prompt."""
        return slice(self.at * SEGMENT, (self.at + 1) * SEGMENT)

    @property
    def chosen(self) -> torch.Tensor:
        """Its tokens that stay.

        Raises:
            InvariantError: They were not chosen.
        """
        if self.kept is None:
            raise InvariantError(f"what stays of segment {self.name} is not chosen")
        return self.kept


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """Tokens behind the last segment that the tree owns and a row has to keep.

    Attributes:
        start: The first of them.
        slots: How many, in whole pages.
        blocks: Per layer their keys and values.
        noted: [L, H, slots], their scores; None: nobody scored them.
    """

    start: int
    slots: int
    blocks: list[tuple[torch.Tensor, torch.Tensor]]
    noted: torch.Tensor | None

    def put(
        self,
        handles: KVHandles,
        copies: SegmentCopies,
        row: torch.Tensor,
        fresh: torch.Tensor,
    ) -> None:
        """Write them into slots of the row's own, and have it list those."""
        copies.give_scores(fresh, self.noted)
        for layer, (keys, values) in enumerate(self.blocks):
            handles.put(layer, fresh, keys, values)
        row[self.start : self.start + self.slots] = fresh.to(row.dtype)


class SegmentWriter:
    """Chooses what stays of segments, and copies their parts where they belong.

    All segments of a prompt are gathered together, so that the launches are those of
    one.

    Args:
        each: Counts of one segment; ``sinks`` holds for a prompt's first one only.
        selector: Bound to the model; None: nothing is ever chosen.
        handles: Pool and transfers.
    """

    def __init__(
        self, each: Budget, selector: Selector | None, handles: KVHandles
    ) -> None:
        self._each = each
        self._chooser = None if selector is None else Chooser(selector, handles)
        self._handles = handles

    def place(self, missing: list[Missing], fresh: torch.Tensor) -> None:
        """Deal slots out to the draft parts that are to be written."""
        at = 0
        for each in missing:
            if each.drafted:
                each.slots = fresh[at : at + self._each.kept]
                at += self._each.kept

    def write(
        self,
        state: RequestState,
        missing: list[Missing],
        body: torch.Tensor,
        look: Look | None,
        waiting: list[Pair] | None = None,
    ) -> Transfer | None:
        """Choose, copy draft parts to their slots and complements to the host.

        Args:
            state: The request.
            missing: What is made of its segments.
            body: [B] int64, its prompt's slots, in order.
            look: What was collected of it; None: all was chosen before.
            waiting: Where draft parts without slots are to be put, layer by layer.
        """
        if not missing:
            return None
        if any(each.kept is None for each in missing):
            self._choose(state.rid, missing, body, look)
        opened = describe(missing)
        blocks = self._split_layers(missing, body, waiting)
        if opened:
            return self._handles.transfers.save(blocks, SegmentedResidual(opened))
        for _ in blocks:
            pass
        return None

    def _choose(
        self,
        rid: str,
        missing: list[Missing],
        body: torch.Tensor,
        look: Look | None,
    ) -> None:
        if look is None or self._chooser is None:
            raise InvariantError(f"{rid} was not split before")
        others = replace(self._each, sinks=0)
        count = len(body) // SEGMENT
        stretches = [Stretch(0, 1, self._each), Stretch(SEGMENT, count - 1, others)]
        first, rest = self._chooser.choose(rid, body, look, stretches)
        for each in missing:
            if each.kept is None:
                kept = rest[:, :, each.at - 1] if each.at else first[:, :, 0]
                each.kept = kept.contiguous()

    def _split_layers(
        self, missing: list[Missing], body: torch.Tensor, waiting: list[Pair] | None
    ) -> Iterator[Pair]:
        """Yield each layer's complement entries, in prompt order."""
        handles = self._handles
        drafted = [each for each in missing if each.drafted]
        opened = [each for each in missing if each.rest is not None]
        kept = [each.chosen + each.at * SEGMENT for each in drafted]
        index = torch.cat(kept, dim=2) if drafted else None
        slots = [each.slots for each in drafted if each.slots is not None]
        target = torch.cat(slots) if slots else None
        starts = [each.at * SEGMENT for each in opened]
        away = rest_of([each.chosen for each in opened], SEGMENT, starts)
        for layer in range(handles.geometry.layers):
            draft = None if index is None else handles.pick(layer, body, index[layer])
            rest = handles.pick(layer, body, next(away)) if opened else None
            if draft is not None and target is not None:
                handles.put(layer, target, *draft)
            elif draft is not None and waiting is not None:
                waiting.append(draft)
            if rest is not None:
                yield rest

    def put_waiting(
        self, missing: list[Missing], fresh: torch.Tensor, waiting: list[Pair]
    ) -> None:
        """Write the draft parts for which our own prompt had to give way."""
        self.place(missing, fresh)
        for layer, (keys, values) in enumerate(waiting):
            self._handles.put(layer, fresh, keys, values)

    def save_permuted(
        self, state: RequestState, missing: list[Missing], body: torch.Tensor
    ) -> Transfer | None:
        """Copy the complements that lie behind a draft part, segment by segment."""
        opened = [each for each in missing if each.rest is not None]
        if not opened:
            return None
        kept, rest = state.split.budget.slots, self._each.dropped
        slots = torch.cat(
            [
                body[kept + each.at * rest : kept + (each.at + 1) * rest]
                for each in opened
            ]
        )
        pool = self._handles.pool
        blocks = gathered(pool.k_buffer, pool.v_buffer, slots)
        return self._handles.transfers.save(
            blocks, SegmentedResidual(describe(missing))
        )


def describe(missing: list[Missing]) -> list[RawResidual]:
    """Say of every complement to be written which tokens stay; return them."""
    opened = []
    for each in missing:
        if each.rest is not None:
            each.rest.describe(each.chosen, each.chosen[..., :0])
            opened.append(each.rest)
    return opened
