"""Staggered pacing on rounds whose every iteration can be written down."""

from types import SimpleNamespace

import pytest

from vericache_sglang.scheduling.acceptance import Acceptance, Prior
from vericache_sglang.scheduling.draft_length import Patience
from vericache_sglang.scheduling.plan import RequestSpec, Residency
from vericache_sglang.scheduling.reservation import LINK, STAGING, VERIFY
from vericache_sglang.scheduling.scheduled_request import ScheduledRequest
from vericache_sglang.scheduling.settings import RuntimeSettings
from vericache_sglang.scheduling.staggered import Staggered

DROPPED = 100


class Drive:
    """A pacing alone: reloads of ``windows`` windows, and no clock but its steps."""

    def __init__(self, *, windows=0.5, residuals=2, verifies=2, draft_length=8):
        throughput = SimpleNamespace(
            prefetch_bytes=lambda track: track.spec.dropped,
            prefetch_s=lambda track: windows,
        )
        one_second = SimpleNamespace(iteration_s=SimpleNamespace(value=1.0))
        settings = RuntimeSettings(
            draft_length=draft_length,
            max_verifies=verifies,
            staging_slots=residuals * DROPPED,
            token_bytes=1,
        )
        self.pacing = Staggered(
            settings, throughput, SimpleNamespace(iteration=one_second)
        )
        self.now = 0
        self.staged, self.verified = {}, {}

    def track(self, rid, *, length=4, where=Residency.HOST, group=""):
        shape = RequestSpec(
            rid=rid, prompt=200, kept=100, dropped=DROPPED, remaining=1000
        )
        prior = Prior()
        made = ScheduledRequest(shape, Acceptance(prior), Patience(), split=True)
        made.length, made.residency, made.group = length, where, group
        self.pacing.begin(made)
        return made

    def step(self, *, arrive=True):
        """Step once; what is staged arrives before the next one, if at all."""
        self.now += 1
        step = self.pacing.step(self.now)
        for track in step.stage_ins:
            assert track.staged
            self.staged.setdefault(track.rid, []).append(self.now)
            track.ready = arrive
        for track in step.verifies:
            self.verified.setdefault(track.rid, []).append(self.now)
            self.pacing.end(track)
        return step

    def run(self, steps, **how):
        for _ in range(steps):
            self.step(**how)


@pytest.mark.parametrize(
    ("windows", "length", "staged_at", "verified_at"),
    [
        (0.5, 4, 4, 5),
        (1.0, 4, 4, 5),
        (1.5, 4, 3, 5),
        (3.0, 4, 2, 5),
        # A reload of 6 windows keeps the request drafting for 6.
        (6.0, 4, 1, 7),
        (0.5, 1, 1, 2),
    ],
)
def test_a_prefetch_starts_at_its_first_window_and_is_verified_after_the_last(
    windows, length, staged_at, verified_at
):
    drive = Drive(windows=windows)
    drive.track("a", length=length)
    drive.run(verified_at + 3)
    assert drive.staged == {"a": [staged_at]}
    assert drive.verified == {"a": [verified_at]}


def test_a_residual_on_the_device_is_verified_without_a_prefetch():
    drive = Drive()
    drive.track("a", length=4, where=Residency.DEVICE)
    drive.run(8)
    assert (drive.staged, drive.verified) == ({}, {"a": [5]})
    assert drive.pacing.report()["ring_link_reserved"] == 0


def test_a_late_prefetch_slips_and_is_not_lost():
    drive = Drive()
    track = drive.track("a")
    drive.run(9, arrive=False)
    assert drive.verified == {}
    # Due in iterations 5 to 9.
    assert drive.pacing.report()["deadline_misses"] == 5
    track.ready = True
    drive.run(1)
    assert drive.verified == {"a": [10]}


