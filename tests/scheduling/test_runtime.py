"""Runtime under random histories: a small executor performs every plan and counts."""

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.scheduling.plan import (
    Compress,
    Draft,
    Load,
    Offload,
    Plain,
    RequestSpec,
    Residency,
    Restore,
    RowResult,
    SchedulerInput,
    SwapIn,
    SwapOut,
    Verify,
    Wait,
)
from vericache_sglang.scheduling.residency import MIN_STAY
from vericache_sglang.scheduling.runtime import Runtime
from vericache_sglang.scheduling.settings import RuntimeSettings

WHOLE = 200
"""Tokens of prompts that are never compressed."""

MOVES = (Offload, SwapOut, Load, SwapIn, Compress, Restore)


class Executor:
    """Performs plans and checks each; what happens is drawn from a seed.

    Args:
        config: Settings under test.
        latency: Iterations from a reload's start to its arrival.
        seed: Draws accepted drafts, memory pressure and failures.
        calm: Memory is never short and nothing fails.
        late: A verification's outcome is told one iteration later, or before moves.
    """

    def __init__(self, config, *, latency=1, seed=0, calm=False, late=False):
        self.config, self.latency, self.calm = config, latency, calm
        self.random = Random(seed)
        self.runtime = Runtime(config)
        self.plans, self.moved_at, self.begun = [], {}, {}
        self.left, self.drafts, self.where, self.shapes = {}, Counter(), {}, {}
        self.coming, self.staged = [], {}
        self.longest = 0
        self.asynchronous, self.unreported = late, []
        self.failed = set()
        # Draft rows whose result was not told: tokens proposed in vain.
        self.vain = {}

    def arrive(self, rid, tokens, prompt=400):
        whole = prompt == WHOLE
        shape = RequestSpec(
            rid=rid,
            prompt=prompt,
            kept=0 if whole else prompt // 4,
            dropped=0 if whole else prompt - prompt // 4,
            remaining=tokens,
            compressible=not whole,
            proposals=self.random.randint(0, self.config.proposals),
        )
        self.shapes[rid], self.left[rid], self.where[rid] = shape, tokens, None
        self.runtime.arrive(shape)

    def leave(self, rid):
        self.runtime.leave(rid)
        self._forget(rid)
        del self.left[rid], self.where[rid]

    def iterate(self):
        now = self.runtime.now + 1
        due = [each for each in self.coming if each[0] <= now]
        self.coming = [each for each in self.coming if each[0] > now]
        arrived, failed = [], []
        for _, rid in due:
            if self._happens(0.1):
                failed.append(rid)
                del self.staged[rid]
            else:
                arrived.append(rid)
                self.staged[rid] = True
        self.free = self.random.choice([0, 300, 10**6]) if self._happens(0.5) else 10**6
        rows = max(1, len(self.left))
        width = self.config.draft_length + self.config.proposals
        self.short = self.free < rows * (2 * width + 3)
        unready = frozenset(rid for rid in self.left if self._happens(0.1))
        plan = self.runtime.plan(
            SchedulerInput(
                free_slots=self.free,
                host_slots=10**6,
                rows=rows,
                blocked=self._happens(0.3),
                arrived=tuple(arrived),
                failed=tuple(failed),
                proposals=0 if self._happens(0.2) else self.config.proposals,
                unready=unready,
            )
        )
        for rid in unready & plan.rows.keys():
            assert getattr(plan.rows[rid], "proposals", 0) == 0
        self.plans.append(plan)
        for rid in plan.abandoned:
            assert rid in failed
            assert rid in self.failed, "one failure is no reason"
            self.leave(rid)
        self.failed = {*self.failed, *failed} & self.left.keys()
        self._check(plan)
        launched_before, self.unreported = self.unreported, []
        self._perform(plan)
        if plan.moves:
            launched_before, self.unreported = [*launched_before, *self.unreported], []
        self._report(launched_before)
        self._make(plan)

    def _happens(self, p):
        return not self.calm and self.random.random() < p

    def _check(self, plan):
        assert plan.rows.keys() == self.left.keys(), "every request, one action"
        kinds = Counter(type(action) for action in plan.rows.values())
        assert kinds[Verify] <= self.config.max_verifies
        for rid, action in plan.rows.items():
            assert action.rid == rid
            where = self.where[rid]
            if where is None:
                assert isinstance(action, Plain | Wait)
                assert isinstance(action, Plain) or self._may_have_ended(rid)
            elif where is Residency.SWAPPED:
                assert isinstance(action, Wait)
            elif isinstance(action, Verify):
                assert where is Residency.DEVICE or self.staged.get(rid)
            else:
                assert isinstance(action, Draft | Wait)

    def _perform(self, plan):
        for each in plan.stage_ins:
            assert self.where[each.rid] is Residency.HOST
            assert each.rid not in self.staged, "one reload a round"
            self.staged[each.rid] = False
            self.coming.append((plan.iteration + self.latency, each.rid))
        held = {self._key(rid): self.shapes[rid].dropped for rid in self.staged}
        assert sum(held.values()) <= self.config.staging_slots
        for rid, action in plan.rows.items():
            if isinstance(action, Draft):
                self._draft(rid, action.proposals)
            elif isinstance(action, Plain):
                more = self._agreed(action.proposals)
                if action.proposals:
                    self._tell(RowResult(rid, 0, 1 + more, action.proposals))
                else:
                    self._emit(rid, 1)
            elif isinstance(action, Verify):
                self._verify(rid, action.proposals)

    def _make(self, plan):
        for move in plan.moves:
            if move.rid not in self.left:
                continue
            if self._happens(0.2):
                self.runtime.refused(move)
            else:
                self._move(move, plan.iteration)

    def _may_have_ended(self, rid):
        pending = [r.drafted + r.proposed + 1 for r in self.unreported if r.rid == rid]
        return self.left[rid] <= sum(pending)

    def _agreed(self, proposals):
        right = 0
        while right < proposals and self.random.random() < 0.6:
            right += 1
        return right

    def _tell(self, result):
        """Tell a result at once, or one iteration later."""
        if self.asynchronous:
            self.unreported.append(result)
        else:
            self._report([result])

    def _draft(self, rid, proposals):
        agreed = self._agreed(proposals)
        self.drafts[rid] += 1 + agreed
        self.vain[rid] = self.vain.get(rid, 0) + proposals - agreed
        most = self.drafts[rid] + self.vain[rid]
        assert most <= self.config.draft_length + self.config.proposals
        # One more token comes with the verification.
        assert most < self.left[rid]
        ended = self._happens(0.05)
        if proposals or ended:
            self._tell(RowResult(rid, 1 + agreed, 0, proposals, ended))

    def _verify(self, rid, proposals):
        drafted = self.drafts.pop(rid, 0)
        proposed = self.vain.pop(rid, 0) + proposals
        width = self.config.draft_length + self.config.proposals
        assert drafted + proposed <= width
        assert drafted + proposed < self.left[rid]
        right = 0
        while right < drafted and self.random.random() < 0.9:
            right += 1
        more = self._agreed(proposed) if right == drafted else 0
        waited = self.runtime.now - self.begun[rid]
        self.longest = max(self.longest, waited)
        self._forget(rid)
        self.begun[rid] = self.runtime.now
        self.failed.discard(rid)
        self._tell(RowResult(rid, drafted, right + more + 1, proposed))

    def _report(self, results):
        self.runtime.report(results)
        for result in results:
            if result.rid not in self.left:
                continue
            if result.emitted:
                self._emit(result.rid, result.emitted)
            elif result.rid in self.vain:
                self.vain[result.rid] -= result.proposed - result.drafted + 1

    def _emit(self, rid, tokens):
        assert tokens <= self.left[rid]
        self.left[rid] -= tokens
        if not self.left[rid]:
            self.leave(rid)

    def _move(self, move, now):
        assert isinstance(move, MOVES)
        rid = move.rid
        if isinstance(move, Offload | Load) and not self.short:
            assert now - self.moved_at.get(rid, -(10**6)) >= MIN_STAY, "swings"
        group = ""
        if isinstance(move, Compress):
            assert self.where[rid] is None
            self.where[rid] = move.residency
        elif isinstance(move, Offload):
            assert self.where[rid] is Residency.DEVICE
            self.where[rid] = Residency.HOST
        elif isinstance(move, SwapOut):
            assert self.where[rid] is Residency.HOST
            assert rid not in self.staged
            self.where[rid] = Residency.SWAPPED
        elif isinstance(move, SwapIn):
            # The longest parked of all.
            swapped = [r for r, w in self.where.items() if w is Residency.SWAPPED]
            assert rid == min(swapped, key=self.moved_at.get)
            self.where[rid] = Residency.HOST
        elif isinstance(move, Load):
            self.where[rid] = Residency.DEVICE
        else:
            self.where[rid] = None
            self.drafts.pop(rid, None)
            self.vain.pop(rid, None)
        if self.where[rid] is Residency.HOST and self.config.coalesce:
            group = f"g{int(rid[1:]) % 3}" if self.shapes[rid].prompt == 400 else ""
        self._forget(rid)
        self.moved_at[rid] = self.begun[rid] = now
        self.runtime.moved(move, group)

    def _key(self, rid):
        return self.runtime.tracks[rid].group or rid

    def _forget(self, rid):
        self.staged.pop(rid, None)
        self.coming = [each for each in self.coming if each[1] != rid]


