"""What left the device, by request, in pages of host memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vericache_sglang.compression.codecs.split_planes import SplitPlanes
from vericache_sglang.errors import InvariantError
from vericache_sglang.kv.host_image import laid_out, shapes_of
from vericache_sglang.kv.plane_residual import PlaneResidual, most_bytes
from vericache_sglang.kv.residual import HostResidual, RawResidual
from vericache_sglang.kv.swapped import SwappedImage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch

    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.compression.codecs.base import Codec
    from vericache_sglang.kv.geometry import KVGeometry
    from vericache_sglang.kv.host_image import HostImage
    from vericache_sglang.kv.host_pages import HostPagePool


@dataclass(slots=True, eq=False)
class _Group:
    """A complement, and how many requests refer to it.

    ``owned``: its memory is given back with its last request.
    """

    name: str
    residual: HostResidual
    holders: int
    owned: bool = True


class HostStore:
    """Complements and parked images in a pool of pages, which others may use too.

    A request holds at most one of each. Complements with the same content may be
    shared (``share``); the bytes then count once. Not thread-safe: the engine's loop
    is its only caller.

    Args:
        geometry: Shapes of the pool the entries come from.
        dtype: Dtype of the pool.
        page_pool: Where the pages come from.
        codec: What packs draft parts; None: nothing is packed.

    Attributes:
        page_pool: As given.
        evictor: Asked to free this many bytes of the pool before something is refused;
            it frees what it can. None: nothing is asked.

    Raises:
        InvariantError: ``geometry`` and ``dtype`` differ in bytes per element.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        dtype: torch.dtype,
        page_pool: HostPagePool,
        codec: Codec | None = None,
    ) -> None:
        if geometry.element_bytes != dtype.itemsize:
            raise InvariantError(f"{geometry.element_bytes} bytes for a {dtype}")
        self.geometry = geometry
        self.dtype = dtype
        self.evictor: Callable[[int], None] | None = None
        self.page_pool = page_pool
        self._codec = codec
        self._opened = 0
        self._groups: dict[str, _Group] = {}
        self._of_request: dict[str, _Group] = {}
        self._swapped: dict[str, SwappedImage] = {}

    @property
    def budget_bytes(self) -> int:
        """Bytes of the pool: the one budget of host memory."""
        return self.page_pool.size

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use, others' included; O(1)."""
        return self.page_pool.used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the free pages; O(1)."""
        return self.page_pool.free_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of complements, shared ones once, and parked images; counted anew."""
        groups = self._groups.values()
        images = [group.residual for group in groups if group.owned]
        return sum(image.held_bytes for image in (*images, *self._swapped.values()))

    def residual_bytes(self, budget: Budget) -> int:
        """Return the most bytes of a complement, its kept positions included.

        Exact for one that holds entries; a residual is never larger than they are.
        """
        geometry, dtype = self.geometry, self.dtype
        if isinstance(self._codec, SplitPlanes):
            nbytes = most_bytes(geometry, self._codec, budget, dtype)
        else:
            shapes = shapes_of(geometry, budget.staged, dtype, budget.exact)
            nbytes = laid_out(shapes)[1]
        return self.page_pool.rounded(nbytes)

    def swapped_bytes(self, slots: int) -> int:
        """Return the exact bytes of a parked image of ``slots`` slots."""
        shapes = shapes_of(self.geometry, slots, self.dtype)
        return self.page_pool.rounded(laid_out(shapes)[1])

    def fits(self, nbytes: int) -> bool:
        """Make room for ``nbytes`` bytes, and return whether there is.

        Asks the evictor for what is missing. What is taken next finds that room.
        """
        needed = self.page_pool.rounded(nbytes)
        if needed > self.budget_bytes:
            return False
        while self.free_bytes < needed:
            free = self.free_bytes
            if self.evictor is not None:
                self.evictor(needed - free)
            if self.free_bytes == free:
                return False
        return True

    def fits_residual(self, budget: Budget) -> bool:
        """Make room for ``open`` with these counts, and say whether there is."""
        return self.fits(self.residual_bytes(budget))

    def open(self, rid: str, budget: Budget) -> HostResidual:
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
        self.fits_residual(budget)
        group = _Group(f"complement-{self._opened}", self._new(budget), 1)
        self._opened += 1
        self._groups[group.name] = self._of_request[rid] = group
        return group.residual

    def adopt(self, rid: str, name: str, residual: HostResidual) -> None:
        """Have a request refer to a complement whose memory is somebody else's.

        Args:
            rid: Request id, holding no complement yet.
            name: Equal for requests that refer to the same one.
            residual: Sealed, or being filled; it stays until ``drop``.

        Raises:
            InvariantError: The request has a complement.
        """
        if rid in self._of_request:
            raise InvariantError(f"{rid} has a complement already")
        group = self._groups.setdefault(name, _Group(name, residual, 0, owned=False))
        group.holders += 1
        self._of_request[rid] = group

    def settle(self, rid: str) -> None:
        """Take back what a request's complement does not need, once it is filled."""
        group = self._of_request.get(rid)
        if group is not None and group.owned and group.residual.sealed:
            group.residual.settle()

    def swap_out(self, rid: str, slots: int) -> SwappedImage:
        """Allocate a parked image for a request; the caller fills it.

        Args:
            rid: Request id, holding no parked image yet.
            slots: Slots the request has on the device, >= 1.

        Raises:
            TransferError: It is over the budget; nothing was allocated.
            InvariantError: The request is parked.
        """
        if rid in self._swapped:
            raise InvariantError(f"{rid} is parked already")
        self.fits(self.swapped_bytes(slots))
        image = SwappedImage(self.geometry, slots, self.dtype, self.page_pool)
        self._swapped[rid] = image
        return image

    def share(self, rid: str) -> str:
        """Let a request refer to an equal complement that lives already, if any.

        Its own copy is dropped then; take ``residual(rid)`` from here on. Reads every
        byte of both, but only where all checksums agree.

        Returns:
            The name of the complement it refers to now, see ``group_of``.

        Raises:
            InvariantError: The request has no complement, or it is not sealed.
        """
        own = self._group(rid)
        if not own.residual.sealed:
            raise InvariantError(f"the complement of {rid} is shared before it is full")
        for group in self._groups.values():
            if group is not own and group.residual.equals(own.residual):
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

    def residual(self, rid: str) -> HostResidual:
        """Return the complement a request refers to.

        Raises:
            InvariantError: It has none.
        """
        return self._group(rid).residual

    def swapped(self, rid: str) -> SwappedImage | None:
        """Return the image of a parked request, None where it is not parked."""
        return self._swapped.get(rid)

    def drop(self, rid: str) -> int:
        """Let go of all a request holds; nothing happens when it holds nothing.

        Returns:
            Bytes given back; a shared complement's only with its last request.
        """
        freed = self.drop_swapped(rid)
        return freed + (self._leave(rid) if rid in self._of_request else 0)

    def clear(self) -> None:
        """Let go of what every request holds, whatever is counted."""
        images: list[HostImage] = [*self._swapped.values()]
        images += [each.residual for each in self._groups.values() if each.owned]
        self._swapped.clear()
        self._groups.clear()
        self._of_request.clear()
        for image in images:
            with suppress(InvariantError):  # it was freed before
                image.free()

    def drop_swapped(self, rid: str) -> int:
        """Free a request's parked image, if any, and return its bytes."""
        image = self._swapped.pop(rid, None)
        if image is None:
            return 0
        image.free()
        return image.held_bytes

    def check(self, living: Collection[str], others: int | None = None) -> None:
        """Count everything anew, the pool too.

        Args:
            living: Ids of requests that may hold something.
            others: Bytes of the pool that are not the store's; None: not known, so
                a leak of pages is not noticed.

        Raises:
            InvariantError: A dead request holds something, or a count is off.
        """
        holding = self._of_request.keys() | self._swapped.keys()
        dead = sorted(rid for rid in holding if rid not in living)
        if dead:
            raise InvariantError(f"host memory held by dead requests {dead}")
        self.page_pool.check()
        used = self.held_bytes + self.page_pool.leaving_bytes
        used = max(used, self.used_bytes) if others is None else used + others
        holders = sum(group.holders for group in self._groups.values())
        if (used, holders) != (self.used_bytes, len(self._of_request)):
            raise InvariantError(
                f"host memory: {self.used_bytes} bytes in use, {used} held; "
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
        if not group.owned:
            return 0
        group.residual.free()
        return group.residual.held_bytes

    def _new(self, budget: Budget) -> HostResidual:
        geometry, dtype, pool = self.geometry, self.dtype, self.page_pool
        if isinstance(self._codec, SplitPlanes):
            return PlaneResidual(geometry, self._codec, budget, dtype, pool)
        return RawResidual(geometry, budget.staged, budget.exact, dtype, pool)
