"""Which path a drafter's request takes: near the store, far from it, or both.

arXiv:2605.17613, section 5.3 with the admission of its source text, and the shares of
appendix A.2. One departure: where every verifier is busy, B1 is compared with B2, the
path that is left, instead of with speculation. So more bandwidth never makes the time
of arrival later.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf, isfinite
from typing import TYPE_CHECKING

from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.inter import cycle_s, speculation_s

if TYPE_CHECKING:
    from collections.abc import Mapping

MARGIN = 0.05
"""How far a path's share of recent requests may exceed its share in the program.

At most to twice that share: a path that the program leaves out has no margin.
"""

ALIKE = 0.2
"""Paths predicted to end at most so much later are exchanged to keep the shares."""

RECENT = 1 / 64
"""Weight of the newest request in the shares of recent ones."""


class Path(StrEnum):
    """A path of appendix A.2, or the drafter's own prefill; named as in the program."""

    B1 = "B1"
    """Full KV to the verifier, which decodes."""
    B2 = "B2"
    """Full KV to the drafter, which decodes."""
    P1_CACHED = "P1-cached"
    """Draft KV to the drafter; the verifier keeps the full KV between verifications."""
    P1_STATELESS = "P1-stateless"
    """The same; the verifier loads the full KV for each verification."""
    P2_CACHED = "P2-cached"
    """As P1 until the rest of the full KV has followed to the drafter."""
    P2_STATELESS = "P2-stateless"
    LOCAL = "local"
    """The drafter computes the prompt; nothing is loaded."""