CONFIGS = st.builds(
    RuntimeSettings,
    pacing=st.sampled_from(["staggered", "staggered", "lockstep", "sequential"]),
    residency=st.sampled_from(["auto", "host", "device"]),
    draft_length=st.integers(1, 16),
    proposals=st.sampled_from([0, 0, 1, 4]),
    max_verifies=st.integers(1, 4),
    staging_slots=st.sampled_from([300, 450, 900]),
    token_bytes=st.sampled_from([1, 10**5, 10**7]),
    coalesce=st.booleans(),
)
HISTORIES = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.integers(1, 40)),
        st.tuples(
            st.just("arrive"), st.integers(1, 120), st.sampled_from([400, 600, WHOLE])
        ),
        st.tuples(st.just("leave"), st.integers(0, 9)),
    ),
    min_size=3,
    max_size=20,
)


def follow(config, history, latency, seed, late, runtime=None):
    executor, arrived = Executor(config, latency=latency, seed=seed, late=late), 0
    executor.runtime = runtime or executor.runtime
    for kind, *rest in history:
        if kind == "run":
            for _ in range(rest[0]):
                executor.iterate()
        elif kind == "arrive":
            executor.arrive(f"r{arrived}", *rest)
            arrived += 1
        elif executor.left:
            rids = list(executor.left)
            executor.leave(rids[rest[0] % len(rids)])
    return executor