def test_everything_is_given_back_after_a_round():
    drive = Drive(windows=1.5)
    for rid in "abc":
        drive.track(rid)
    drive.run(20)
    assert sorted(drive.verified) == ["a", "b", "c"]
    report = drive.pacing.report()
    assert report["staging_held_slots"] == report["unplaced_cycles"] == 0
    for name in (LINK, STAGING, VERIFY):
        ring = drive.pacing.rings()[name]
        assert not any(ring.used(ring.now + i) for i in range(ring.windows))


def test_a_prefetch_that_finds_the_region_full_waits_for_room():
    drive = Drive(residuals=1)
    first = drive.track("a", length=2)
    drive.run(2)
    assert drive.staged == {"a": [2]}
    first.ready = False  # late: it keeps the region beyond its own window
    drive.track("b", length=4)
    drive.run(5, arrive=True)
    assert "b" not in drive.staged
    first.ready = True
    drive.run(3)
    assert drive.verified["a"] < drive.staged["b"] < drive.verified["b"]


def test_expedite_places_a_request_that_waits_for_its_prefetch_anew():
    drive = Drive(draft_length=8)
    track = drive.track("a", length=8)
    drive.run(1)
    track.drafts, track.closed = 1, True
    drive.pacing.expedite(track)
    drive.run(3)
    # Placed again in step 2, for the next window there is.
    assert (drive.staged, drive.verified) == ({"a": [2]}, {"a": [3]})


def test_expedite_verifies_at_once_what_needs_nothing_more():
    drive = Drive()
    device = drive.track("a", length=8, where=Residency.DEVICE)
    drive.run(1)
    drive.pacing.expedite(device)
    drive.run(1)
    assert drive.verified == {"a": [2]}
    drive.run(12)
    assert drive.verified == {"a": [2]}, "its old window is not kept"


def test_expedite_leaves_a_prefetch_under_way_alone():
    drive = Drive(windows=3.0)
    track = drive.track("a", length=4)
    drive.run(3, arrive=False)
    drive.pacing.expedite(track)
    drive.run(1)
    assert (drive.staged, drive.verified) == ({"a": [2]}, {})
    track.ready = True
    drive.run(1)
    assert drive.verified == {"a": [5]}


def test_sharers_take_one_prefetch_and_one_window():
    drive = Drive(windows=1.0, residuals=1)
    for rid in "ab":
        drive.track(rid, group="prompt")
    drive.run(1)
    link = drive.pacing.rings()[LINK]
    assert sum(link.used(link.now + i) for i in range(link.windows)) == link.limit
    drive.run(8)
    assert drive.verified == {"a": [5], "b": [5]}
    assert drive.staged == {"a": [4], "b": [4]}
    assert drive.pacing.room.held == 0


def test_more_are_due_than_there_are_rows():
    drive = Drive(windows=0.1, residuals=4, verifies=2)
    tracks = [drive.track(rid, where=Residency.DEVICE) for rid in "abcde"]
    for waited, track in enumerate(tracks):
        track.waited = waited
        drive.pacing.expedite(track)
    drive.run(3)
    # The longest wait first, two at a time, and nobody is left out.
    assert drive.verified == {"e": [1], "d": [1], "c": [2], "b": [2], "a": [3]}
    assert drive.pacing.deadline_misses == 3 + 1


def test_a_request_that_ends_leaves_nothing_behind():
    drive = Drive(windows=1.5, residuals=1)
    tracks = [drive.track(rid, length=2) for rid in "abcdef"]
    drive.run(3, arrive=False)
    report = drive.pacing.report()
    assert report["staging_held_slots"] == DROPPED
    for track in tracks:
        drive.pacing.end(track)
    drive.run(30)
    assert (list(drive.staged), drive.verified) == (["a"], {})
    report = drive.pacing.report()
    assert report["ring_link_reserved"] == report["ring_staging_reserved"] == 0
    assert report["staging_held_slots"] == report["unplaced_cycles"] == 0


def test_a_link_too_slow_for_the_horizon_is_late_rather_than_never():
    drive = Drive(windows=500.0)
    drive.track("a")
    drive.run(drive.pacing.windows)
    assert (drive.staged, drive.verified) == ({"a": [1]}, {"a": [62]})