FORCED: Mapping[str, tuple[Path, ...]] = {
    "local": (Path.LOCAL,),
    "b1": (Path.B1, Path.B2, Path.LOCAL),
    "b2": (Path.B2, Path.LOCAL),
    "p1": (Path.P1_CACHED, Path.P1_STATELESS, Path.B2, Path.LOCAL),
    "p2": (
        *(Path.P2_CACHED, Path.P2_STATELESS),
        *(Path.P1_CACHED, Path.P1_STATELESS, Path.B2, Path.LOCAL),
    ),
}
"""By name: paths of which the first that is possible is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospects:
    """Measured numbers of one request, its drafter and the verifier that it would ask.

    Bytes are those not yet in place, as recorded in the store, and None where there is
    no such object. Times are in seconds from now; infinity says never.

    Attributes:
        full_bytes: Full KV that the verifier has to load.
        whole_bytes: Full KV that the drafter has to load.
        draft_bytes: Draft KV that the drafter has to load.
        rest_bytes: What the drafter loads beside draft KV to have full KV.
        near_bytes_per_s: BW_h, > 0.
        far_bytes_per_s: BW_l, > 0.
        near_wait_s: b_L, until the verifier's link and pool have room; infinite without
            a live verifier.
        draft_wait_s: b_R, until the drafter's link and pool have room for draft KV.
        whole_wait_s: The same for full KV, which comes after draft KV.
        rest_wait_s: Until all that the drafter's link has to load is done.
        verify_load_s: From the request of a verification to its KV, with what was
            granted before; infinite where every verifier is busy.
        holds: Whether the verifier has a slot to keep the KV in, and another one free.
        host_room: Whether the drafter's host memory takes the rest of the full KV.
        prefill_s: Of the prompt at the drafter.
        tokens: Expected length of the answer, > 0.
        draft_length: x, in tokens, >= 1.
        acceptance_rate: gamma, in (0, 1].
        near_token_s: Iteration of the verifier, > 0.
        far_token_s: Iteration of the drafter, > 0.
    """

    full_bytes: float | None
    whole_bytes: float | None
    draft_bytes: float | None
    rest_bytes: float | None
    near_bytes_per_s: float
    far_bytes_per_s: float
    near_wait_s: float
    draft_wait_s: float
    whole_wait_s: float
    rest_wait_s: float
    verify_load_s: float
    holds: bool
    host_room: bool
    prefill_s: float
    tokens: float
    draft_length: int
    acceptance_rate: float
    near_token_s: float
    far_token_s: float

    def possible(self, path: Path) -> bool:
        """Return whether the path has all that it needs."""
        if path is Path.LOCAL:
            return True
        if path is Path.B2:
            return self.whole_bytes is not None
        live = isfinite(self.near_wait_s) and self.full_bytes is not None
        if path is Path.B1:
            return live
        speculates = self.draft_bytes is not None and isfinite(self.verify_load_s)
        kept = self.holds or path in (Path.P1_STATELESS, Path.P2_STATELESS)
        streamed = self.rest_bytes is not None and self.host_room
        one = path in (Path.P1_CACHED, Path.P1_STATELESS)
        return live and speculates and kept and (one or streamed)

    def eta_s(self, path: Path) -> float:
        """Return when decoding or drafting may begin; infinite if impossible."""
        if not self.possible(path):
            return inf
        if path is Path.LOCAL:
            return self.prefill_s
        if path is Path.B1:
            return self.near_wait_s + (self.full_bytes or 0) / self.near_bytes_per_s
        if path is Path.B2:
            return self.whole_wait_s + (self.whole_bytes or 0) / self.far_bytes_per_s
        return self.draft_wait_s + (self.draft_bytes or 0) / self.far_bytes_per_s

    def end_s(self, path: Path) -> float:
        """Return when the answer is predicted to end; infinite if impossible."""
        eta = self.eta_s(path)
        if not isfinite(eta):
            return inf
        if path is Path.B1:
            return eta + self.tokens * self.near_token_s
        if path in (Path.B2, Path.LOCAL):
            return eta + self.tokens * self.far_token_s
        load = 0.0 if self._cached(path) else self.verify_load_s
        cycle = cycle_s(self.draft_length, self.far_token_s, load, self.near_token_s)
        speculating = speculation_s(
            0.0, self.tokens, self.draft_length, self.acceptance_rate, cycle
        )
        if path in (Path.P1_CACHED, Path.P1_STATELESS):
            return eta + speculating
        first = min(self._rest_s, speculating)
        left = self.tokens * (1 - first / speculating)
        return eta + first + left * self.far_token_s

    def speculation(self) -> Path:
        """Return how to speculate: P2 if its rest arrives while drafts are needed."""
        drafting_s = self.tokens / self.acceptance_rate * self.far_token_s
        if self.host_room and self._rest_s < drafting_s:
            return Path.P2_CACHED if self.holds else Path.P2_STATELESS
        return Path.P1_CACHED if self.holds else Path.P1_STATELESS

    @property
    def _rest_s(self) -> float:
        if self.rest_bytes is None:
            return inf
        return self.rest_wait_s + self.rest_bytes / self.far_bytes_per_s

    def _cached(self, path: Path) -> bool:
        return path in (Path.P1_CACHED, Path.P2_CACHED)


def by_arrival(known: Prospects) -> Path:
    """Return the path whose KV arrives first: B1, or the best on the drafter's side.

    That is speculation; B2 where it is impossible, which demotes requests of busy
    verifiers; the drafter's own prefill where nothing else is possible.
    """
    far = known.speculation()
    if not known.possible(far):
        far = Path.B2
    if known.possible(Path.B1) and known.eta_s(Path.B1) <= known.eta_s(far):
        return Path.B1
    return far if known.possible(far) else Path.LOCAL


class PathChoice:
    """The paths of one drafter's requests.

    Args:
        forced: "auto", or a name of ``FORCED``.

    Attributes:
        shares: Requests of each path in the linear program's mix, in sum 1; empty
            without a solution, and then arrival alone decides.

    Raises:
        ConfigError: ``forced`` is not known.
    """

    def __init__(self, forced: str = "auto") -> None:
        if forced != "auto" and forced not in FORCED:
            known = ", ".join(("auto", *FORCED))
            raise ConfigError(f"path {forced}; known: {known}")
        self._forced = FORCED.get(forced, ())
        self.shares: Mapping[str, float] = {}
        self._recent = dict.fromkeys(Path, 0.0)

    def choose(self, known: Prospects) -> Path:
        """Return the request's path; ``took`` counts it once it is taken."""
        for path in self._forced:
            if known.possible(path):
                return path
        return self.exchange(
            by_arrival(known), {path: known.end_s(path) for path in Path}
        )

    def exchange(
        self, first: Path, ends: Mapping[Path, float], alike: float = ALIKE
    ) -> Path:
        """Return a request's first path, or one that has too few requests.

        Args:
            first: One of ``ends``.
            ends: When the answer is predicted to end, in seconds; infinite if
                impossible.
            alike: How much later than on the first path it may end, as a part.
        """
        margin = min(MARGIN, self.shares.get(first, 0.0))
        if not self.shares or self.excess(first) < margin:
            return first
        latest = ends[first] * (1 + alike)
        return min((path for path in ends if ends[path] <= latest), key=self.excess)

    def took(self, path: Path) -> None:
        """Count a request of the path."""
        for each in Path:
            self._recent[each] += RECENT * ((each is path) - self._recent[each])

    def excess(self, path: Path) -> float:
        """Return its share of recent requests less that in the program."""
        taken = sum(self._recent.values()) or 1.0
        return self._recent[path] / taken - self.shares.get(path, 0.0)
