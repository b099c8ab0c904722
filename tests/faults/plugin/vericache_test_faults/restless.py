"""No fault: every request is moved between residencies at random, all the time."""

import random

from vericache_sglang.scheduling.plan import (
    Offload,
    Park,
    Pin,
    Residency,
    Resume,
    Split,
    Unsplit,
)
from vericache_sglang.scheduling.residency import SETTLED, ResidencyPolicy


def legal(track, now):
    """Return the moves that make sense for one request."""
    rid = track.rid
    if track.residency is Residency.PARKED:
        return [Resume(rid)]
    if track.remaining < 2:
        return []
    if track.residency is Residency.HOST:
        settled = now - track.emitted_at > SETTLED and not track.staged
        return [Pin(rid), *([Park(rid)] * 12 if settled else [])]
    if track.split:
        return [Offload(rid), Unsplit(rid)]
    if now < track.settled_at:
        return []
    return [Split(rid, Residency.DEVICE), Split(rid, Residency.HOST)]


def install():
    """Draw one move in two iterations; the model is not asked."""
    rng = random.Random(5)

    def moves(self, tracks, parked, candidates, now, *rest):
        possible = [move for track in tracks.values() for move in legal(track, now)]
        return (rng.choice(possible),) if possible and rng.random() < 0.5 else ()

    ResidencyPolicy.moves = moves
