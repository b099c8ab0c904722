"""Cost and yield of a request, autoregressive or speculative (paper appendix A.1).

The appendix's model with requests of different sizes: an iteration takes
``max(base + sum of row times, sum of link times)`` and yields the tokens of all rows;
each request counts with its average over a cycle of x drafts and one verification.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.scheduling.draft_length import (
    LengthChoice,
    RoundCost,
    best_length,
)
from vericache_sglang.scheduling.plan import Residency
from vericache_sglang.scheduling.proposals import ProposalCost, best_count
from vericache_sglang.scheduling.share import Share

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vericache_sglang.scheduling.estimates import Estimates
    from vericache_sglang.scheduling.scheduled_request import ScheduledRequest
    from vericache_sglang.scheduling.settings import RuntimeSettings


class Throughput:
    """Predicts time and tokens of requests with the current estimates.

    Args:
        settings: Graph width, slot bytes, transfer fraction.
        estimates: Measured costs.
    """

    def __init__(self, settings: RuntimeSettings, estimates: Estimates) -> None:
        self._settings = settings
        self._estimates = estimates
        self.refresh(1)

    def refresh(self, rows: int) -> None:
        """Read the current estimates; called once per plan.

        Args:
            rows: Running requests, which share the read of the weights, a call of the
                inner drafter, and the link.
        """
        self._model = self._estimates.iteration.coefficients
        self._rows = max(1, rows)
        # A row's parts of what an iteration costs without rows, and of a call.
        self._base_s = self._model.base_s / self._rows
        self._drafter_s = self._estimates.drafter_s.value / self._rows

    def prefetch_s(self, track: ScheduledRequest) -> float:
        """Return the link time to prefetch a request's residual KV, in seconds."""
        return self._estimates.link.seconds(self.prefetch_bytes(track), "in")

    def prefetch_bytes(self, track: ScheduledRequest) -> int:
        """Return the bytes that one prefetch moves."""
        size = track.spec.carried * self._settings.token_bytes
        return int(size * self._settings.transfer_fraction)

    def split_s(self, track: ScheduledRequest) -> float:
        """Return the time to compress a request's prompt, in seconds."""
        return self._estimates.split_s.value * track.spec.prompt

    def cost(
        self, track: ScheduledRequest, residency: Residency, link_s: float
    ) -> RoundCost:
        """Return the times that make up a draft-verify cycle.

        Args:
            residency: DEVICE or HOST.
            link_s: Link time per cycle of the other requests on the host, in seconds.
        """
        model, whole = self._model, track.tokens
        base = self._base_s
        prefetch_s = 0.0
        if residency is Residency.HOST:
            prefetch_s = self.prefetch_s(track) + link_s
            if self._settings.pacing == "staggered":
                # All rows share the time of the link, as they share the device's.
                prefetch_s /= self._rows
        return RoundCost(
            plain_s=self._token_s(track, base, whole),
            draft_s=self._token_s(track, base, self._draft_slots(track)),
            verify_s=base + model.per_read_s * whole,
            verify_token_s=model.per_token_s + model.per_product_s * whole,
            prefetch_s=prefetch_s,
        )

    def proposal_cost(self, track: ScheduledRequest) -> ProposalCost:
        """Return the times of a request's rows."""
        slots = self._draft_slots(track) if track.split else track.tokens
        return self._row(self._base_s, slots)

    def _row(self, base: float, slots: int) -> ProposalCost:
        """Return the times of a row over ``slots`` and of its proposals.

        Args:
            base: Its part of what an iteration costs without rows, in seconds.
        """
        model = self._model
        per_slot = model.per_read_s + model.per_product_s
        return ProposalCost(
            base + model.per_token_s + per_slot * slots,
            model.per_token_s + model.per_product_s * slots,
            self._drafter_s,
        )

    def _token_s(self, track: ScheduledRequest, base: float, slots: int) -> float:
        """Return the time of a token to come, with the proposals that pay."""
        row, proposals = self._row(base, slots), track.proposals
        if not proposals.most:
            return row.row_s
        _, gain = best_count(proposals.acceptance.rest_p, row, proposals.most)
        return row.row_s / gain

    def best(
        self,
        track: ScheduledRequest,
        residency: Residency,
        link_s: float = 0.0,
        *,
        lenient: bool = False,
    ) -> LengthChoice:
        """Return the draft length with the highest gain, and the gain.

        Args:
            residency: DEVICE or HOST.
            link_s: As in ``cost``.
            lenient: Leave one of its rejections out (``Acceptance.lenient_p``).
        """
        cost = self.cost(track, residency, link_s)
        most = min(self._settings.draft_length, track.spec.longest)
        acceptance = track.acceptance
        p = acceptance.lenient_p if lenient else acceptance.p
        return best_length(p, cost, most)

    def plain(self, track: ScheduledRequest) -> Share:
        """Return a request's share of an iteration when it decodes autoregressively."""
        proposals = track.proposals
        return Share(self._row(0.0, track.tokens).of(proposals.count), proposals.pace)

    def drafting(
        self, track: ScheduledRequest, residency: Residency, length: int
    ) -> Share:
        """Return a request's average share of an iteration when it speculates."""
        # Without base_s, which counts once per iteration.
        model, whole, proposals = self._model, track.tokens, track.proposals
        rows = length / proposals.pace
        windows = rows + 1.0
        draft_s = self._row(0.0, self._draft_slots(track)).of(proposals.count)
        verify_s = model.per_read_s * whole
        verify_token_s = model.per_token_s + model.per_product_s * whole
        prefetch_s = self.prefetch_s(track) if residency is Residency.HOST else 0.0
        verified = (length + 1) / windows
        return Share(
            (rows * draft_s + verify_s) / windows + verified * verify_token_s,
            (track.acceptance.expected(length) + 1.0) / windows,
            prefetch_s / windows,
        )

    def rate(self, shares: Iterable[Share]) -> float:
        """Return the throughput of a batch made of ``shares``, in tokens/s."""
        seconds = self._model.base_s
        tokens = link = 0.0
        for share in shares:
            seconds += share.seconds
            tokens += share.tokens
            link += share.link_s
        return tokens / max(seconds, link)

    def _draft_slots(self, track: ScheduledRequest) -> int:
        """Return the slots one draft token reads, packed ones weighted by cost."""
        # On average half of a cycle's drafts have been appended already.
        half_cycle = self._settings.draft_length // 2
        spec = track.spec
        exact = track.tokens - spec.kept - spec.dropped
        return exact + spec.reads + half_cycle
