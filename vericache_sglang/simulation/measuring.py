"""A modelled drafter that chooses paths by what it measures, as a server does.

Everything here is SIMULATED. The rule is the scheduler's own (``scheduling.path_paces``
and ``path_mix``), and unlike ``PathChoice`` it does not know what waits at verifiers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from vericache_sglang.scheduling.acceptance import PRIOR_START
from vericache_sglang.scheduling.ewma import Ewma
from vericache_sglang.scheduling.iteration_model import Coefficients
from vericache_sglang.scheduling.path_mix import PathMix, Speeds
from vericache_sglang.scheduling.path_paces import PathPaces
from vericache_sglang.scheduling.paths import Path

if TYPE_CHECKING:
    from vericache_sglang.planning.inter import Cluster
    from vericache_sglang.scheduling.paths import Prospects

PROMPT = 1_000_000
"""Tokens of a prompt, for whose KV the model counts bytes alone: far more than of an
answer, whose KV it does not count."""

PACE_WEIGHT = 0.25
"""Weight of a request in the mean paces at verifiers."""


@dataclass(slots=True)
class Course:
    """One request as its drafter sees it; times in seconds.

    Attributes:
        path: Chosen when it came; P1 stands for all kinds of speculation.
        came: When it was chosen.
        load_s: Predicted time of its full KV.
        first_at: Time of its first tokens; 0.0: none yet.
        first: How many these were.
        last_at: Time of its last tokens.
        tokens: Emitted so far.
    """

    path: Path
    came: float
    load_s: float
    first_at: float = 0.0
    first: int = 0
    last_at: float = 0.0
    tokens: int = 0


class Measuring:
    """What one drafter has measured, and its choice.

    Args:
        cluster: Rates and sizes; a server measures those that it is told here.
    """

    def __init__(self, cluster: Cluster) -> None:
        near, first = (
            Ewma(0.0, least=0.0, most=inf, weight=PACE_WEIGHT) for _ in range(2)
        )
        self._cluster = cluster
        self._paces = PathPaces(near, first, others=True)
        self._mix = PathMix(cluster.draft_length, PRIOR_START, cluster.compressed)
        self._courses: dict[str, Course] = {}

    def path(self, rid: str, known: Prospects, now: float) -> Path:
        """Return the path of a request, the same until it starts.

        Args:
            rid: The request.
            known: Of its load; the rest of it a server does not know.
            now: In seconds.
        """
        course = self._courses.get(rid)
        if course is None:
            course = self._courses[rid] = self._chosen(known, now)
        if course.path is not Path.P1_CACHED:
            return course.path
        rest_s = known.rest_wait_s + (known.rest_bytes or 0) / known.far_bytes_per_s
        if self._paces.completes(rest_s, self._cluster.output_tokens):
            return Path.P2_CACHED if known.holds else Path.P2_STATELESS
        return Path.P1_CACHED if known.holds else Path.P1_STATELESS

    def _chosen(self, known: Prospects, now: float) -> Course:
        if self._mix.due():
            self._review()
        tokens = self._mix.answer(self._cluster.output_tokens)
        draft_s = known.draft_wait_s + (known.draft_bytes or 0) / known.far_bytes_per_s
        load_s = known.eta_s(Path.B2)
        ends = self._paces.ends_s(tokens, draft_s, load_s, known.whole_wait_s)
        load = self._mix.load(now)
        return Course(
            self._paces.choose(self._mix.choice, ends, load_s, load), now, load_s
        )

    def _review(self) -> None:
        cluster = self._cluster
        pools = cluster.pools
        model = Coefficients(
            base_s=pools.near.base_s,
            per_token_s=0.0,
            per_read_s=pools.near.row_s / PROMPT,
            per_product_s=0.0,
        )
        near, far = (
            Speeds(
                instances=instances,
                slots=pool.slots * PROMPT,
                iteration=model,
                prompt_s=0.0,
                load_s=pool.load_s / PROMPT,
            )
            for pool, instances in ((pools.near, 1 / cluster.remote), (pools.far, 1))
        )
        self._mix.review([near] * cluster.local, far)

    def emitted(self, rid: str, tokens: int, drafts: int, now: float) -> None:
        """Record tokens of a request.

        Args:
            rid: The request.
            tokens: How many.
            drafts: That were made for them; 0: it does not draft.
            now: In seconds.
        """
        course = self._courses[rid]
        if not course.first_at:
            course.first_at, course.first = now, tokens
        elif drafts:
            self._paces.observe(now - course.last_at, tokens)
        if drafts:
            self._mix.note_cycle(drafts, min(tokens, drafts))
        course.last_at = now
        course.tokens += tokens

    def ended(self, rid: str, now: float) -> None:
        """Record that a request has all its tokens."""
        course, paces = self._courses.pop(rid), self._paces
        if course.path is Path.B1:
            paces.first.observe(course.first_at - course.came)
            further = course.tokens - course.first
            if further:
                paces.near.observe((now - course.first_at) / further)
        elif course.path is Path.B2:
            paces.observe_whole(now - course.came, course.load_s, course.tokens)
        self._mix.note_request(PROMPT, course.tokens, now)
