"""What left the device, by request, under a fixed budget of host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.memory.complement import Complement, RawComplement
from vericache_sglang.memory.parked import ParkedImage
from vericache_sglang.memory.residual import ResidualComplement

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.compression.codecs.base import Codec
    from vericache_sglang.memory.geometry import KVGeometry

INDEX_BYTES = 4
"""Bytes of one kept position (``Complement.kept`` is int32)."""


@dataclass(slots=True, eq=False)
class _Group:
    """A complement, how many requests refer to it, and the bytes it counts as."""

    name: str
    complement: Complement
    holders: int
    booked: int


class HostStore:
    """Complements and parked images under a fixed budget of host bytes.

    A request holds at most one of each. Complements with the same content may be
    shared (``share``); the bytes then count once. Not thread-safe: the engine's loop
    is its only caller.

    Args:
        geometry: Shapes of the pool the entries come from.
        dtype: Dtype of the pool.
        budget_bytes: Most bytes held at once.
        codec: What packs draft parts; None: nothing is packed.

    Raises:
        InvariantError: ``geometry`` and ``dtype`` differ in bytes per element.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        dtype: torch.dtype,
        budget_bytes: int,
        codec: Codec | None = None,
    ) -> None:
        if geometry.element_bytes != dtype.itemsize:
            raise InvariantError(f"{geometry.element_bytes} bytes for a {dtype}")
        self.geometry = geometry
        self.dtype = dtype
        self.budget_bytes = budget_bytes
        self._codec = codec
        self._used = 0
        self._opened = 0
        self._groups: dict[str, _Group] = {}
        self._of_request: dict[str, _Group] = {}
        self._parked: dict[str, ParkedImage] = {}

    @property
    def used_bytes(self) -> int:
        """Host bytes held now, shared ones once; O(1)."""
        return self._used

    @property
    def free_bytes(self) -> int:
        """Host bytes left of the budget."""
        return self.budget_bytes - self._used

    def complement_bytes(self, budget: Budget) -> int:
        """Return the most bytes of a complement, its kept positions included.

        Exact for one that holds entries; a residual is never larger than they are.
        """
        positions = self.geometry.layers * self.geometry.kv_heads * budget.exact
        return budget.staged * self.geometry.token_bytes + positions * INDEX_BYTES

    def parked_bytes(self, slots: int) -> int:
        """Return the exact bytes of a parked image of ``slots`` slots."""
        return slots * self.geometry.token_bytes

    def fits(self, nbytes: int) -> bool:
        """Say whether ``nbytes`` more bytes are within the budget."""
        return nbytes <= self.free_bytes

    def fits_complement(self, budget: Budget) -> bool:
        """Say whether ``open`` with these counts is within the budget."""
        return self.fits(self.complement_bytes(budget))

    def open(self, rid: str, budget: Budget) -> Complement:
        """Allocate a complement for a request; the caller fills and seals it.

        Args:
            rid: Request id, holding no complement yet.
            budget: Counts of its prompt.

        Raises:
            TransferError: It is over the budget; nothing was allocated.
            InvariantError: The request has a complement.
        """
        if rid in self._of_request:
            raise InvariantError(f"{rid} has a complement already")
        most = self.complement_bytes(budget)
        self._require_room(most)
        group = _Group(f"complement-{self._opened}", self._new(budget), 1, most)
        self._opened += 1
        self._groups[group.name] = self._of_request[rid] = group
        self._used += most
        return group.complement

    def settle(self, rid: str) -> None:
        """Count a complement as what it holds, now that it is filled."""
        group = self._group(rid)
        self._used += group.complement.nbytes - group.booked
        group.booked = group.complement.nbytes

    def park(self, rid: str, slots: int) -> ParkedImage:
        """Allocate a parked image for a request; the caller fills it.

        Args:
            rid: Request id, holding no parked image yet.
            slots: Slots the request has on the device, >= 1.

        Raises:
            TransferError: It is over the budget; nothing was allocated.
            InvariantError: The request is parked.
        """
        if rid in self._parked:
            raise InvariantError(f"{rid} is parked already")
        self._require_room(self.parked_bytes(slots))
        image = self._parked[rid] = ParkedImage(self.geometry, slots, self.dtype)
        self._used += image.nbytes
        return image

    def share(self, rid: str) -> str:
        """Let a request refer to an equal complement that lives already, if any.

        Its own copy is dropped then; take ``complement(rid)`` from here on. Reads every
        byte of both, but only where all checksums agree.

        Returns:
            The name of the complement it refers to now, see ``group_of``.

        Raises:
            InvariantError: The request has no complement, or it is not sealed.
        """
        own = self._group(rid)
        if not own.complement.sealed:
            raise InvariantError(f"the complement of {rid} is shared before it is full")
        for group in self._groups.values():
            if group is not own and group.complement.equals(own.complement):
                self._leave(rid)
                group.holders += 1
                self._of_request[rid] = group
                return group.name
        return own.name

    def group_of(self, rid: str) -> str:
        """Return the name of the complement a request refers to.

        Names are never used again and equal for requests that share.

        Raises:
            InvariantError: The request has no complement.
        """
        return self._group(rid).name

    def complement(self, rid: str) -> Complement:
        """Return the complement a request refers to.

        Raises:
            InvariantError: It has none.
        """
        return self._group(rid).complement

    def parked(self, rid: str) -> ParkedImage | None:
        """Return the image of a parked request, None where it is not parked."""
        return self._parked.get(rid)

    def drop(self, rid: str) -> int:
        """Let go of all a request holds; nothing happens when it holds nothing.

        Returns:
            Bytes that became free; a shared complement's only with its last request.
        """
        freed = self.drop_parked(rid)
        return freed + (self._leave(rid) if rid in self._of_request else 0)

    def drop_parked(self, rid: str) -> int:
        """Free a request's parked image, if any, and return its bytes."""
        image = self._parked.pop(rid, None)
        freed = image.nbytes if image is not None else 0
        self._used -= freed
        return freed

    def check(self, living: Collection[str]) -> None:
        """Count everything anew.

        Args:
            living: Ids of requests that may hold something.

        Raises:
            InvariantError: A dead request holds something, or a count is off.
        """
        holding = self._of_request.keys() | self._parked.keys()
        dead = sorted(rid for rid in holding if rid not in living)
        if dead:
            raise InvariantError(f"host memory held by dead requests {dead}")
        groups = self._groups.values()
        used = sum(group.booked for group in groups)
        used += sum(image.nbytes for image in self._parked.values())
        holders = sum(group.holders for group in groups)
        if (used, holders) != (self._used, len(self._of_request)):
            raise InvariantError(
                f"host memory: counted {self._used} bytes, {used} held; "
                f"{holders} holders of {len(self._of_request)} requests"
            )

    def _group(self, rid: str) -> _Group:
        if rid not in self._of_request:
            raise InvariantError(f"{rid} has no complement")
        return self._of_request[rid]

    def _leave(self, rid: str) -> int:
        group = self._of_request.pop(rid)
        group.holders -= 1
        if group.holders:
            return 0
        del self._groups[group.name]
        self._used -= group.booked
        return group.booked

    def _new(self, budget: Budget) -> Complement:
        if self._codec is not None and self._codec.splits:
            return ResidualComplement(self.geometry, self._codec, budget)
        return RawComplement(self.geometry, budget.staged, budget.exact, self.dtype)

    def _require_room(self, nbytes: int) -> None:
        if not self.fits(nbytes):
            raise TransferError(
                f"{nbytes} bytes exceed the {self.free_bytes} left of the "
                f"{self.budget_bytes} that --vericache-host-gb allows"
            )
