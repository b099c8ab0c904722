"""Forms of cached segments off the radix tree: saving and restoring each of them."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from itertools import chain
from math import nan
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from vericache_sglang.compression.budget import Budget
from vericache_sglang.compression.placed import placed
from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.kv.host_image import shapes_of
from vericache_sglang.kv.host_pages import HOST
from vericache_sglang.kv.joined_images import JoinedImages
from vericache_sglang.kv.plane_residual import PlaneResidual
from vericache_sglang.kv.split_layers import as_bits, join_layer, rest_of
from vericache_sglang.kv.stream_transfer import HeldMemory
from vericache_sglang.kv.swapped import gathered
from vericache_sglang.prefix_cache.index import SegmentIndex
from vericache_sglang.prefix_cache.segment import Form
from vericache_sglang.prefix_cache.segment_images import (
    SegmentDraft,
    SegmentImage,
    shapes_of_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.kv.host_image import HostImage, RawImage
    from vericache_sglang.kv.host_pages import HostTensor
    from vericache_sglang.kv.packed_drafts import Codes
    from vericache_sglang.kv.prefill_observer import PrefillObserver
    from vericache_sglang.kv.residual import HostResidual, RawResidual

    Pair = tuple[torch.Tensor, torch.Tensor]
    Tensors = Mapping[str, torch.Tensor]

logger = logging.getLogger(__name__)

TOGETHER = 1 << 28
"""Most bytes gathered on the device for one save, unless a segment is larger: several
segments share the launches of one gather per layer, in little device memory."""


class Save(NamedTuple):
    """A pending copy of KV entries from the pool to a host image.

    Attributes:
        name: Name of the segment.
        form: Contents of the image.
        image: Destination.
        slots: [T] int64 on the pool's device, slots of the tokens.
        kept: [L, H, n] int32, positions of tokens to leave out; None: copy all.
        hold: Keeps the image's pages allocated until the copy is queued.
    """

    name: str
    form: Form
    image: HostImage
    slots: torch.Tensor
    kept: torch.Tensor | None
    hold: HeldMemory


class SegmentCopies:
    """Full KV on the host; draft KV on the device or host; residual KV on the host.

    If tokens have scores (``Selector.update``), these are saved with the full KV or
    beside the residual KV, and restored with the tokens.

    Args:
        handles: Pool, geometry and host memory.

    Attributes:
        index: Records of all segments.
        scores: Scores of tokens by slot; None if the selector keeps none.
        codes: Packs the draft KV of segments; None: draft KV is exact.
    """

    def __init__(self, handles: KVHandles) -> None:
        self.index = SegmentIndex()
        self.scores: PrefillObserver | None = None
        self.codes: Codes | None = None
        self._handles = handles
        self._saves: list[Save] = []
        self._collecting = False

    @contextmanager
    def batched_saves(self) -> Iterator[None]:
        """Batch the saves made within this context into few launches at its end.

        Slots must not change until then; call ``flush`` before dropping an image.
        """
        self._collecting = True
        try:
            yield
        finally:
            self._collecting = False
            self.flush()

    def flush(self) -> None:
        """Queue the pending copies."""
        groups, self._saves = list(_groups(self._saves)), []
        for at, group in enumerate(groups):
            try:
                self._copy(group)
            except BaseException:
                for each in chain.from_iterable(groups[at:]):
                    each.hold.release()
                    self.index.drop_image(each.name, each.form)
                raise
            for each in group:
                each.hold.release()

    @property
    def held_bytes(self) -> int:
        """Bytes of the host pages of all segments."""
        return self.index.host_bytes

    def read(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return host copies of the KV in slots: keys and values, [L, n, H, D]."""
        pool = self._handles.pool
        slots = placed(slots, self._handles.device)
        pairs = list(gathered(pool.k_buffer, pool.v_buffer, slots))
        keys, values = (torch.stack(side).cpu() for side in zip(*pairs, strict=True))
        return {"keys": keys, "values": values}

    def scores_of(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Return the scores [L, H, n] of the tokens in slots; None without scores."""
        found = self.scores.noted(slots) if self.scores is not None else []
        return torch.stack(found) if found else None

    def read_whole(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return ``read``, and as ``noted`` the scores [L, H, n] if there are any."""
        return {**self.read(slots), **_named(self.scores_of(slots))}

    def read_parts(self, name: str) -> tuple[Tensors, Tensors] | None:
        """Return host copies of draft KV and residual KV; None unless both exist.

        Draft KV that a codec packs, and what only it restores, are bytes, see
        ``Coded``.
        """
        segment = self.index.find(name)
        part, rest = segment.draft, segment.residual
        if part is None or rest is None or not rest.sealed:
            return None
        noted = self._saved_scores(name)
        draft = {
            **self._read_draft(part),
            **_named(None if noted is None else noted.clone()),
        }
        if isinstance(rest, PlaneResidual):
            return draft, rest.stored()
        keys, values = zip(*map(rest.sides, range(rest.layers)), strict=True)
        sides = {"keys": keys, "values": values}
        return draft, {
            field: torch.stack([torch.cat(blocks) for blocks in side])
            for field, side in sides.items()
        }

    def _read_draft(self, part: SegmentDraft) -> dict[str, torch.Tensor]:
        """Return host copies of draft KV: entries or codes, and positions."""
        slots = part.slots
        if self.codes is not None and part.coded is not None:
            slots = slots[: self.codes.used(part.coded.shape[2])]
        where = {name: each.to("cpu", copy=True) for name, each in part.where.items()}
        return {**self.read(slots), **where}

    def save_whole(self, name: str, slots: torch.Tensor) -> bool:
        """Copy a segment's full KV from slots to the host; False without free pages.

        The slots may be reused at once, or after ``together``; a reader of the copy
        waits until it is complete.
        """
        return self._save_all(name, Form.WHOLE, slots, _named(self.scores_of(slots)))

    def open_whole(
        self, name: str, tokens: int, noted: torch.Tensor | None
    ) -> SegmentImage | None:
        """Allocate a segment's full KV, to be filled by the caller.

        Args:
            name: A segment without full KV on the host.
            noted: [L, H, tokens], their scores; None without scores.

        Returns:
            None without free pages; nothing was allocated.
        """
        return self._open(name, Form.WHOLE, tokens, _named(noted))

    def take_whole(self, name: str, tensors: Tensors) -> bool:
        """Copy full KV from the store in; False without free pages."""
        return self._put(name, Form.WHOLE, tensors)

    def take_split(self, name: str, draft: Tensors, rest: Tensors, tokens: int) -> bool:
        """Copy draft KV and residual KV from the store in; False without free pages."""
        own = {field: each for field, each in draft.items() if field != "noted"}
        if not self._put(name, Form.DRAFT, own):
            return False
        residual = self._open_rest(name, own[self.where], tokens)
        if residual is None:
            self.index.drop_image(name, Form.DRAFT)
            return False
        residual.fill(rest)
        self.save_scores(name, draft.get("noted"))
        return True

    @property
    def where(self) -> str:
        """The name of the positions of draft KV, see ``layout``."""
        return "kept" if self.codes is None else "coded"

    def counts(self, tokens: int, n: int) -> Budget:
        """Return the counts of a segment whose heads keep ``n`` of its tokens."""
        codes = self.codes
        return Budget(tokens, n, 0, 0) if codes is None else codes.segment(tokens, n)

    def joined(self, draft: Tensors, rest: Tensors, tokens: int) -> Tensors:
        """Return the full KV of a stored segment in token order, for any compressor.

        Args:
            draft: ``kept`` [L, H, n], ``keys`` [L, n, H, D] and ``values``; or packed.
                Scores are ignored: they are specific to the selector that made them.
            rest: ``keys`` [L, m, H, D] and ``values``; or residual planes.
            tokens: Tokens of the segment.
        """
        if self.codes is not None and "coded" in draft:
            return self.codes.whole(draft, rest, tokens)
        whole = {}
        for side in ("keys", "values"):
            layers = zip(draft[side], draft["kept"], rest[side], strict=True)
            whole[side] = torch.stack(
                [_in_order(own, kept.long(), other) for own, kept, other in layers]
            )
        return whole

    def open_residual(self, name: str, budget: Budget) -> HostResidual | None:
        """Allocate a segment's residual KV, to be filled by the caller.

        Args:
            name: A segment without residual KV.
            budget: Its counts.

        Returns:
            None without free pages; nothing was allocated.

        Raises:
            InvariantError: The segment has residual KV.
        """
        try:
            residual = self._handles.host.new(budget)
        except TransferError:
            return None
        self.index.add_image(name, Form.RESIDUAL, residual)
        return residual

    def _open_rest(
        self, name: str, where: torch.Tensor, tokens: int
    ) -> HostResidual | None:
        """Allocate a segment's residual KV, and describe it; see ``open_residual``.

        Args:
            where: [L, H, n] int32, tokens of the draft KV, packed if a codec packs it.
            tokens: Tokens of the segment.
        """
        none = where[..., :0]
        residual = self.open_residual(name, self.counts(tokens, where.shape[2]))
        if residual is not None:
            residual.describe(*((where, none) if self.codes is None else (none, where)))
        return residual

    def save_scores(self, name: str, noted: torch.Tensor | None) -> bool:
        """Save the scores of a segment's tokens beside its residual KV.

        Args:
            name: A segment with residual KV.
            noted: [L, H, tokens]; None: no scores.

        Returns:
            False without free pages: the tokens have no scores when restored.
        """
        return noted is None or self._put(name, Form.SCORES, {"noted": noted})

    def give_scores(self, slots: torch.Tensor, noted: torch.Tensor | None) -> None:
        """Set the scores of restored tokens; to NaN without saved scores.

        The previous scores of the slots are those of other tokens.
        """
        if self.scores is None:
            return
        stale = [] if noted is not None else self.scores.noted(slots)
        scores = [torch.full_like(each, nan) for each in stale]
        self.scores.note(slots, scores if noted is None else list(noted))

    def save_draft(self, name: str) -> torch.Tensor | None:
        """Move unused draft KV from the device to the host.

        Returns:
            Its slots, now owned by the caller, reusable as after ``save_whole``; None
            without free pages, and nothing is moved.
        """
        part = self.index.find(name).draft
        if part is None:
            raise InvariantError(f"no draft KV of segment {name}")
        if not self._save_all(name, Form.DRAFT, part.slots, part.where):
            return None
        return self.index.remove_draft(name).slots

    def place_draft(self, name: str, slots: torch.Tensor) -> None:
        """Write packed draft KV from the host into slots, bit by bit.

        Args:
            name: A segment with draft KV on the host, verified by the caller.
            slots: Its slots, in whole pages.
        """
        image = cast("RawImage", self.index.find(name).images[Form.DRAFT])
        pairs = _pairs(image.tensors, HOST)
        self._handles.transfers.bring(pairs, slots[: image.slots], [image.pages])

    def save_rest(self, name: str, part: SegmentDraft, slots: torch.Tensor) -> bool:
        """Copy a segment's residual KV to the host; False without free pages.

        Args:
            name: A segment without residual KV.
            part: Its draft KV.
            slots: [SEGMENT] int64, slots of all its tokens in order.
        """
        (where,) = part.where.values()
        residual = self._open_rest(name, where, len(slots))
        if residual is None:
            return False
        self._save(Form.RESIDUAL, name, residual, slots, part.kept)
        return True

    def _save_all(
        self, name: str, form: Form, slots: torch.Tensor, more: Tensors
    ) -> bool:
        """Copy all KV entries of slots to a new image; False without free pages."""
        image = self._open(name, form, len(slots), more)
        if image is None:
            return False
        self._save(form, name, image, slots)
        return True

    def _open(
        self, name: str, form: Form, tokens: int, more: Tensors
    ) -> SegmentImage | None:
        """Add an image for KV entries that holds ``more``; None without free pages."""
        handles, dtype = self._handles, self._handles.pool.k_buffer[0].dtype
        shapes = shapes_of(handles.geometry, tokens, dtype)
        shapes = {**shapes, **shapes_of_tensors(more)}
        image = SegmentImage.allocated(shapes, handles.host.page_pool)
        if image is None:
            return None
        for field, tensor in more.items():
            # From a GPU on the current stream: complete before a copy queued next.
            image.tensors[field].write(tensor)
        self.index.add_image(name, form, image)
        return image

    def _put(self, name: str, form: Form, tensors: Tensors) -> bool:
        """Copy tensors to an image of a segment; False without free pages."""
        image = SegmentImage.copied(tensors, self._handles.host.page_pool)
        if image is not None:
            self.index.add_image(name, form, image)
        return image is not None

    def _save(
        self,
        form: Form,
        name: str,
        image: HostImage,
        slots: torch.Tensor,
        kept: torch.Tensor | None = None,
    ) -> None:
        hold = HeldMemory([image.pages])
        self._saves.append(Save(name, form, image, slots, kept, hold))
        if not self._collecting:
            self.flush()

    def _copy(self, saves: Sequence[Save]) -> None:
        """Queue the copies of saves of one kind: of all tokens, or of dropped ones."""
        handles, slots = self._handles, torch.cat([each.slots for each in saves])
        image = JoinedImages([each.image for each in saves])
        kept = [each.kept for each in saves if each.kept is not None]
        blocks: Iterator[Pair]
        if kept:
            self._keep_scores(saves, slots)
            tokens = len(saves[0].slots)
            starts = range(0, len(slots), tokens)
            index = rest_of(kept, tokens, starts)
            blocks = (
                handles.pick(layer, slots, own) for layer, own in enumerate(index)
            )
        else:
            blocks = gathered(handles.pool.k_buffer, handles.pool.v_buffer, slots)
        handles.transfers.save(blocks, image)

    def _keep_scores(self, saves: Sequence[Save], slots: torch.Tensor) -> None:
        """Save the scores of segments' tokens beside their residual KV, if any."""
        noted = self.scores_of(slots)
        if noted is not None:
            parts = noted.cpu().split([len(each.slots) for each in saves], dim=2)
            for each, part in zip(saves, parts, strict=True):
                self.save_scores(each.name, part)

    def restore(self, name: str, skip: int, slots: torch.Tensor) -> None:
        """Write a segment's full KV from token ``skip`` on into slots, bit by bit.

        Args:
            name: A restorable segment.
            skip: Leading tokens to leave out.
            slots: [tokens - skip] int64, destination.

        Raises:
            TransferError: A copy is corrupt.
        """
        device, segment = self._handles.device, self.index.find(name)
        slots = placed(slots, device)
        if segment.has(Form.WHOLE):
            found = self._read(name, Form.WHOLE)
            noted = _all_layers(found.get("noted"))
            pairs = _pairs(found, device)
        else:
            noted, pairs = self._saved_scores(name), self._joined(name)
        pages = [image.pages for image in segment.images.values()]
        wanted = ((keys[skip:], values[skip:]) for keys, values in pairs)
        self._handles.transfers.bring(wanted, slots, pages)
        # After the forwards that the transfer waited for, as they also score slots.
        self.give_scores(slots, None if noted is None else noted[:, :, skip:])

    def drop_host(self, name: str) -> None:
        """Drop a segment's host copies, and its residual KV if no request uses it."""
        self.drop_copies(name)
        self.drop_residual(name)

    def drop_residual(self, name: str) -> None:
        """Drop a segment's residual KV on the host if no request uses it."""
        self.flush()
        segment = self.index.find(name)
        if segment.residual is not None and not segment.reads(Form.RESIDUAL):
            for form in (Form.RESIDUAL, Form.SCORES):
                if segment.has(form):
                    self.index.drop_image(name, form)

    def drop_copies(self, name: str) -> None:
        """Drop a segment's host copies of full KV and draft KV."""
        self.flush()
        for form in (Form.WHOLE, Form.DRAFT):
            if self.index.find(name).has(form):
                self.index.drop_image(name, form)

    def images_of(self, name: str, form: Form) -> Mapping[str, HostTensor] | None:
        """Return the tensors of a host image after verifying their checksums.

        Returns:
            Read-only tensors. None without the image, or if it is corrupt: it is
            dropped then, with its last user.
        """
        segment = self.index.find(name)
        if not segment.has(form):
            return None
        image = cast("RawImage", segment.images[form])
        try:
            for layer in range(image.layers):
                image.verify(layer)
        except TransferError:
            logger.warning("VeriCache: segment %s was damaged in host memory", name)
            self.index.discard_image(name, form)
            return None
        return image.tensors

    def _joined(self, name: str) -> Iterator[Pair]:
        """Yield each layer's full KV of a compressed segment, on the device."""
        segment = self.index.find(name)
        part, residual = segment.draft, segment.residual
        if residual is None:
            raise InvariantError(f"no residual KV of segment {name}")
        pool, device = self._handles.pool, self._handles.device
        if self.codes is not None:
            yield from self._decoded(name, self.codes, residual)
            return
        if part is not None:
            kept = placed(part.kept, device)
            drafts = gathered(pool.k_buffer, pool.v_buffer, part.slots)
        else:
            found = self._read(name, Form.DRAFT)
            kept = found["kept"].read(device=device)
            drafts = _pairs(found, device)
        rests = _pairs(cast("RawResidual", residual).tensors, device)
        for layer, draft in enumerate(drafts):
            residual.verify(layer)
            keys, values = (
                _in_order(own, kept[layer], other)
                for own, other in zip(draft, next(rests), strict=True)
            )
            yield keys, values

    def _decoded(
        self, name: str, codes: Codes, residual: HostResidual
    ) -> Iterator[Pair]:
        """Yield each layer's full KV of a segment with packed draft KV, on the host."""
        part = self.index.find(name).draft
        if part is not None:
            draft = self._read_draft(part)
        else:
            found = self._read(name, Form.DRAFT)
            draft = {field: each.read() for field, each in found.items()}
        drafts = codes.read(draft)
        for layer in range(residual.layers):
            residual.verify(layer)
            keys, values = map(torch.cat, residual.blocks(layer, drafts))
            yield keys, values

    def _saved_scores(self, name: str) -> torch.Tensor | None:
        """Return the scores saved by ``save_scores``; None if missing or corrupt."""
        found = self.images_of(name, Form.SCORES)
        return None if found is None else _all_layers(found["noted"])

    def _read(self, name: str, form: Form) -> Mapping[str, HostTensor]:
        found = self.images_of(name, form)
        if found is None:
            raise TransferError(
                f"{form.name.lower()} KV of segment {name} is damaged on the host"
            )
        return found


def _pairs(tensors: Mapping[str, HostTensor], device: torch.device) -> Iterator[Pair]:
    """Yield each layer's keys and values on a device."""
    keys, values = tensors["keys"], tensors["values"]
    for layer in range(keys.shape[0]):
        yield keys.read(layer, device), values.read(layer, device)


def _all_layers(tensor: HostTensor | None) -> torch.Tensor | None:
    """Read a host tensor, as a view if possible; None for None."""
    return None if tensor is None else tensor.read()


def _in_order(
    own: torch.Tensor, kept: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    """Return keys or values of a layer in token order, bit by bit."""
    return join_layer(as_bits(own), kept, as_bits(other)).view(own.dtype)


def _groups(saves: Sequence[Save]) -> Iterator[list[Save]]:
    """Group consecutive saves of one kind, up to ``TOGETHER`` bytes or one save."""
    group: list[Save] = []
    for each in saves:
        full = sum(own.image.nbytes for own in group) + each.image.nbytes > TOGETHER
        if group and (full or (group[0].kept is None) is not (each.kept is None)):
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _named(noted: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return scores as the field ``noted``; {} for None."""
    return {} if noted is None else {"noted": noted}
