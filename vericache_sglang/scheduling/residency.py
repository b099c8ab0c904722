"""Chooses where each residual KV is, by predicted throughput and free memory.

With enough free memory, residual KV stays on the device and verifications need no
transfer. Under memory pressure the offload with the highest predicted throughput is
made; swapping out is the last resort. A minimum time between two moves of a request
avoids oscillation. Swapped-out requests return in the order in which they left, before
new requests are admitted.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from vericache_sglang.scheduling.plan import (
    Compress,
    Load,
    Move,
    Offload,
    Residency,
    Restore,
    SchedulerInput,
    SwapIn,
    SwapOut,
)
from vericache_sglang.scheduling.share import Share

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vericache_sglang.scheduling.scheduled_request import ScheduledRequest
    from vericache_sglang.scheduling.settings import RuntimeSettings
    from vericache_sglang.scheduling.throughput import Throughput

ENTER = 1.08
"""Predicted gain from which drafting starts: 1 plus a margin for the model's error."""

LEAVE = 0.98
"""Predicted gain below which drafting stops; the gap to ``ENTER`` is hysteresis."""

PAYBACK = 2.0
"""Seconds that drafting must be predicted to save per second of compressing: an answer
may end early, and the first cycles are the least certain."""

MAX_COMPRESSIONS = 2
"""Prompts compressed per iteration: each costs about one pass over the prompt's KV."""

MIN_STAY = 32
"""Iterations between two moves of a request, unless memory runs out."""

LOAD_ROOM = 1.25
"""Free slots required per slot loaded, so that the next arrival does not undo it."""

RELIEF_EVERY = 4
"""Iterations between two searches for an offload that admits waiting requests; 1 after
a search that found one."""

RELIEF_GAIN = 0.1
"""Least predicted gain of the batch, per share of its slots that an offload frees, for
an offload that admits waiting requests."""

LOAD_EVERY = 8
"""Iterations between two searches for residual KV to load."""

SAMPLED = 64
"""Requests from whose costs those of the whole batch are extrapolated."""

CONSIDERED = 8
"""Offload candidates evaluated: the requests with the largest residual KV."""

SETTLED = 2
"""Iterations without an emission after which no result of a row is pending."""


class PricedBatch(NamedTuple):
    """The running requests.

    Attributes:
        total: Sum of their shares of an iteration.
        longest: The same if those on the host drafted as long as they may, as they will
            once more of them share the link.
        slots: Device slots they hold.
        link_s: Link time of one prefetch of each that is on the host, in seconds.
    """

    total: Share
    longest: Share
    slots: int
    link_s: float


