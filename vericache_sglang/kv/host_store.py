"""Residual KV and swapped-out KV of requests, in pages of host memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vericache_sglang.compression.codecs.split_planes import SplitPlanes
from vericache_sglang.errors import InvariantError
from vericache_sglang.kv.host_image import RawImage, laid_out, shapes_of
from vericache_sglang.kv.plane_residual import PlaneResidual, most_bytes
from vericache_sglang.kv.residual import HostResidual, RawResidual
from vericache_sglang.kv.swapped import SwappedImage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import torch

    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.compression.codecs.base import Codec
    from vericache_sglang.kv.geometry import KVGeometry
    from vericache_sglang.kv.host_image import HostImage
    from vericache_sglang.kv.host_pages import HostPagePool


@dataclass(slots=True, eq=False)
class _Group:
    """Residual KV, and the number of requests that refer to it.

    ``owned``: the images whose memory is freed with its last request.
    """

    name: str
    residual: HostResidual
    holders: int
    owned: tuple[HostImage, ...]

    def free(self) -> int:
        """Free the owned images, and return their bytes."""
        for image in self.owned:
            image.free()
        return sum(image.held_bytes for image in self.owned)


class HostStore:
    """Residual KV and swapped images in a pool of pages that others may use too.

    A request holds at most one of each. Residual KV with the same content may be
    shared (``share``); its bytes then count once. Not thread-safe: the engine's loop
    is its only caller.

    Args:
        geometry: Shapes of the pool the entries come from.
        dtype: Dtype of the pool.
        codec: Packs draft KV; None: nothing is packed.

    Attributes:
        page_pool: As given.
        evictor: Called with the missing bytes before an allocation is refused; frees
            what it can. None: no eviction.

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
        """Bytes of residual KV, shared once, and of swapped images; recounted."""
        images = [image for group in self._groups.values() for image in group.owned]
        return sum(image.held_bytes for image in (*images, *self._swapped.values()))

    def residual_bytes(self, budget: Budget) -> int:
        """Return the most bytes of residual KV, its kept positions included.

        Exact for ``RawResidual``, an upper bound for ``PlaneResidual``.
        """
        geometry, dtype = self.geometry, self.dtype
        if isinstance(self._codec, SplitPlanes):
            nbytes = most_bytes(geometry, self._codec, budget, dtype)
        else:
            shapes = shapes_of(geometry, budget.staged, dtype, budget.exact)
            nbytes = laid_out(shapes)[1]
        return self.page_pool.rounded(nbytes)

    def swapped_bytes(self, slots: int) -> int:
        """Return the exact bytes of a swapped image of ``slots`` slots."""
        shapes = shapes_of(self.geometry, slots, self.dtype)
        return self.page_pool.rounded(laid_out(shapes)[1])

    def fits(self, nbytes: int) -> bool:
        """Evict until ``nbytes`` bytes are free; return whether they are.

        The next allocation of this size then succeeds.
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
        """Evict until ``open`` fits with these counts; return whether it does."""
        return self.fits(self.residual_bytes(budget))

    def open(self, rid: str, budget: Budget) -> HostResidual:
        """Allocate residual KV for a request; the caller fills and seals it.

        Args:
            rid: Id of a request without residual KV.
            budget: Counts of its prompt.

        Raises:
            TransferError: The pool has no room; nothing was allocated.
            InvariantError: The request has residual KV already.
        """
        self._expect_none(rid)
        self.fits_residual(budget)
        residual = self.new(budget)
        self.adopt(rid, "", residual, [residual])
        return residual

    def new(self, budget: Budget) -> HostResidual:
        """Allocate residual KV that belongs to the caller.

        Args:
            budget: Counts of its tokens.

        Raises:
            TransferError: The pool has no room; nothing was allocated.
        """
        geometry, dtype, pool = self.geometry, self.dtype, self.page_pool
        if isinstance(self._codec, SplitPlanes):
            return PlaneResidual(geometry, self._codec, budget, dtype, pool)
        return RawResidual(geometry, budget.staged, budget.exact, dtype, pool)

    def open_full(self, tokens: int) -> RawImage:
        """Allocate full KV for a request, to be passed to ``adopt`` once it is filled.

        Args:
            tokens: Its tokens, >= 1.

        Raises:
            TransferError: The pool has no room; nothing was allocated.
        """
        self.fits(self.swapped_bytes(tokens))
        shapes = shapes_of(self.geometry, tokens, self.dtype)
        return RawImage(shapes, self.page_pool)

    def adopt(
        self,
        rid: str,
        name: str,
        residual: HostResidual,
        owned: Sequence[HostImage] = (),
    ) -> None:
        """Have a request refer to residual KV whose memory may have other owners.

        Args:
            rid: Id of a request without residual KV.
            name: Equal for requests that refer to the same residual KV; "": no other
                request does yet.
            residual: Sealed, or being filled; must not be freed before ``drop``.
            owned: Its images that are freed with its last request.

        Raises:
            InvariantError: The request has residual KV already.
        """
        self._expect_none(rid)
        if not name:
            name = f"residual-{self._opened}"
            self._opened += 1
        new = _Group(name, residual, 0, tuple(owned))
        group = self._groups.setdefault(name, new)
        group.holders += 1
        self._of_request[rid] = group

    def settle(self, rid: str) -> None:
        """Free the pages that a request's filled residual KV does not need."""
        group = self._of_request.get(rid)
        if group is not None and group.residual.sealed:
            group.residual.settle()

    def swap_out(self, rid: str, slots: int) -> SwappedImage:
        """Allocate a swapped image for a request; the caller fills it.

        Args:
            rid: Id of a request that is not swapped out.
            slots: Slots the request has on the device, >= 1.

        Raises:
            TransferError: The pool has no room; nothing was allocated.
            InvariantError: The request is swapped out already.
        """
        if rid in self._swapped:
            raise InvariantError(f"{rid} is swapped out already")
        self.fits(self.swapped_bytes(slots))
        image = SwappedImage(self.geometry, slots, self.dtype, self.page_pool)
        self._swapped[rid] = image
        return image

    def share(self, rid: str) -> str:
        """Have a request refer to equal residual KV that exists already, if any.

        Its own copy is then freed; call ``residual(rid)`` again. Reads every byte of
        both, but only where all checksums agree.

        Returns:
            The name of the residual KV it refers to now, see ``group_of``.

        Raises:
            InvariantError: The request has no residual KV, or it is not sealed.
        """
        own = self._group(rid)
        if not own.residual.sealed:
            raise InvariantError(
                f"the residual KV of {rid} is shared before it is full"
            )
        for group in self._groups.values():
            if group is not own and group.residual.equals(own.residual):
                self._leave(rid)
                group.holders += 1
                self._of_request[rid] = group
                return group.name
        return own.name

    def group_of(self, rid: str) -> str:
        """Return the name of the residual KV a request refers to.

        Names are never reused, and equal for requests that share.

        Raises:
            InvariantError: The request has no residual KV.
        """
        return self._group(rid).name

    def residual(self, rid: str) -> HostResidual:
        """Return the residual KV a request refers to.

        Raises:
            InvariantError: It has none.
        """
        return self._group(rid).residual

    def swapped(self, rid: str) -> SwappedImage | None:
        """Return a request's swapped image; None where it is not swapped out."""
        return self._swapped.get(rid)

    def drop(self, rid: str) -> int:
        """Drop all that a request holds; no effect if it holds nothing.

        Returns:
            Bytes freed; shared residual KV is freed with its last request.
        """
        freed = self.drop_swapped(rid)
        return freed + (self._leave(rid) if rid in self._of_request else 0)

    def clear(self) -> None:
        """Drop what all requests hold, whatever the counts say."""
        images: list[HostImage] = [*self._swapped.values()]
        images += [image for group in self._groups.values() for image in group.owned]
        self._swapped.clear()
        self._groups.clear()
        self._of_request.clear()
        for image in images:
            with suppress(InvariantError):  # it was freed before
                image.free()

    def drop_swapped(self, rid: str) -> int:
        """Free a request's swapped image, if any, and return its bytes."""
        image = self._swapped.pop(rid, None)
        if image is None:
            return 0
        image.free()
        return image.held_bytes

    def check(self, living: Collection[str], others: int | None = None) -> None:
        """Compare all counts with a recount, the pool's too.

        Args:
            living: Ids of requests that may hold memory.
            others: Bytes of the pool in use by other owners; None: not known, so a
                leak of pages is not noticed.

        Raises:
            InvariantError: A dead request holds memory, or a count is off.
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

    def _expect_none(self, rid: str) -> None:
        if rid in self._of_request:
            raise InvariantError(f"{rid} has a residual KV already")

    def _group(self, rid: str) -> _Group:
        if rid not in self._of_request:
            raise InvariantError(f"{rid} has no residual KV")
        return self._of_request[rid]

    def _leave(self, rid: str) -> int:
        group = self._of_request.pop(rid)
        group.holders -= 1
        if group.holders:
            return 0
        del self._groups[group.name]
        return group.free()
