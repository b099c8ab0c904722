"""Pieces of a prompt, and the copies that compress them, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, repeat
from typing import TYPE_CHECKING

import torch

from vericache_sglang.compression.budget import coded_rows
from vericache_sglang.errors import InvariantError
from vericache_sglang.kv.joined_images import JoinedImages
from vericache_sglang.kv.segmented_residual import SegmentedResidual
from vericache_sglang.kv.selection import Chooser, PartRun
from vericache_sglang.kv.split_layers import rest_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vericache_sglang.compression.base import Selector
    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.compression.codecs.base import PartSpec
    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.kv.host_image import HostImage, RawImage
    from vericache_sglang.kv.packed_drafts import Codes
    from vericache_sglang.kv.residual import HostResidual
    from vericache_sglang.kv.selection import Look
    from vericache_sglang.kv.transfers import Transfer

    Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class HostFull:
    """Full KV of a piece on the host, in images one behind the other.

    Attributes:
        names: Segments whose image other requests may share: the first images.
        images: Every token of the piece, in order.
        opened: The images of segments that had none before, by name.
        own: The image, if any, of the tokens behind the segments, which the request
            owns.
        missing: [k] int64 on the pool's device, positions in the piece of the tokens
            of ``opened`` and ``own``, in order; k may be 0.
    """

    names: tuple[str, ...]
    images: list[RawImage]
    opened: dict[str, RawImage]
    own: list[RawImage]
    missing: torch.Tensor


@dataclass(slots=True, eq=False)
class PromptPiece:
    """Consecutive tokens of a prompt that are compressed together.

    A segment that prompts share, or the whole pages of a prompt of one request. The
    pieces of a prompt are equally long and keep equally many tokens.

    Attributes:
        first: Position in the prompt of its first token.
        budget: Its token counts; ``offered`` is its length.
        name: Name of the segment; "" if its KV belongs to one request.
        kept: [L, H, exact] int32 on the pool's device, positions in the piece kept
            exactly; None: not selected yet.
        coded: [L, H, coded] int32, likewise, positions that a codec packs.
        drafted: Its draft KV has to be written into new slots.
        on_host: Namely from its copy on the host.
        wanted: Its residual KV has to be written.
        slots: [code slots + exact] int64, slots of its draft KV; None: not allocated.
        residual: Destination of its residual KV; None: not written.
        segments: Names of its first segments, if their full KV on the host is shared.
        full: Its full KV on the host, from which residual KV is read; None without
            ``segments``.
    """

    first: int
    budget: Budget
    name: str = ""
    kept: torch.Tensor | None = None
    coded: torch.Tensor | None = None
    drafted: bool = False
    on_host: bool = False
    wanted: bool = False
    slots: torch.Tensor | None = None
    residual: HostResidual | None = None
    segments: tuple[str, ...] = ()
    full: HostFull | None = None

    @property
    def tokens(self) -> slice:
        """Its tokens in the prompt."""
        return slice(self.first, self.first + self.budget.offered)

    @property
    def exact(self) -> torch.Tensor:
        """[L, H, exact] int32, positions in the piece kept exactly.

        Raises:
            InvariantError: They are not selected yet.
        """
        if self.kept is None:
            raise InvariantError(f"no selection for the tokens from {self.first} on")
        return self.kept

    @property
    def packed(self) -> torch.Tensor:
        """[L, H, coded] int32, positions in the piece that a codec packs."""
        return self.exact[..., :0] if self.coded is None else self.coded


@dataclass(frozen=True, slots=True, eq=False)
class DraftLayer:
    """One layer of draft KV: exact entries [n, H, D], and packed segments.

    ``run``: see ``Budget.run``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    packed: list[PartSpec]
    run: int


