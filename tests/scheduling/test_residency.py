"""Residency moves on batches of a few requests: which one, when, and when none."""

from types import SimpleNamespace

import pytest

from vericache_sglang.scheduling.acceptance import Acceptance, Prior
from vericache_sglang.scheduling.draft_length import Patience
from vericache_sglang.scheduling.estimates import Estimates
from vericache_sglang.scheduling.iteration_model import Coefficients, IterationModel
from vericache_sglang.scheduling.link import LinkEstimate
from vericache_sglang.scheduling.plan import (
    Compress,
    Load,
    Offload,
    RequestSpec,
    Residency,
    Restore,
    SchedulerInput,
    SwapIn,
    SwapOut,
)
from vericache_sglang.scheduling.proposals import Proposals
from vericache_sglang.scheduling.residency import (
    ENTER,
    LEAVE,
    LOAD_EVERY,
    MAX_COMPRESSIONS,
    MIN_STAY,
    RELIEF_EVERY,
    ResidencyPolicy,
)
from vericache_sglang.scheduling.scheduled_request import ScheduledRequest
from vericache_sglang.scheduling.settings import RuntimeSettings
from vericache_sglang.scheduling.throughput import Throughput

NOW = 8 * RELIEF_EVERY * LOAD_EVERY  # an iteration in which everything is looked at
DEVICE, HOST, SWAPPED = Residency.DEVICE, Residency.HOST, Residency.SWAPPED
FAST_LINK = 1e12


def policy(residency="auto", *, link=FAST_LINK, base_s=1e-4, staging=50_000, **more):
    """Return a policy whose iterations take base_s, and 20 ms a whole prompt read."""
    estimates = Estimates(
        iteration=IterationModel(Coefficients(base_s, 1e-6, 1e-6, 1e-12)),
        link=LinkEstimate(link),
    )
    settings = RuntimeSettings(
        residency=residency,
        draft_length=16,
        max_verifies=2,
        staging_slots=staging,
        token_bytes=1000,
        **more,
    )
    return ResidencyPolicy(settings, Throughput(settings, estimates))


def track(rid, where=DEVICE, *, split=True, p=0.95, prompt=20_000, **fields):
    kept = prompt // 4
    shape = RequestSpec(
        rid=rid,
        prompt=prompt,
        kept=kept,
        dropped=prompt - kept,
        remaining=1000,
    )
    made = ScheduledRequest(shape, Acceptance(Prior(p)), Patience(), split=split)
    made.residency, made.length = where, 8
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def moves(chooser, *tracks, now=NOW, free=10**6, link_load_s=0.0, **world):
    """Return the moves of one iteration; every plain request may be split."""
    known = {each.rid: each for each in tracks}
    world = SchedulerInput(
        **{"host_slots": 10**9, "rows": len(tracks), "free_slots": free, **world}
    )
    swapped = {rid: each for rid, each in known.items() if each.residency is SWAPPED}
    plain = [each for each in tracks if not each.split and each.look_at <= now]
    return chooser.moves(known, swapped, plain, now, world, link_load_s)


# -- splits ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forced", "free", "where"),
    [
        ("auto", 10**6, DEVICE),
        ("auto", 3_000, HOST),
        ("host", 10**6, HOST),
        ("device", 10**6, DEVICE),
        ("device", 3_000, None),
    ],
    ids=["room", "no-room-for-copies", "host", "device", "device-without-room"],
)
def test_where_a_prompt_is_split_to(forced, free, where):
    made = moves(policy(forced), track("a", split=False), free=free)
    assert made == ((Compress("a", where),) if where else ())


@pytest.mark.parametrize(
    ("forced", "world", "fields"),
    [
        ("host", {"host_slots": 14_999}, {}),
        ("auto", {"free": 3_000, "host_slots": 14_999}, {}),
        ("auto", {}, {"remaining": 1}),
    ],
    ids=["host-is-full", "both-are-full", "at-its-end"],
)
def test_a_prompt_stays_whole(forced, world, fields):
    assert moves(policy(forced), track("a", split=False, **fields), **world) == ()


def test_the_order_of_kv_is_kept_on_the_device_unless_the_host_is_forced():
    def chosen(residency, *tracks, **world):
        return moves(policy(residency, keep_order=True), *tracks, **world)

    whole, split = track("a", split=False), track("a")
    assert chosen("auto", whole) == (Compress("a", DEVICE),)
    assert chosen("auto", whole, free=3_000) == ()
    assert chosen("auto", split, track("b"), free=0) == ()
    assert chosen("host", whole) == (Compress("a", HOST),)


def test_a_residual_larger_than_the_staging_region_stays_on_the_device():
    small = policy("host", staging=14_999)
    assert moves(small, track("a", split=False)) == ()
    assert moves(policy("host", staging=15_000), track("a", split=False))


def test_drafting_that_does_not_pay_is_looked_at_later():
    hopeless = track("a", split=False, p=0.0)
    assert moves(policy(), hopeless) == ()
    assert hopeless.look_at == NOW + 64
    assert moves(policy("device"), track("a", split=False, p=0.0)), "forced"


