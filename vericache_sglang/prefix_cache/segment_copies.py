"""Forms of cached segments off the radix tree: saving and restoring each of them."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import partial
from itertools import chain
from math import nan
from typing import TYPE_CHECKING, NamedTuple

import torch

from vericache_sglang.compression.placed import placed
from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.kv.joined_images import JoinedImages
from vericache_sglang.kv.split_layers import as_bits, join_layer, rest_of
from vericache_sglang.kv.stream_transfer import HeldMemory
from vericache_sglang.kv.swapped import gathered
from vericache_sglang.prefix_cache.draft_segments import DraftSegmentPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.kv.host_image import HostImage
    from vericache_sglang.kv.host_pages import HostTensor
    from vericache_sglang.kv.prefill_observer import PromptWatch
    from vericache_sglang.kv.residual import RawResidual
    from vericache_sglang.prefix_cache.host_pool import SegmentPool
    from vericache_sglang.prefix_cache.segment_images import DraftPart
    from vericache_sglang.prefix_cache.segment_residuals import SegmentResiduals

    Pair = tuple[torch.Tensor, torch.Tensor]
    Tensors = Mapping[str, torch.Tensor]

TOGETHER = 1 << 28
"""Most bytes gathered on the device for one save, unless a segment is larger: several
segments share the launches of one gather per layer, in little device memory."""


class Save(NamedTuple):
    """A pending copy of KV entries from the pool to a host image.

    Attributes:
        name: Name of the segment or copy.
        image: Destination.
        slots: [T] int64 on the pool's device, slots of the tokens.
        kept: [L, H, n] int32, positions of tokens to leave out; None: copy all.
        drop: Removes the image if the copy fails.
        hold: Keeps the image's pages allocated until the copy is queued.
    """

    name: str
    image: HostImage
    slots: torch.Tensor
    kept: torch.Tensor | None
    drop: Callable[[], object]
    hold: HeldMemory


class SegmentCopies:
    """Full KV on the host; draft KV on the device or host; residual KV on the host.

    If tokens have scores (``Selector.update``), these are saved with the full KV or
    beside the residual KV, and restored with the tokens.

    Args:
        handles: Pool and geometry.
        pool: Full KV, draft KV and scores on the host.
        residuals: Residual KV on the host.

    Attributes:
        scores: Scores of tokens by slot; None if the selector keeps none.
    """

    def __init__(
        self, handles: KVHandles, pool: SegmentPool, residuals: SegmentResiduals
    ) -> None:
        self.draft_pool = DraftSegmentPool()
        self.residuals = residuals
        self.scores: PromptWatch | None = None
        self._handles = handles
        self._pool = pool
        self._kept_back: Counter[str] = Counter()
        self._saves: list[Save] = []
        self._collecting = False

    @contextmanager
    def together(self) -> Iterator[None]:
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
                    each.hold.let_go()
                    each.drop()
                raise
            for each in group:
                each.hold.let_go()

    def has_whole(self, name: str) -> bool:
        """Return whether full KV of a segment is on the host."""
        return _whole(name) in self._pool

    def has_draft_on_host(self, name: str) -> bool:
        """Return whether draft KV of a segment is on the host."""
        return _draft(name) in self._pool

    def restorable(self, name: str) -> bool:
        """Return whether the copies suffice to restore a segment."""
        if self.has_whole(name):
            return True
        rest = self.residuals.get(name)  # sealed when its copy is complete
        draft = name in self.draft_pool or self.has_draft_on_host(name)
        return draft and rest is not None and rest.sealed

    @property
    def held_bytes(self) -> int:
        """Bytes of the host pages of all copies and residual KV."""
        return self._pool.used_bytes + self.residuals.used_bytes

    @property
    def evictable_bytes(self) -> int:
        """Bytes of the host pages without a pin or reference."""
        return self._pool.evictable_bytes + self.residuals.evictable_bytes

    def unused_bytes(self, name: str) -> int:
        """Return the bytes of ``evictable_bytes`` that belong to this segment."""
        copies = [each(name) for each in (_whole, _draft, _scores)]
        nbytes = sum(
            self._pool.nbytes(copy)
            for copy in copies
            if copy in self._pool and not self._kept_back[copy]
        )
        rest = self.residuals.get(name)
        if rest is not None and not self.residuals.is_held(name):
            nbytes += rest.held_bytes
        return nbytes

    @contextmanager
    def kept_back(self, names: Sequence[str]) -> Iterator[None]:
        """Protect the existing parts of segments within this context."""
        listed = [name for name in names if name in self.draft_pool]
        held = [name for name in names if name in self.residuals]
        forms = (_whole, _draft, _scores)
        copies = [each(name) for name in names for each in forms]
        copies = [copy for copy in copies if copy in self._pool]
        self.draft_pool.take(listed)
        self.residuals.hold(held)
        for copy in copies:
            self._pool.pin(copy)
        self._kept_back.update(copies)
        try:
            yield
        finally:
            self._kept_back -= Counter(copies)
            for copy in copies:
                self._pool.unpin(copy)
            self.residuals.let_go(held)
            self.draft_pool.give(listed)

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
        """Return host copies of draft KV and residual KV; None unless both exist."""
        part, rest = self.draft_pool.get(name), self.residuals.get(name)
        if part is None or rest is None or not rest.sealed:
            return None
        noted = self._saved_scores(name)
        draft = {
            **self.read(part.slots),
            "kept": part.kept.to("cpu", copy=True),
            **_named(None if noted is None else noted.clone()),
        }
        return draft, {"keys": rest.keys.clone(), "values": rest.values.clone()}

    def save_whole(self, name: str, slots: torch.Tensor) -> bool:
        """Copy a segment's full KV from slots to the host; False without free pages.

        The slots may be reused at once, or after ``together``; a reader of the copy
        waits until it is complete.
        """
        return self._save_all(_whole(name), slots, _named(self.scores_of(slots)))

    def take_whole(self, name: str, tensors: Tensors) -> bool:
        """Copy full KV from the store in; False without free pages."""
        return self._pool.put(_whole(name), tensors)

    def take_split(self, name: str, draft: Tensors, rest: Tensors) -> bool:
        """Copy draft KV and residual KV from the store in; False without free pages."""
        kept = draft["kept"]
        own = {field: draft[field] for field in ("keys", "values", "kept")}
        if not self._pool.put(_draft(name), own):
            return False
        residual = self.open_residual(name, rest["keys"].shape[1], kept.shape[2])
        if residual is None:
            self._pool.drop(_draft(name))
            return False
        residual.describe(kept, kept[..., :0])
        for layer, pair in enumerate(zip(rest["keys"], rest["values"], strict=True)):
            residual.write(layer, *pair)
        self.save_scores(name, draft.get("noted"))
        return True

    def open_residual(self, name: str, slots: int, kept: int) -> RawResidual | None:
        """Allocate a segment's residual KV, to be filled by the caller.

        Args:
            name: A segment without residual KV.
            slots: Its dropped tokens.
            kept: Its kept tokens.

        Returns:
            None without free pages; nothing was allocated.
        """
        try:
            return self.residuals.open(name, slots, kept)
        except TransferError:
            return None

    def save_scores(self, name: str, noted: torch.Tensor | None) -> bool:
        """Save the scores of a segment's tokens beside its residual KV.

        Args:
            name: A segment with residual KV.
            noted: [L, H, tokens]; None: no scores.

        Returns:
            False without free pages: the tokens have no scores when restored.
        """
        return noted is None or self._pool.put(_scores(name), {"noted": noted})

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
        """Move unused draft KV from the draft-segment pool to the host.

        Returns:
            Its slots, now owned by the caller, reusable as after ``save_whole``; None
            without free pages, and nothing is moved.
        """
        part = self.draft_pool.get(name)
        if part is None:
            raise InvariantError(f"no draft part of segment {name}")
        if not self._save_all(_draft(name), part.slots, {"kept": part.kept}):
            return None
        return self.draft_pool.remove(name).slots

    def save_rest(self, name: str, part: DraftPart, slots: torch.Tensor) -> bool:
        """Copy a segment's residual KV to the host; False without free pages.

        Args:
            name: A segment without residual KV.
            part: Its draft KV.
            slots: [SEGMENT] int64, slots of all its tokens in order.
        """
        n = part.kept.shape[2]
        residual = self.open_residual(name, len(slots) - n, n)
        if residual is None:
            return False
        residual.describe(part.kept, part.kept[..., :0])
        self._save(
            Save(
                name,
                residual,
                slots,
                part.kept,
                partial(self.residuals.drop, name),
                HeldMemory([residual.pages]),
            )
        )
        return True

    def _save_all(self, copy: str, slots: torch.Tensor, more: Tensors) -> bool:
        """Copy all KV entries of slots under a name; False without free pages."""
        pool, geometry = self._handles.pool, self._handles.geometry
        dtype = pool.k_buffer[0].dtype
        image = self._pool.open(copy, geometry, len(slots), dtype, more)
        if image is None:
            return False
        drop = partial(self._pool.drop, copy)
        self._save(Save(copy, image, slots, None, drop, HeldMemory([image.pages])))
        return True

    def _save(self, save: Save) -> None:
        self._saves.append(save)
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
        device = self._handles.device
        slots = placed(slots, device)
        if self.has_whole(name):
            found = self._read(_whole(name))
            noted = _all_layers(found.get("noted"))
            pairs = _pairs(found, device)
        else:
            noted, pairs = self._saved_scores(name), self._joined(name)
        rest = self.residuals.get(name)
        pages = [rest.pages] if rest is not None else []
        copies = (_whole(name), _draft(name))
        pages += [self._pool.pages(copy) for copy in copies if copy in self._pool]
        wanted = ((keys[skip:], values[skip:]) for keys, values in pairs)
        self._handles.transfers.bring(wanted, slots, pages)
        # After the forwards that the transfer waited for, as they also score slots.
        self.give_scores(slots, None if noted is None else noted[:, :, skip:])

    def drop_host(self, name: str) -> None:
        """Drop a segment's host copies, and its residual KV if no request holds it."""
        self.drop_copies(name)
        self.drop_residual(name)

    def drop_residual(self, name: str) -> None:
        """Drop a segment's residual KV on the host if no request holds it."""
        self.flush()
        if name in self.residuals and not self.residuals.is_held(name):
            self.residuals.drop(name)
            self._pool.drop(_scores(name))

    def drop_copies(self, name: str) -> None:
        """Drop a segment's host copies of full KV and draft KV."""
        self.flush()
        for copy in (_whole(name), _draft(name)):
            if copy in self._pool:
                self._pool.drop(copy)

    def clear(self) -> None:
        """Drop everything; the caller has ended all use, and SGLang owns all slots."""
        self.draft_pool.clear()
        self.residuals.clear()
        for copy in list(self._pool.names()):
            self._pool.drop(copy)

    def _joined(self, name: str) -> Iterator[Pair]:
        """Yield each layer's full KV of a compressed segment, on the device."""
        residual = self.residuals.get(name)
        if residual is None:
            raise InvariantError(f"no complement of segment {name}")
        part = self.draft_pool.get(name)
        pool, device = self._handles.pool, self._handles.device
        if part is not None:
            kept = placed(part.kept, device)
            drafts = gathered(pool.k_buffer, pool.v_buffer, part.slots)
        else:
            found = self._read(_draft(name))
            kept = found["kept"].read(device=device)
            drafts = _pairs(found, device)
        rests = _pairs(residual.tensors, device)
        for layer, draft in enumerate(drafts):
            residual.verify(layer)
            keys, values = (
                _in_order(own, kept[layer], other)
                for own, other in zip(draft, next(rests), strict=True)
            )
            yield keys, values

    def _saved_scores(self, name: str) -> torch.Tensor | None:
        """Return the scores saved by ``save_scores``; None if missing or corrupt."""
        found = self._pool.get(_scores(name))
        return None if found is None else _all_layers(found["noted"])

    def _read(self, copy: str) -> Mapping[str, HostTensor]:
        found = self._pool.get(copy)
        if found is None:
            raise TransferError(f"the host copy {copy} is damaged")
        return found


def joined(draft: Tensors, rest: Tensors) -> dict[str, torch.Tensor]:
    """Return the full KV of a stored segment in token order, for any compressor.

    Args:
        draft: ``kept`` [L, H, n], ``keys`` [L, n, H, D] and ``values``. Scores are
            ignored: they are specific to the selector that made the parts.
        rest: ``keys`` [L, m, H, D] and ``values``.
    """
    whole = {}
    for side in ("keys", "values"):
        layers = zip(draft[side], draft["kept"], rest[side], strict=True)
        whole[side] = torch.stack(
            [_in_order(own, kept.to(torch.int64), other) for own, kept, other in layers]
        )
    return whole


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


def _whole(name: str) -> str:
    return f"{name}.whole"


def _draft(name: str) -> str:
    return f"{name}.draft"


def _scores(name: str) -> str:
    return f"{name}.scores"