@settings(max_examples=300, deadline=None)
@given(CONFIGS, HISTORIES, st.integers(1, 6), st.integers(0, 99), st.booleans())
def test_every_history_keeps_the_promises_and_ranks_agree(
    config, history, latency, seed, late
):
    one = follow(config, history, latency, seed, late)
    other = follow(config, history, latency, seed, late)
    assert one.plans == other.plans, "equal reports give equal plans"
    for rid in list(one.left):
        one.leave(rid)
    assert one.runtime.figures()["staging_held_slots"] == 0
    assert not one.runtime.tracks


@settings(max_examples=300, deadline=None)
@given(CONFIGS, HISTORIES, HISTORIES, st.integers(0, 99), st.booleans())
def test_a_cleared_runtime_plans_as_a_new_one(config, before, history, seed, late):
    """After an error, ranks agree again, whichever results each had received."""
    runtime = follow(config, before, 2, seed, late).runtime
    runtime.clear()
    assert runtime.estimates.report() == Runtime(config).estimates.report()
    again = follow(config, history, 2, seed, late, runtime)
    assert again.plans == follow(config, history, 2, seed, late).plans


@given(CONFIGS, st.integers(1, 8), st.integers(0, 99), st.booleans())
def test_every_history_ends_once_nobody_presses(config, count, seed, late):
    executor = Executor(config, latency=2, seed=seed, late=late)
    for i in range(count):
        executor.arrive(f"r{i}", 60)
    for _ in range(30):
        executor.iterate()
    executor.calm = True
    for _ in range(4000):
        if not executor.left:
            break
        executor.iterate()
    assert not executor.left


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from([300, 600, 1200]),
    st.sampled_from([1, 10**4, 10**6]),
)
def test_a_verification_comes_within_its_bound(
    count, draft_length, latency, staging, token_bytes
):
    config = RuntimeSettings(
        residency="host",
        draft_length=draft_length,
        max_verifies=1,
        staging_slots=staging,
        token_bytes=token_bytes,
    )
    executor = Executor(config, latency=latency, calm=True)
    for i in range(count):
        executor.arrive(f"r{i}", 150)
    windows = max(config.horizon, 2 * draft_length + 4)
    for _ in range(600):
        executor.iterate()
    # Placed at worst behind everyone else: each holds the region for its booked
    # windows or its latency, whichever is longer, and the iteration of its
    # verification; then come its own windows, all of the horizon.
    link_s = 300 * token_bytes / 8e9
    iteration_s = executor.runtime.estimates.iteration.iteration_s.value
    span = min(windows, 1 + int(link_s / iteration_s))
    assert executor.longest <= windows + count * (max(span, latency) + 2)
