"""Tensor-parallel host store: all ranks make the same changes or none does.

Ranks hold different KV heads, so a host copy may be corrupt, a residual larger, or two
residual KVs equal on one rank only. Ranks exchange this before they change the store.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError, LostKVError, TransferError
from vericache_sglang.runtime.tp_sync import EXACT
from vericache_sglang.scheduling.plan import (
    Compress,
    Load,
    Offload,
    Residency,
    SwapIn,
    SwapOut,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.kv.host_image import HostImage
    from vericache_sglang.kv.host_store import HostStore
    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.runtime.tp_sync import TensorParallelSync
    from vericache_sglang.scheduling.plan import Move


class Obstacle(IntEnum):
    """Why a rank cannot make a move; the largest value over all ranks decides."""

    NONE = 0
    NO_ROOM = 1
    DAMAGED = 2


class TensorParallelHost:
    """Synchronises with the other ranks before this rank's host store changes.

    Args:
        host: This rank's residual KV and swapped-out images.
        budget: Returns the budget of a prompt that is not compressed yet.
    """

    def __init__(
        self,
        tp_sync: TensorParallelSync,
        host: HostStore,
        budget: Callable[[RequestState], Budget | None],
    ) -> None:
        self._tp_sync = tp_sync
        self._host = host
        self._budget = budget
        self._prints: dict[str, tuple[float, ...]] = {}
        self._holders: dict[str, dict[str, None]] = {}
        self._group_of: dict[str, str] = {}

    def permits(self, move: Move, state: RequestState) -> bool:
        """Return whether every rank has room for a move; True with a single rank.

        Raises:
            LostKVError: A rank's host copy is corrupt; raised on all ranks.
        """
        if self._tp_sync.alone:
            return True
        worst = self._tp_sync.most(self._obstacle(move, state))
        if worst == Obstacle.DAMAGED:
            raise LostKVError("a rank's host copy is damaged")
        return worst == Obstacle.NONE

    def settles(self, made: bool, lost: bool, shared: bool = False) -> bool:
        """Return whether a move that every rank tried was made on all ranks.

        Args:
            made: This rank made the move; a refused move changed nothing.
            lost: This rank lost part of the request's KV.
            shared: The move may make segments that other requests match.

        Raises:
            LostKVError: A rank lost KV, or only some ranks made the move.
            InvariantError: Only some ranks made such segments.
        """
        ranks = self._tp_sync.gather([float(made), float(lost)])
        unequal = len({row[0] for row in ranks}) > 1
        if shared and unequal:
            raise InvariantError("a prompt is compressed on some ranks only")
        if any(row[1] for row in ranks) or unequal:
            raise LostKVError("a copy of its KV could not be made on every rank")
        return made

    def joins(self, state: RequestState | None) -> bool:
        """Return whether every rank can restore a finished request; True if alone.

        The ranks ask for every request that finishes, so that one of them that has
        lost it since they last met can say so.

        Args:
            state: The request; None if it has no state or has lost its KV.
        """
        if self._tp_sync.alone:
            return True
        intact = True
        if state is not None and state.residency is Residency.HOST:
            own = not state.split.shared_count
            intact = not own or _intact(self._host.residual(state.rid))
        return self._tp_sync.every(intact)

    def share(self, rid: str) -> None:
        """Share an equal residual KV of another request, if every rank has one.

        Raises:
            InvariantError: The host store found a different one than the ranks chose.
        """
        host, own = self._host, self._host.residual(rid)
        if self._tp_sync.alone:
            # A CUDA copy is sealed by its thread later, so it cannot be compared now.
            if own.sealed:
                host.share(rid)
            return
        mine = hash(own.checksums) % EXACT if own.sealed else -1
        prints = tuple(row[0] for row in self._tp_sync.gather([mine]))
        twin = self._twin(prints)
        if twin is not None:
            other = next(iter(self._holders[twin]))
            if self._tp_sync.every(own.equals(host.residual(other))):
                found = host.share(rid)
                if found != twin:
                    raise InvariantError(f"{rid} shares {found}, agreed was {twin}")
        name = host.group_of(rid)
        self._group_of[rid] = name
        self._prints.setdefault(name, prints)
        self._holders.setdefault(name, {})[rid] = None

    def forget(self, rid: str) -> None:
        """Drop a request's residual KV from the groups, if it had one."""
        name = self._group_of.pop(rid, None)
        if name is None:
            return
        del self._holders[name][rid]
        if not self._holders[name]:
            del self._holders[name], self._prints[name]

    def _twin(self, prints: tuple[float, ...]) -> str | None:
        """Return the group that every rank's store would find equal first, or None."""
        if any(min(each) < 0 for each in (prints, *self._prints.values())):
            return None  # an unsealed residual cannot be compared
        found = {
            next((n for n, held in self._prints.items() if held[rank] == mine), None)
            for rank, mine in enumerate(prints)
        }
        return found.pop() if len(found) == 1 else None

    def _obstacle(self, move: Move, state: RequestState) -> Obstacle:
        """Return why this rank cannot make a move."""
        host, fits, intact = self._host, True, True
        if isinstance(move, Load):
            intact = _intact(host.residual(state.rid))
        elif isinstance(move, SwapIn):
            image = host.swapped(state.rid)
            intact = image is not None and _intact(image)
        elif isinstance(move, SwapOut):
            held = state.row_length + state.pending_max + state.drafted
            fits = host.fits(host.swapped_bytes(held))
        elif isinstance(move, Offload) or (
            isinstance(move, Compress) and move.residency is Residency.HOST
        ):
            budget = state.parts.budget if state.parts else self._budget(state)
            fits = budget is None or host.fits_residual(budget)
        if not intact:
            return Obstacle.DAMAGED
        return Obstacle.NONE if fits else Obstacle.NO_ROOM


def _intact(image: HostImage) -> bool:
    """Return whether all checksums of a host image hold."""
    try:
        for layer in range(image.layers):
            image.verify(layer)
    except TransferError:
        return False
    return True
