"""Writes what a split has to make of a prompt's segments, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from vericache_sglang.compression.budget import keep_indices
from vericache_sglang.engine.segment_copies import describe
from vericache_sglang.errors import CompressionError, InvariantError
from vericache_sglang.memory.parked import gathered
from vericache_sglang.memory.segmented import SegmentedComplement
from vericache_sglang.memory.segments import SEGMENT
from vericache_sglang.memory.splitting import pick, pick_rest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vericache_sglang.compression.base import Seen, Selector
    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.engine.places import Places
    from vericache_sglang.engine.segment_copies import SegmentCopies
    from vericache_sglang.engine.state import RequestState
    from vericache_sglang.memory.complement import RawComplement
    from vericache_sglang.memory.transfers import Transfer

    Look = Callable[[int], Seen]
    """What was collected of a prompt, by layer."""


@dataclass(slots=True, eq=False)
class Missing:
    """What a split has to make of one segment.

    Attributes:
        at: Its number in the prompt.
        name: Its name.
        kept: [L, H, n] int32 on the CPU, its tokens that stay.
        chosen: They are known already.
        drafted: Its draft part has to be written.
        wanted: Its complement has to be written.
        slots: [n] int64 where its draft part goes; None: it is there, or it waits.
        rest: Where its complement goes; None: it is on the host.
        waiting: Per layer kept keys and values, for slots that are not free yet.
    """

    at: int
    name: str
    kept: torch.Tensor
    chosen: bool
    drafted: bool
    wanted: bool
    slots: torch.Tensor | None = None
    rest: RawComplement | None = None
    waiting: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def tokens(self) -> slice:
        """Its tokens in the prompt."""
        return slice(self.at * SEGMENT, (self.at + 1) * SEGMENT)


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
        places: Places,
        copies: SegmentCopies,
        row: torch.Tensor,
        fresh: torch.Tensor,
    ) -> None:
        """Write them into slots of the row's own, and have it list those."""
        copies.give_scores(fresh, self.noted)
        for layer, (keys, values) in enumerate(self.blocks):
            places.put(layer, fresh, keys, values)
        row[self.start : self.start + self.slots] = fresh.to(row.dtype)


class SegmentWriter:
    """Chooses what stays of segments, and copies their parts where they belong.

    Args:
        each: Counts of one segment; ``sinks`` holds for a prompt's first one only.
        selector: Bound to the model; None: nothing is ever chosen.
        places: Pool and transfers.
    """

    def __init__(self, each: Budget, selector: Selector | None, places: Places) -> None:
        self._each = each
        self._selector = selector
        self._places = places

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
    ) -> Transfer | None:
        """Choose, copy draft parts to their slots and complements to the host."""
        if not missing:
            return None
        blocks = self._split_layers(state, missing, body, look)
        opened = [each.rest for each in missing if each.rest is not None]
        if opened:
            image = SegmentedComplement(opened)
            return self._places.transfers.save(blocks, image)
        for _ in blocks:
            pass
        return None

    def _split_layers(
        self,
        state: RequestState,
        missing: list[Missing],
        body: torch.Tensor,
        look: Look | None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each layer's complement entries, in prompt order."""
        pool = self._places.pool
        choosing = not all(each.chosen for each in missing)
        blocks = gathered(pool.k_buffer, pool.v_buffer, body)
        for layer, (keys, values) in enumerate(blocks):
            if choosing:
                self._choose(state.rid, layer, keys, values, missing, look)
            leaving = []
            for each in missing:
                own = keys[each.tokens], values[each.tokens]
                kept = each.kept[layer].to(keys.device, torch.int64)
                if each.drafted:
                    self._put(layer, each, pick(own[0], kept), pick(own[1], kept))
                if each.rest is not None:
                    describe(each.rest, layer, each.kept[layer])
                    leaving.append(pick_rest(*own, kept))
            if leaving:
                yield (
                    torch.cat([k for k, _ in leaving]),
                    torch.cat([v for _, v in leaving]),
                )
            else:
                yield keys[:0], values[:0]

    def _choose(
        self,
        rid: str,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        missing: list[Missing],
        look: Look | None,
    ) -> None:
        if look is None or self._selector is None:
            raise InvariantError(f"{rid} was not split before")
        scores = self._selector.scores(
            rid, layer, keys.transpose(0, 1), values.transpose(0, 1), look(layer)
        )
        if scores.dim() != 2 or scores.shape[1] != len(keys):
            raise CompressionError(
                f"scores must be [heads, {len(keys)}], got {tuple(scores.shape)}"
            )
        for each in missing:
            if not each.chosen:
                sinks = self._each.sinks if each.at == 0 else 0
                budget = replace(self._each, sinks=sinks)
                kept = keep_indices(scores[:, each.tokens], budget)
                each.kept[layer].copy_(kept)

    def _put(
        self, layer: int, each: Missing, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        if each.slots is None:
            each.waiting.append((keys, values))
        else:
            self._places.put(layer, each.slots, keys, values)

    def put_waiting(self, missing: list[Missing], fresh: torch.Tensor) -> None:
        """Write the draft parts for which our own prompt had to give way."""
        self.place(missing, fresh)
        for each in missing:
            for layer, (keys, values) in enumerate(each.waiting):
                self._put(layer, each, keys, values)

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
        pool = self._places.pool

        def leaving() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            blocks = gathered(pool.k_buffer, pool.v_buffer, slots)
            for layer, block in enumerate(blocks):
                for each in opened:
                    if each.rest is not None:
                        describe(each.rest, layer, each.kept[layer])
                yield block

        image = SegmentedComplement([e.rest for e in opened if e.rest is not None])
        return self._places.transfers.save(leaving(), image)
