"""Which share of a drafter's requests takes each path: the program on measured times.

arXiv:2605.17613, appendix A.2, by ``planning.inter``, for the mean request of one
drafter: what servers measure of their forwards, links and prefills takes the place of a
machine's data sheet.
"""

from __future__ import annotations

from collections import deque
from dataclasses import astuple, dataclass
from itertools import cycle
from math import inf, isfinite
from statistics import fmean
from typing import TYPE_CHECKING

from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.inter import Pool, PoolMix, PoolPair, simplest
from vericache_sglang.scheduling.ewma import Ewma
from vericache_sglang.scheduling.iteration_model import Coefficients, Work
from vericache_sglang.scheduling.paths import Path, PathChoice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REVIEW = 8
"""Requests of which one has the program solved again."""

RECENT = 16
"""Requests whose ends tell how many come."""

UNMEASURED: Mapping[str, float] = {Path.B1: 0.5, Path.P1_CACHED: 0.5}
"""Shares before the link and the verifiers were measured: of both paths that begin at a
verifier, so that they are."""

WEIGHT = 0.05
"""Weight of a new request in the means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What one server was measured to take; times in seconds.

    Attributes:
        instances: Part of it that one drafter has, > 0.
        slots: Tokens that its KV pool holds, > 0.
        iteration: Its forwards.
        prompt_s: Prefill, per prompt token.
        load_s: Link from the store, per prompt token.
    """

    instances: float
    slots: float
    iteration: Coefficients
    prompt_s: float
    load_s: float


class PathMix:
    """The mean request of a drafter, and the mix of paths that serves most of them.

    Args:
        draft_length: Drafts of a cycle before one was verified.
        acceptance: Probability that each is accepted, in [0, 1).
        compressed: Draft KV in bytes over full KV, before any was read.

    Attributes:
        choice: Exchanges paths for the mix's shares of the requests. P1 and P2, cached
            or stateless, are one here, ``Path.P1_CACHED``: what becomes of a request
            that drafts is decided later, by its verifier and by when its residual KV
            comes.
    """

    def __init__(self, draft_length: int, acceptance: float, compressed: float) -> None:
        self.choice = PathChoice()
        self.choice.shares = UNMEASURED
        self._reviews = cycle((True, *(False,) * (REVIEW - 1)))
        kept = min(acceptance, 1 - 1e-6)
        tokens = (1 - kept**draft_length) / (1 - kept)
        self._prompt, self._output = _mean(0.0), _mean(0.0)
        self._drafts, self._tokens = _mean(float(draft_length)), _mean(tokens)
        self._compressed = _mean(compressed)
        self._lead = _mean(0.0)
        self._mix: PoolMix | None = None
        self._batches = (inf, inf)
        self._ended: deque[float] = deque(maxlen=RECENT)

    @property
    def shares(self) -> Mapping[str, float]:
        """Path -> share of the requests, in sum 1."""
        return self.choice.shares

    def due(self) -> bool:
        """Return whether to call ``review`` in front of the next request."""
        return next(self._reviews)

    def note_request(self, prompt: int, output: int, now: float) -> None:
        """Count a request that has ended.

        Args:
            prompt: Tokens of its prompt.
            output: Tokens of its answer; without any it is not counted.
            now: In seconds.
        """
        if output:
            self._prompt.observe(prompt)
            self._output.observe(output)
            self._ended.append(now)

    def note_drafting(self, lead: int, compressed: float) -> None:
        """Count a request that begins to draft.

        Args:
            lead: Tokens that it has.
            compressed: Its draft KV in bytes over its full KV.
        """
        self._lead.observe(lead)
        self._compressed.observe(compressed)

    def note_cycle(self, drafts: int, tokens: int) -> None:
        """Count a verdict.

        Args:
            drafts: That were made for it, >= 1, one more than were sent.
            tokens: That it gave, at most as many.
        """
        self._drafts.observe(drafts)
        self._tokens.observe(tokens)

    def answer(self, most: int) -> float:
        """Return the expected tokens of an answer of at most ``most`` (>= 1) tokens."""
        return min(self._output.value or most, most)

    @property
    def compressed(self) -> float:
        """Mean draft KV in bytes over full KV."""
        return self._compressed.value

    def load(self, now: float) -> float:
        """Return how much of what the mix could serve is asked for, in [0, 1].

        Args:
            now: In seconds.
        """
        if self._mix is None or len(self._ended) < RECENT or now <= self._ended[0]:
            return 1.0
        rate = len(self._ended) / (now - self._ended[0])
        most = self._mix.tokens_per_s / self._output.value
        return min(1.0, rate / most) if most else 1.0

    def review(self, near: Sequence[Speeds], far: Speeds) -> None:
        """Solve the program again.

        Args:
            near: The verifiers.
            far: This drafter.
        """
        pools = self._pools(near, far)
        if pools is None:
            return
        near_batch, far_batch = self._batches
        batches = (
            min(near_batch, pools.near.slots),
            min(far_batch, pools.far.slots),
        )
        try:
            mix = simplest(pools, batches=batches)
        except ConfigError:
            return  # measured times without a solution: the last one stands
        total = sum(mix.requests_per_s.values())
        if total <= 0:
            return
        self._mix = mix
        # As in ``inter.fixed_point``, a step of it with every review.
        self._batches = (
            (batches[0] + mix.local_batch) / 2,
            (batches[1] + mix.remote_batch) / 2,
        )
        shares = dict.fromkeys(map(str, (Path.B1, Path.B2, Path.P1_CACHED)), 0.0)
        for name, share in mix.shares.items():
            shares[Path.P1_CACHED if name[0] == "P" else Path(name)] += max(share, 0.0)
        self.choice.shares = shares

    def _pools(self, near: Sequence[Speeds], far: Speeds) -> PoolPair | None:
        """Return both pools; None before all of it was measured."""
        prompt, output = self._prompt.value, self._output.value
        if not near or not output or not isfinite(far.load_s):
            return None
        length = prompt + output / 2
        drafts = self._drafts.value
        part = self.compressed

        def row_s(speeds: Speeds, tokens: float, reads: float) -> float:
            work = Work(tokens, reads, tokens * reads)
            return speeds.iteration.marginal(work)

        def pool(speeds: Speeds) -> Pool:
            return Pool(
                instances=speeds.instances,
                slots=max(1.0, speeds.slots / (prompt + output)),
                load_s=speeds.load_s * prompt,
                base_s=speeds.iteration.base_s,
                row_s=row_s(speeds, 1, length),
                check_s=row_s(speeds, drafts, length),
                draft_s=row_s(speeds, 1, part * length),
                prompt_s=(speeds.prompt_s or shared.prompt_s) * prompt,
            )

        shared = _mean_of(near)
        return PoolPair(
            near=pool(shared),
            far=pool(far),
            compressed=part,
            output_tokens=output,
            draft_length=drafts,
            acceptance_rate=min(1.0, self._tokens.value / drafts),
            lead_tokens=min(self._lead.value, output - 1),
            drafting_slots=part,
        )


def _mean(start: float) -> Ewma:
    return Ewma(start, least=0.0, most=inf, weight=WEIGHT)


def _mean_of(servers: Sequence[Speeds]) -> Speeds:
    """Return all verifiers as one pool of equal ones."""
    models = zip(*(astuple(each.iteration) for each in servers), strict=True)
    return Speeds(
        instances=sum(each.instances for each in servers),
        slots=fmean(each.slots for each in servers),
        iteration=Coefficients(*map(fmean, models)),
        prompt_s=fmean(each.prompt_s for each in servers),
        load_s=fmean(each.load_s for each in servers),
    )