class ResidencyPolicy:
    """Chooses the KV moves of one iteration.

    Args:
        settings: Forced residency, graph width.
        throughput: Predicts the throughput of every alternative.
    """

    def __init__(self, settings: RuntimeSettings, throughput: Throughput) -> None:
        self._settings = settings
        self._throughput = throughput
        self._helped = False

    def moves(
        self,
        tracks: Mapping[str, ScheduledRequest],
        swapped: Mapping[str, ScheduledRequest],
        candidates: Iterable[ScheduledRequest],
        now: int,
        given: SchedulerInput,
        link_load_s: float,
    ) -> tuple[Move, ...]:
        """Return the moves to make after this iteration's forward.

        Args:
            tracks: All tracked requests.
            swapped: Swapped-out requests, the earliest swapped out first.
            candidates: Autoregressive requests that may be compressed now.
            now: This iteration.
            given: Free memory on device and host.
            link_load_s: Link time of one prefetch of every request on the host, in
                seconds.
        """
        spare = given.free_slots - given.rows * self._cycle_slots()
        if spare < 0 or given.blocked:
            if spare >= 0 and not self._helped and now % RELIEF_EVERY:
                return ()  # KV compressed on the device would be offloaded again
            relief = self._freeing_move(
                tracks, now, given, link_load_s, short=spare < 0
            )
            self._helped = relief is not None
            if relief is not None:
                return (relief,)
        back = self._returning_move(tracks, swapped, now, given, spare)
        if back is not None:
            return (back,)
        compressions: list[Move] = []
        for track in candidates:
            if len(compressions) == MAX_COMPRESSIONS:
                break
            move = self._first_compression(track, given, spare, now, link_load_s)
            if move is not None:
                compressions.append(move)
                spare -= track.spec.kept
        return tuple(compressions)

    def probes_pay(self, track: ScheduledRequest, probes_s: float) -> bool:
        """Return whether compressing a prompt pays for its probes too.

        True if the residency is forced.

        Args:
            track: The request, autoregressive.
            probes_s: Time of its probes, in seconds.
        """
        if self._settings.residency != "auto":
            return True
        gain = self._throughput.best(track, Residency.DEVICE).gain
        return self._pays_back(track, gain, probes_s)

    def drafting_pays(
        self, track: ScheduledRequest, link_load_s: float, least: float
    ) -> bool:
        """Set the next cycle's draft length; return whether its gain is >= ``least``.

        True for every gain if the residency is forced, and where a single rejection
        less would make it large enough: to stop wrongly costs a request the drafting
        of 64 rows, one more cycle about a token.

        Args:
            track: The request; its ``length`` is set.
            link_load_s: Link time of one prefetch of every request on the host, in
                seconds.
            least: Smallest gain for which the request drafts.
        """
        others_s = 0.0
        if track.residency is Residency.HOST:
            others_s = max(0.0, link_load_s - self._throughput.prefetch_s(track))
        choice = self._throughput.best(track, track.residency, others_s)
        track.length, track.share = choice.length, None
        if self._settings.residency != "auto" or choice.gain >= least:
            return True
        best = self._throughput.best
        return best(track, track.residency, others_s, lenient=True).gain >= least

    def leave_drafting(
        self, leaving: Iterable[ScheduledRequest], now: int, given: SchedulerInput
    ) -> Move | None:
        """Return the move by which one request stops drafting; None if none can now.

        Args:
            leaving: Requests for which drafting does not pay.
            now: This iteration.
            given: Free memory on the device.
        """
        spare = given.free_slots - given.rows * self._cycle_slots()
        # An offload was chosen by the gain of the whole batch; while others wait, the
        # gain of one request alone would undo it at once.
        loads = not given.blocked
        # Looking up a member of an enum takes longer than the comparison.
        device, host = Residency.DEVICE, Residency.HOST
        for track in leaving:
            if track.residency is device:
                return Restore(track.rid)
            if (
                loads
                and track.residency is host
                and not track.staged
                and now - track.moved_at >= MIN_STAY
                and spare >= LOAD_ROOM * track.load_slots
            ):
                return Load(track.rid)
        return None

    def _cycle_slots(self) -> int:
        settings = self._settings
        return 2 * (settings.draft_length + settings.proposals + 1) + settings.page

    def _first_compression(
        self,
        track: ScheduledRequest,
        given: SchedulerInput,
        spare: int,
        now: int,
        link_load_s: float,
    ) -> Move | None:
        """Return the compression of an autoregressive request; None defers it."""
        forced = self._settings.residency
        fits_host = self._fits_host(track, given)
        if track.remaining < 2:
            return None
        if forced == "host":
            return Compress(track.rid, Residency.HOST) if fits_host else None
        fits_device = track.spec.kept <= spare
        if forced == "device":
            return Compress(track.rid, Residency.DEVICE) if fits_device else None
        where = Residency.DEVICE if fits_device else Residency.HOST
        if where is Residency.HOST and not fits_host:
            return None
        others_s = link_load_s if where is Residency.HOST else 0.0
        choice = self._throughput.best(track, where, others_s)
        if self._pays_back(track, choice.gain):
            return Compress(track.rid, where)
        track.put_off(now)
        return None

    def _fits_host(self, track: ScheduledRequest, given: SchedulerInput) -> bool:
        """Return whether the residual KV may leave, and fits the host and staging."""
        if self._settings.keep_order and self._settings.residency == "auto":
            return False
        return track.spec.staged <= min(given.host_slots, self._settings.staging_slots)

    def _pays_back(
        self, track: ScheduledRequest, gain: float, probes_s: float = 0.0
    ) -> bool:
        """Return whether the remaining tokens pay for compressing the prompt."""
        if gain < ENTER:
            return False
        plain_s = self._throughput.cost(track, Residency.DEVICE, 0.0).plain_s
        saved_s = track.remaining * plain_s * (1.0 - 1.0 / gain)
        return saved_s > PAYBACK * (self._throughput.split_s(track) + probes_s)

    def _freeing_move(
        self,
        tracks: Mapping[str, ScheduledRequest],
        now: int,
        given: SchedulerInput,
        link_load_s: float,
        *,
        short: bool,
    ) -> Move | None:
        """Return the move that frees memory: the best offload, else a swap out."""
        if self._settings.residency == "device":
            return None
        device = Residency.DEVICE
        movable = [
            track
            for track in tracks.values()
            if track.residency is device and self._may_offload(track, now, given, short)
        ]
        movable.sort(key=lambda track: -track.spec.dropped)
        if movable:
            batch = self._priced(tracks, link_load_s)
            rate = self._throughput.rate
            before = max(rate((batch.total,)), rate((batch.longest,)))
            (after, _), track = max(
                (
                    (self._after_offload(track, batch), track)
                    for track in movable[:CONSIDERED]
                ),
                key=lambda priced: priced[0],
            )
            room = track.spec.dropped / max(1, batch.slots)
            if short or after >= before * (1.0 + RELIEF_GAIN * room):
                return self._offload(track)
        return self._swap_out(tracks, now, given) if short else None

    def _may_offload(
        self, track: ScheduledRequest, now: int, given: SchedulerInput, short: bool
    ) -> bool:
        stay = now - track.moved_at
        return (
            track.settled_at <= now
            and track.spec.dropped > 0
            and self._fits_host(track, given)
            and track.remaining > 1
            and (short or stay >= MIN_STAY)
        )

    def _offload(self, track: ScheduledRequest) -> Move:
        if track.split:
            return Offload(track.rid)
        return Compress(track.rid, Residency.HOST)

    def _priced(
        self, tracks: Mapping[str, ScheduledRequest], link_load_s: float
    ) -> PricedBatch:
        """Price the running requests, from a sample of them."""
        sample = list(islice(tracks.values(), SAMPLED))
        scale = len(tracks) / len(sample)
        shares = [self._share(track) for track in sample]
        host = Residency.HOST
        longest = [
            self._longest(track) if track.residency is host else share
            for track, share in zip(sample, shares, strict=True)
        ]
        slots = int(scale * sum(track.slots for track in sample))
        return PricedBatch(
            _total(shares, scale),
            _total(longest, scale),
            slots,
            link_load_s,
        )

    def _share(self, track: ScheduledRequest) -> Share:
        if track.residency in (Residency.SWAPPED, Residency.STORE):
            return Share(0.0, 0.0)
        if not track.split:
            return self._throughput.plain(track)
        if track.share is None:
            track.share = self._throughput.drafting(
                track, track.residency, track.length
            )
        return track.share

    def _longest(self, track: ScheduledRequest) -> Share:
        """Return a request's share on the host with drafts as long as they may be."""
        length = min(self._settings.draft_length, track.spec.longest)
        return self._throughput.drafting(track, Residency.HOST, length)

    def _best_share(
        self, track: ScheduledRequest, residency: Residency, batch: PricedBatch
    ) -> Share:
        """Return a drafting request's share at its best length for ``residency``."""
        others_s = batch.link_s if residency is Residency.HOST else 0.0
        length = self._throughput.best(track, residency, others_s).length
        return self._throughput.drafting(track, residency, length)

    def _after_offload(
        self, track: ScheduledRequest, batch: PricedBatch
    ) -> tuple[float, float]:
        """Return how good it is to offload ``track``: tokens/s, then less link time.

        The freed slots are assumed to be filled with average requests of the batch.
        """
        grown = 1.0 + track.spec.dropped / max(1, batch.slots)
        now = self._throughput.plain(track)
        if track.split:
            now = self._best_share(track, Residency.DEVICE, batch)
        best = self._best_share(track, Residency.HOST, batch)
        return max(
            self._grown(batch.total, grown, best, now),
            self._grown(batch.longest, grown, self._longest(track), now),
        )

    def _grown(
        self, total: Share, grown: float, then: Share, now: Share
    ) -> tuple[float, float]:
        """Return tokens/s with one share replaced, then minus the further link time."""
        others = Share(
            total.seconds * grown, total.tokens * grown, total.link_s * grown
        )
        moved = Share(
            then.seconds - now.seconds,
            then.tokens - now.tokens,
            then.link_s - now.link_s,
        )
        return self._throughput.rate((others, moved)), -moved.link_s

    def _swap_out(
        self, tracks: Mapping[str, ScheduledRequest], now: int, given: SchedulerInput
    ) -> Move | None:
        """Swap out the request that arrived last; never the only running one."""
        running = [
            track
            for track in tracks.values()
            if track.residency is not Residency.SWAPPED
        ]
        swappable = [
            track
            for track in running
            if track.residency is Residency.HOST
            and not track.staged
            and now - track.emitted_at > SETTLED
            and now - track.moved_at > SETTLED
            and track.slots <= given.host_slots
        ]
        if not swappable or len(running) < 2:
            return None
        # Insertion order is arrival order: the oldest finish first, so all finish.
        return SwapOut(swappable[-1].rid)

    def _returning_move(
        self,
        tracks: Mapping[str, ScheduledRequest],
        swapped: Mapping[str, ScheduledRequest],
        now: int,
        given: SchedulerInput,
        spare: int,
    ) -> Move | None:
        """Return the swap in of the earliest swapped-out request, or else a load."""
        if swapped:
            first = next(iter(swapped.values()))
            alone = len(swapped) == len(tracks)
            stayed = now - first.moved_at >= MIN_STAY or alone
            room = first.slots + self._cycle_slots()
            return SwapIn(first.rid) if stayed and spare >= room else None
        if self._settings.residency != "auto" or given.blocked or now % LOAD_EVERY:
            return None
        for track in tracks.values():
            if (
                track.residency is Residency.HOST
                and not track.staged
                and track.remaining > self._settings.draft_length
                and now - track.moved_at >= MIN_STAY
                and spare >= LOAD_ROOM * track.load_slots + self._cycle_slots()
            ):
                return Load(track.rid)
        return None


def _total(shares: Iterable[Share], scale: float) -> Share:
    """Return the sum of shares, each counted ``scale`` times."""
    seconds = tokens = link_s = 0.0
    for share in shares:
        seconds += share.seconds
        tokens += share.tokens
        link_s += share.link_s
    return Share(scale * seconds, scale * tokens, scale * link_s)
