"""No fault: every request is moved between residencies at random, all the time."""

import random

from vericache_sglang.scheduling.pacing import StagedRoom
from vericache_sglang.scheduling.plan import (
    Compress,
    Load,
    Offload,
    Residency,
    Restore,
    SwapIn,
    SwapOut,
)
from vericache_sglang.scheduling.residency import SETTLED, ResidencyPolicy


def legal(track, now):
    """Return the moves that make sense for one request; a park has to be waited for."""
    rid = track.rid
    if track.residency is Residency.SWAPPED:
        return [SwapIn(rid)]
    if track.remaining < 2:
        return []
    if track.residency is Residency.HOST:
        return [Load(rid)]
    if track.split:
        return [Offload(rid), Restore(rid)]
    if now < track.settled_at or not track.spec.compressible:
        return []
    return [Compress(rid, Residency.DEVICE), Compress(rid, Residency.HOST)]


class Parking:
    """Chooses who is parked next, and keeps it from being staged until it may be.

    Only a request that has waited for its staging is parked, and on a machine with a
    fast link none would.

    Args:
        rng: Chooses.
    """

    def __init__(self, rng):
        self._rng = rng
        self._rid = None

    def choose(self, tracks, now):
        """Return the request to be parked now; None while there is none."""
        track = tracks.get(self._rid)
        if track is None or track.residency is not Residency.HOST:
            waiting = [
                rid
                for rid, track in tracks.items()
                if track.residency is Residency.HOST and track.remaining > 1
            ]
            self._rid = self._rng.choice(waiting) if waiting else None
            return None
        if track.staged or now - track.emitted_at <= SETTLED:
            return None
        self._rid = None
        return track

    def install(self):
        """Tell the chosen request that the staging buffer is full."""
        take = StagedRoom.take
        StagedRoom.take = lambda room, track: (
            track.rid != self._rid and take(room, track)
        )


def install():
    """Draw one move in two iterations; the model is not asked."""
    rng = random.Random(5)
    parking = Parking(rng)
    parking.install()

    def moves(self, tracks, swapped, candidates, now, *rest):
        possible = [move for track in tracks.values() for move in legal(track, now)]
        chosen = parking.choose(tracks, now)
        if chosen is not None:
            return (SwapOut(chosen.rid),)
        return (rng.choice(possible),) if possible and rng.random() < 0.5 else ()

    ResidencyPolicy.moves = moves
