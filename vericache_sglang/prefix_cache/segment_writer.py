"""Writes the missing draft KV and residual KV of segments, layer by layer."""

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
    """A segment that lacks draft KV, residual KV or both.

    Attributes:
        at: Its index in the prompt, in segments.
        name: Its name.
        kept: [L, H, n] int32 on the pool's device, positions in the segment of its kept
            tokens; None: not selected yet.
        drafted: Its draft KV has to be written.
        wanted: Its residual KV has to be written.
        slots: [n] int64, destination of its draft KV; None: it exists, or its slots are
            allocated later.
        rest: Destination of its residual KV; None: not written, as the host has it.
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
        """Positions of its kept tokens, [L, H, n] int32.

        Raises:
            InvariantError: They are not selected yet.
        """
        if self.kept is None:
            raise InvariantError(f"what stays of segment {self.name} is not chosen")
        return self.kept


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """KV of the tree-owned tokens after the last segment, which a request copies.

    Attributes:
        start: Position of the first of them.
        slots: Their number, in whole pages.
        blocks: Keys and values of each layer.
        noted: [L, H, slots], their scores; None without scores.
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
        """Write them into request-owned slots, and list these in the block table."""
        copies.give_scores(fresh, self.noted)
        for layer, (keys, values) in enumerate(self.blocks):
            handles.put(layer, fresh, keys, values)
        row[self.start : self.start + self.slots] = fresh.to(row.dtype)


class SegmentWriter:
    """Selects the kept tokens of segments, and copies their parts to their destination.

    All segments of a prompt are gathered by the same kernel launches.

    Args:
        each: Token counts of one segment; ``sinks`` applies to a prompt's first only.
        selector: Bound to the model; None: tokens are never selected here.
        handles: Pool and transfers.
    """

    def __init__(
        self, each: Budget, selector: Selector | None, handles: KVHandles
    ) -> None:
        self._each = each
        self._chooser = None if selector is None else Chooser(selector, handles)
        self._handles = handles

    def place(self, missing: list[Missing], fresh: torch.Tensor) -> None:
        """Assign slots to the draft KV that has to be written."""
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
        """Select tokens, copy draft KV to its slots and residual KV to the host.

        Args:
            state: The request.
            missing: Its segments that lack parts.
            body: [B] int64, its prompt's slots in token order.
            look: Selector input by layer; None: all kept tokens are already selected.
            waiting: Receives the draft KV without slots, one pair per layer.

        Returns:
            The transfer to the host; None if no residual KV is written.
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
        """Write each layer's draft KV; yield its residual KV in prompt order."""
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
        """Write the draft KV that waited for the slots of its own prompt."""
        self.place(missing, fresh)
        for layer, (keys, values) in enumerate(waiting):
            self._handles.put(layer, fresh, keys, values)

    def save_permuted(
        self, state: RequestState, missing: list[Missing], body: torch.Tensor
    ) -> Transfer | None:
        """Copy the residual KV after the draft KV of a permuted row to the host."""
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
    """Record the kept tokens in the residual KV to be written; return that KV."""
    opened = []
    for each in missing:
        if each.rest is not None:
            each.rest.describe(each.chosen, each.chosen[..., :0])
            opened.append(each.rest)
    return opened