def test_rows_that_emit_several_tokens_wait_fewer_iterations():
    proposals = Proposals(Acceptance(Prior(1.0)), most=3, count=3)
    hopeless = track("a", split=False, p=0.0, proposals=proposals)
    assert moves(policy(), hopeless) == ()
    assert hopeless.look_at == NOW + 64 / 4


@pytest.mark.parametrize(
    ("of_others", "expected"), [(0.5, (Compress("a", DEVICE),)), (0.95, ())]
)
def test_lucky_first_rows_do_not_keep_a_prompt_from_being_compressed(
    of_others, expected
):
    proposals = Proposals(Acceptance(Prior(of_others, 64.0)), most=8)
    for _ in range(2):
        proposals.acceptance.observe(8, 8)
    lucky = track("a", split=False, p=0.93, proposals=proposals)
    assert moves(policy(), lucky) == expected


def test_a_first_compression_that_compiles_does_not_end_compressing():
    """Seen on an H200: 0.4 s for each of the first prompts, 0.05 s for the others."""
    chooser = policy()
    costs = chooser._throughput._estimates.split_s
    for seconds in (5.0, 0.001, 5.0):
        costs.observe(seconds / 20_000)
        chooser._throughput.refresh(1)
        (move,) = moves(chooser, track("a", split=False))
        assert isinstance(move, Compress)
    for _ in range(4):
        costs.observe(20.0 / 20_000)
    assert not moves(chooser, track("a", split=False)), "it is slow indeed"


def test_few_prompts_are_split_at_once_and_share_the_room():
    plain = [track(rid, split=False) for rid in "abcd"]
    assert len(moves(policy(), *plain)) == MAX_COMPRESSIONS
    # Room for one request's copies beside the rounds: the second goes to the host.
    free = 5_000 + 4 * (2 * 17 + 1)
    assert moves(policy(), *plain, free=free) == (
        Compress("a", DEVICE),
        Compress("b", HOST),
    )


# -- relief ----------------------------------------------------------------------


def test_residuals_stay_when_there_is_room_or_none_may_leave():
    assert moves(policy(), track("a"), track("b")) == ()
    assert moves(policy("device"), track("a"), track("b"), free=0) == ()


@pytest.mark.parametrize("order", [1, -1])
def test_the_residual_whose_prefetch_is_used_best_leaves_first(order):
    # 75 ms of link a reload: the more drafts are right, the fewer reloads.
    chooser = policy(link=2e8)
    batch = [track("good", p=0.98), track("bad", p=0.3), track("fair", p=0.8)]
    for each in batch:
        chooser.drafting_pays(each, 0.0, LEAVE)
    assert moves(chooser, *batch[::order], free=0) == (Offload("good"),)


def test_the_largest_residuals_are_the_ones_considered():
    small = [track(f"s{i}", prompt=1000, p=0.98) for i in range(12)]
    large = [track(f"l{i}", prompt=40_000, p=0.9) for i in range(8)]
    (made,) = moves(policy(), *small, *large, free=0)
    assert made.rid.startswith("l")


def test_a_whole_prompt_is_split_straight_to_the_host():
    assert moves(policy(), track("a", split=False), free=0) == (Compress("a", HOST),)
    unsettled = track("a", split=False, settled_at=NOW + 1, look_at=NOW + 1)
    assert moves(policy(), unsettled, free=0) == ()


@pytest.mark.parametrize(
    ("stayed", "free", "leaves"),
    [(MIN_STAY - 1, 10**6, False), (MIN_STAY, 10**6, True), (0, 0, True)],
    ids=["just-moved", "stayed", "out-of-memory"],
)
def test_waiting_requests_move_nobody_before_the_minimum_stay(stayed, free, leaves):
    # The base is what the iteration takes: more requests share it.
    chooser = policy(base_s=0.2)
    batch = [track(rid, moved_at=NOW - stayed) for rid in "ab"]
    assert bool(moves(chooser, *batch, free=free, blocked=True)) is leaves


def test_nobody_is_offloaded_over_a_link_that_makes_it_slower():
    batch = [track(rid) for rid in "ab"]
    slow = policy(link=1e6, base_s=0.2)
    assert moves(slow, *batch, blocked=True) == ()
    assert moves(slow, *batch, free=0), "out of memory: slower than not at all"


# -- parking ---------------------------------------------------------------------


def test_the_newest_is_swapped_when_nothing_can_be_offloaded():
    batch = [track(rid, HOST) for rid in "abc"]
    assert moves(policy(), *batch, free=0) == (SwapOut("c"),)
    batch[2].staged = True
    assert moves(policy(), *batch, free=0) == (SwapOut("b"),)


@pytest.mark.parametrize(
    "fields",
    [{"staged": True}, {"emitted_at": NOW - 2}, {"moved_at": NOW - 2}],
    ids=["staged", "just-emitted", "just-moved"],
)
def test_a_request_in_flight_is_not_swapped(fields):
    batch = [track("a", HOST, **fields), track("b", HOST, **fields)]
    assert moves(policy(), *batch, free=0) == ()


