"""The forms of a cached segment off the radix tree, and the way back from each."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from vericache_sglang.engine.draft_shelf import DraftPart, DraftShelf
from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.memory.parked import gathered
from vericache_sglang.memory.splitting import as_bits, join_layer, pick_rest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vericache_sglang.engine.places import Places
    from vericache_sglang.engine.prompt_watch import PromptWatch
    from vericache_sglang.memory.segment_complements import SegmentComplements
    from vericache_sglang.memory.segment_pool import SegmentPool

    Pair = tuple[torch.Tensor, torch.Tensor]
    Tensors = Mapping[str, torch.Tensor]


class SegmentCopies:
    """Whole copies on the host; draft parts on the device or host, and complements.

    Args:
        places: Pool and geometry.
        pool: Whole copies and draft parts on the host.
        complements: Complements on the host.

    Attributes:
        scores: Knows the scores of tokens by slot; None: nobody scores them.
    """

    def __init__(
        self, places: Places, pool: SegmentPool, complements: SegmentComplements
    ) -> None:
        self.shelf = DraftShelf()
        self.complements = complements
        self.scores: PromptWatch | None = None
        self._places = places
        self._pool = pool

    def has_whole(self, name: str) -> bool:
        """Say whether a whole copy is on the host."""
        return _whole(name) in self._pool

    def has_draft_on_host(self, name: str) -> bool:
        """Say whether the draft part is on the host."""
        return _draft(name) in self._pool

    def restorable(self, name: str) -> bool:
        """Say whether there is enough to bring a segment back."""
        if self.has_whole(name):
            return True
        rest = self.complements.get(name)  # sealed once its copy has arrived
        draft = name in self.shelf or self.has_draft_on_host(name)
        return draft and rest is not None and rest.sealed

    @property
    def held_bytes(self) -> int:
        """Bytes of the host arena that copies and complements take."""
        return self._pool.used_bytes + self.complements.used_bytes

    def shortfall(self, nbytes: int) -> int:
        """Return the bytes that should leave the arena before as many come."""
        return self._pool.shortfall(nbytes)

    @property
    def evictable_bytes(self) -> int:
        """Bytes of the host arena that nobody holds."""
        return self._pool.evictable_bytes + self.complements.evictable_bytes

    @contextmanager
    def kept_back(self, names: Sequence[str]) -> Iterator[None]:
        """Keep what there is of segments where it is meanwhile."""
        listed = [name for name in names if name in self.shelf]
        held = [name for name in names if name in self.complements]
        copies = [each(name) for name in names for each in (_whole, _draft)]
        copies = [copy for copy in copies if copy in self._pool]
        self.shelf.take(listed)
        self.complements.hold(held)
        for copy in copies:
            self._pool.pin(copy)
        try:
            yield
        finally:
            for copy in copies:
                self._pool.unpin(copy)
            self.complements.let_go(held)
            self.shelf.give(listed)

    def read(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return copies on the host: keys [L, n, H, D] and values of these slots."""
        pool = self._places.pool
        slots = slots.to(pool.k_buffer[0].device)
        blocks = gathered(pool.k_buffer, pool.v_buffer, slots)
        keys, values = zip(*((k.cpu(), v.cpu()) for k, v in blocks), strict=True)
        return {"keys": torch.stack(keys), "values": torch.stack(values)}

    def read_whole(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return ``read`` with the tokens' scores [L, H, n], where there are any."""
        noted = self.scores.noted(slots) if self.scores is not None else []
        return {**self.read(slots), **({"noted": torch.stack(noted)} if noted else {})}

    def read_parts(self, name: str) -> tuple[Tensors, Tensors] | None:
        """Return copies of a segment's draft part and complement, where both are."""
        part, rest = self.shelf.get(name), self.complements.get(name)
        if part is None or rest is None or not rest.sealed:
            return None
        draft = {**self.read(part.slots), "kept": part.kept.clone()}
        return draft, {"keys": rest.keys.clone(), "values": rest.values.clone()}

    def save_whole(self, name: str, slots: torch.Tensor) -> bool:
        """Copy a segment from its slots to the host; False without room."""
        return self._pool.put(_whole(name), self.read_whole(slots))

    def take_whole(self, name: str, tensors: Tensors) -> bool:
        """Take a whole segment in that was stored; False without room."""
        return self._pool.put(_whole(name), tensors)

    def take_split(self, name: str, draft: Tensors, rest: Tensors) -> bool:
        """Take a segment's two parts in that were stored; False without room."""
        kept = draft["kept"]
        if not self._pool.put(_draft(name), draft):
            return False
        try:
            slots = rest["keys"].shape[1]
            complement = self.complements.open(name, slots, kept.shape[2])
        except TransferError:
            self._pool.drop(_draft(name))
            return False
        for layer, pair in enumerate(zip(rest["keys"], rest["values"], strict=True)):
            complement.describe(layer, kept[layer], kept[layer][:, :0])
            complement.write(layer, *pair)
        return True

    def save_draft(self, name: str) -> torch.Tensor | None:
        """Move a draft part nobody lists from the shelf to the host.

        Returns:
            Its slots, the caller's now; None without room, and it stays.
        """
        part = self.shelf.get(name)
        if part is None:
            raise InvariantError(f"no draft part of segment {name}")
        tensors = {**self.read(part.slots), "kept": part.kept}
        if not self._pool.put(_draft(name), tensors):
            return None
        return self.shelf.remove(name).slots

    def save_rest(self, name: str, part: DraftPart, slots: torch.Tensor) -> bool:
        """Copy to the host what a segment's draft part lacks; False without room.

        Args:
            name: A segment without a complement.
            part: Its draft part.
            slots: [SEGMENT] int64, all its tokens in order.
        """
        n = part.kept.shape[2]
        try:
            complement = self.complements.open(name, len(slots) - n, n)
        except TransferError:
            return False
        pool = self._places.pool
        slots = slots.to(pool.k_buffer[0].device)
        for layer, pair in enumerate(gathered(pool.k_buffer, pool.v_buffer, slots)):
            kept = part.kept[layer]
            complement.describe(layer, kept, kept[:, :0])
            keys, values = pick_rest(*pair, kept)
            complement.write(layer, keys, values)
        return True

    def restore(self, name: str, skip: int, slots: torch.Tensor) -> None:
        """Write a segment's tokens from ``skip`` on into slots, bit by bit.

        Args:
            name: Restorable.
            skip: Tokens of it that are not wanted.
            slots: [tokens - skip] int64.

        Raises:
            TransferError: A copy is damaged.
        """
        if self.has_whole(name):
            found = self._read(_whole(name))
            if self.scores is not None and "noted" in found:
                self.scores.note(slots, list(found["noted"][:, :, skip:]))
            pairs: Iterator[Pair] = zip(found["keys"], found["values"], strict=True)
        else:
            pairs = self._joined(name)
        for layer, (keys, values) in enumerate(pairs):
            self._places.put(layer, slots, keys[skip:], values[skip:])

    def drop_host(self, name: str) -> None:
        """Forget what the host has of a segment and no request refers to."""
        self.drop_copies(name)
        if name in self.complements and not self.complements.is_held(name):
            self.complements.drop(name)

    def drop_copies(self, name: str) -> None:
        """Forget the copies on the host of what other forms hold."""
        for copy in (_whole(name), _draft(name)):
            if copy in self._pool:
                self._pool.drop(copy)

    def clear(self) -> None:
        """Forget everything; no request holds anything, and no slot is ours."""
        self.shelf.clear()
        self.complements.clear()
        for copy in list(self._pool.names()):
            self._pool.drop(copy)

    def _joined(self, name: str) -> Iterator[Pair]:
        """Yield each layer of a split segment in order, on the host."""
        complement = self.complements.get(name)
        if complement is None:
            raise InvariantError(f"no complement of segment {name}")
        part = self.shelf.get(name)
        pool = self._places.pool
        if part is not None:
            kept = part.kept
            drafts = gathered(pool.k_buffer, pool.v_buffer, part.slots)
        else:
            found = self._read(_draft(name))
            kept = found["kept"]
            drafts = zip(found["keys"], found["values"], strict=True)
        for layer, draft in enumerate(drafts):
            complement.verify(layer)
            rest = complement.keys[layer], complement.values[layer]
            where = kept[layer].to("cpu", torch.int64)
            keys, values = (
                _in_order(own.cpu(), where, other)
                for own, other in zip(draft, rest, strict=True)
            )
            yield keys, values

    def _read(self, copy: str) -> Mapping[str, torch.Tensor]:
        found = self._pool.get(copy)
        if found is None:
            raise TransferError(f"the host copy {copy} is damaged")
        return found


def joined(draft: Tensors, rest: Tensors) -> dict[str, torch.Tensor]:
    """Return a stored segment in order, whatever made its two parts.

    Args:
        draft: ``kept`` [L, H, n], ``keys`` [L, n, H, D] and ``values``.
        rest: ``keys`` [L, m, H, D] and ``values``.
    """
    whole = {}
    for side in ("keys", "values"):
        layers = zip(draft[side], draft["kept"], rest[side], strict=True)
        whole[side] = torch.stack(
            [_in_order(own, kept.to(torch.int64), other) for own, kept, other in layers]
        )
    return whole


def _in_order(
    own: torch.Tensor, kept: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    """Return one side of a layer in order of position, bit for bit."""
    return join_layer(as_bits(own), kept, as_bits(other)).view(own.dtype)


def _whole(name: str) -> str:
    return f"{name}.whole"


def _draft(name: str) -> str:
    return f"{name}.draft"