class PieceWriter:
    """Selects the kept tokens of pieces, and copies their parts to their destination.

    All pieces of a prompt are gathered by the same kernel launches.

    Args:
        selector: Bound to the model; None: every token is kept.
        codes: Packs kept tokens of prompts of one request; None: nothing is packed.
        handles: Pool and transfers.
    """

    def __init__(
        self, selector: Selector | None, codes: Codes | None, handles: KVHandles
    ) -> None:
        self._chooser = None if selector is None else Chooser(selector, handles)
        self._codes = codes
        self._handles = handles

    def write(
        self,
        rid: str,
        pieces: Sequence[PromptPiece],
        body: torch.Tensor,
        look: Look | None,
        waiting: list[DraftLayer],
    ) -> Transfer | None:
        """Select tokens, copy draft KV to its slots and residual KV to the host.

        Args:
            rid: Request id.
            pieces: All pieces of its prompt, in order.
            body: [B] int64, its prompt's slots in token order.
            look: Selector input by layer; None: all kept tokens are already selected.
            waiting: Receives the draft KV by layer if it has no slots yet.

        Returns:
            The transfer to the host; None if no residual KV is written.

        Raises:
            TransferError: The copy could not be made.
        """
        if any(each.kept is None for each in pieces):
            self._select(rid, pieces, body, look)
        drafted = [each for each in pieces if each.drafted and not each.on_host]
        image, away = self._away(pieces)
        blocks = self._layers(drafted, away, body, waiting)
        if image is None:
            for _ in blocks if drafted else ():
                pass
            return None
        return self._handles.transfers.save(blocks, image)

    def put(self, layer: int, target: torch.Tensor, draft: DraftLayer) -> None:
        """Write one layer of draft KV into its slots, those of codes first."""
        codes = len(target) - len(draft.keys)
        self._handles.put(layer, target[codes:], draft.keys, draft.values)
        if self._codes is not None and draft.packed:
            self._codes.put(layer, target[:codes], draft.packed, draft.run)

    def _select(
        self,
        rid: str,
        pieces: Sequence[PromptPiece],
        body: torch.Tensor,
        look: Look | None,
    ) -> None:
        """Select the tokens of the pieces that have no selection."""
        groups = [list(each) for _, each in groupby(pieces, lambda each: each.budget)]
        for group, kept in zip(
            groups, self._chosen(rid, groups, body, look), strict=True
        ):
            for at, each in enumerate(group):
                if each.kept is None:
                    own = kept[:, :, at].contiguous()
                    each.kept, each.coded = coded_rows(own, each.budget)

    def _chosen(
        self,
        rid: str,
        groups: list[list[PromptPiece]],
        body: torch.Tensor,
        look: Look | None,
    ) -> list[torch.Tensor]:
        """Return [L, H, pieces, n] for consecutive pieces of equal counts."""
        if self._chooser is not None:
            if look is None:
                raise InvariantError(f"{rid} was not compressed before")
            runs = [PartRun(g[0].first, len(g), g[0].budget) for g in groups]
            return self._chooser.choose(rid, body, look, runs)
        geometry = self._handles.geometry
        found = []
        for group in groups:
            offered = group[0].budget.offered
            every = torch.arange(offered, dtype=torch.int32, device=body.device)
            shape = (geometry.layers, geometry.kv_heads, len(group), offered)
            found.append(every.expand(shape))
        return found

    def _away(
        self, pieces: Sequence[PromptPiece]
    ) -> tuple[HostImage | None, Iterator[torch.Tensor]]:
        """Return the image to fill, and by layer [H, k] the tokens that fill it.

        None if no image has to be filled.
        """
        full = pieces[0].full
        if full is not None:
            unfilled = [*full.opened.values(), *full.own]
            if not unfilled:
                return None, iter(())
            heads = self._handles.geometry.kv_heads
            every = full.missing.expand(heads, -1).contiguous()
            return JoinedImages(unfilled), repeat(every)
        opened = [each for each in pieces if each.residual is not None]
        residuals = []
        for each in opened:
            if each.residual is not None:
                each.residual.describe(each.exact, each.packed)
                residuals.append(each.residual)
        if not residuals:
            return None, iter(())
        starts = [each.first for each in opened]
        away = rest_of(
            [each.exact for each in opened], opened[0].budget.offered, starts
        )
        one = len(pieces) == 1
        return residuals[0] if one else SegmentedResidual(residuals), away

    def _layers(
        self,
        drafted: list[PromptPiece],
        away: Iterator[torch.Tensor],
        body: torch.Tensor,
        waiting: list[DraftLayer],
    ) -> Iterator[Pair]:
        """Write each layer's draft KV; yield its entries of the tokens in ``away``."""
        handles = self._handles
        slots = [each.slots for each in drafted if each.slots is not None]
        target = torch.cat(slots) if slots else None
        exact = [each.exact + each.first for each in drafted]
        coded = [each.packed + each.first for each in drafted]
        index = torch.cat(exact, dim=2) if exact else None
        packed = torch.cat(coded, dim=2) if coded else None
        run = drafted[0].budget.run if drafted else 0
        for layer in range(handles.geometry.layers):
            if index is not None and packed is not None:
                entries = handles.pick(layer, body, index[layer])
                coded_parts = self._packed(layer, body, packed[layer], run)
                draft = DraftLayer(*entries, coded_parts, run)
                if target is None:
                    waiting.append(draft)
                else:
                    self.put(layer, target, draft)
            tokens = next(away, None)
            if tokens is not None:
                yield handles.pick(layer, body, tokens)

    def _packed(
        self, layer: int, body: torch.Tensor, positions: torch.Tensor, run: int
    ) -> list[PartSpec]:
        if self._codes is None or not positions.shape[1]:
            return []
        entries = self._handles.pick(layer, body, positions)
        return self._codes.encode(layer, *entries, positions, run)


def place(pieces: Sequence[PromptPiece], fresh: torch.Tensor | None) -> None:
    """Assign slots, if there are any yet, to the draft KV that has to be written."""
    at = 0
    for each in pieces:
        if each.drafted and fresh is not None:
            each.slots = fresh[at : at + each.budget.slots]
            at += each.budget.slots