def test_the_last_one_running_is_not_swapped():
    left = [track("a", HOST), track("b", SWAPPED, moved_at=NOW)]
    assert moves(policy(), *left, free=0) == ()


def test_swapped_requests_return_in_order_once_they_fit():
    batch = [track("a", HOST), track("b", SWAPPED), track("c", SWAPPED, prompt=1000)]
    needed = 5_000 + 4 * (2 * 17 + 1)
    assert moves(policy(), *batch, free=needed) == (SwapIn("b"),)
    # "c" would fit, but "b" left first.
    assert moves(policy(), *batch, free=needed - 1) == ()
    batch[1].moved_at = NOW - MIN_STAY + 1
    assert moves(policy(), *batch) == ()


def test_a_server_with_nobody_else_does_not_wait_for_the_minimum_stay():
    assert moves(policy(), track("a", SWAPPED, moved_at=NOW - 1)) == (SwapIn("a"),)


def test_nobody_is_split_or_pinned_before_the_swapped_return():
    batch = [track("a", SWAPPED), track("b", HOST), track("c", split=False)]
    assert moves(policy(), *batch) == (SwapIn("a"),)


# -- pins and leaving ------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "world", "fields", "forced", "pinned"),
    [
        (10**6, {}, {}, "auto", True),
        (25_000 + 2 * 35, {}, {}, "auto", True),
        (24_999 + 2 * 35, {}, {}, "auto", False),
        (10**6, {}, {"moved_at": NOW - MIN_STAY + 1}, "auto", False),
        (10**6, {}, {"staged": True}, "auto", False),
        (10**6, {}, {"remaining": 16}, "auto", False),
        (10**6, {}, {}, "host", False),
        (10**6, {"now": NOW + 1}, {}, "auto", False),
    ],
    ids=["room", "just", "short", "new", "staged", "end", "forced", "between"],
)
def test_a_residual_is_brought_back_when_memory_is_spare(
    free, world, fields, forced, pinned
):
    made = moves(policy(forced), track("a", HOST, **fields), free=free, **world)
    assert made == ((Load("a"),) if pinned else ())


@pytest.mark.parametrize("where", [DEVICE, HOST])
def test_leaving_drafting_gives_up_copies_or_brings_the_residual_back(where):
    chooser, world = policy(), SchedulerInput(free_slots=10**6, host_slots=0, rows=1)
    leaving = Restore("a") if where is DEVICE else Load("a")
    assert chooser.leave_drafting([track("a", where)], NOW, world) == leaving


@pytest.mark.parametrize(
    ("free", "blocked", "stayed"),
    [(18_000, False, MIN_STAY), (10**6, True, MIN_STAY), (10**6, False, MIN_STAY - 1)],
    ids=["no-room", "others-wait", "just-moved"],
)
def test_a_residual_on_the_host_stays_there_when_it_may_not_return(
    free, blocked, stayed
):
    world = SchedulerInput(free_slots=free, host_slots=0, rows=1, blocked=blocked)
    there = track("a", HOST, moved_at=NOW - stayed)
    assert policy().leave_drafting([there], NOW, world) is None


def test_leaving_takes_a_worse_gain_than_entering():
    chooser = policy()
    gains = iter([ENTER, (ENTER + LEAVE) / 2, LEAVE - 0.01])
    for entered, stays in [(True, True), (False, True), (False, False)]:
        gain = next(gains)
        best = SimpleNamespace(length=4, gain=gain)
        chooser._throughput.best = lambda *args, choice=best, **more: choice
        assert bool(moves(chooser, track("a", split=False))) is entered
        assert chooser.drafting_pays(track("a"), 0.0, LEAVE) is stays


@pytest.mark.parametrize(
    ("cycles", "stays"),
    [([(4, 0)], True), ([(4, 0)] * 2, False), ([(16, 16)] * 3 + [(16, 0)], True)],
    ids=["one-rejection", "two", "one-after-many"],
)
def test_a_single_rejection_ends_no_drafting(cycles, stays):
    asked, least = track("a"), 1.5
    for drafted, accepted in cycles:
        asked.acceptance.observe(drafted, accepted)
    chooser = policy()
    gain = chooser._throughput.best(asked, DEVICE).gain
    assert (gain < least) is (len(cycles) < 3), gain
    assert chooser.drafting_pays(asked, 0.0, least) is stays


@pytest.mark.parametrize(
    ("residency", "p", "remaining", "probes_s", "pays"),
    [
        # A token read in full takes 20 ms, so drafting saves at most that on each.
        ("auto", 0.95, 1000, 1.0, True),
        ("auto", 0.95, 1000, 10.0, False),
        ("auto", 0.95, 50, 1.0, False),
        ("auto", 0.95, 50, 0.0, True),
        ("auto", 0.0, 1000, 0.0, False),
        ("device", 0.0, 50, 10.0, True),
        ("host", 0.0, 50, 10.0, True),
    ],
)
def test_probes_run_if_the_remaining_tokens_pay_for_them(
    residency, p, remaining, probes_s, pays
):
    each = track("a", split=False, p=p, remaining=remaining)
    assert policy(residency).probes_pay(each, probes_s) is pays
