"""Control requests wait for answered requests to leave, and for nothing else."""

import pytest

pytest.importorskip("sglang")

from types import SimpleNamespace

from sglang.srt.managers.io_struct import (
    AbortReq,
    FlushCacheReqInput,
    UpdateWeightFromDiskReqInput,
)

from vericache_patches.managers_scheduler_abort import abort_request
from vericache_sglang.observability.consistency_check import REPLAY_PREFIX
from vericache_sglang.runtime.control_requests import (
    MOST_ITERATIONS,
    ControlGate,
    may_change_answers,
    needs_idle,
)

pytestmark = pytest.mark.sglang

WEIGHTS = UpdateWeightFromDiskReqInput(model_path="m")
FLUSH = FlushCacheReqInput()
ABORT = AbortReq(rid="r")


class Request:
    """What the gate asks SGLang's ``Req``."""

    def __init__(self, rid="client", *, done=False):
        self.rid, self._done = rid, done

    def finished(self):
        return self._done


class Scheduling:
    """What the gate asks SGLang's scheduler, with these requests in its batches."""

    def __init__(self, *batch, waiting=(), paused=False):
        self.batch, self.waiting_queue, self._engine_paused = batch, waiting, paused
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.aborted = []

    def collect_inflight_reqs(self):
        return set(self.batch)

    def is_fully_idle(self):
        queued = self.waiting_queue or self.grammar_manager.grammar_queue
        return not self.batch and not queued

    def abort_request(self, given):
        self.aborted.append(given.rid)


@pytest.fixture
def gate():
    made = ControlGate(lambda: made.loads.append(len(made.loads)))
    made.loads = []
    return made


def test_only_what_is_known_to_be_harmless_is_served_beside_requests():
    assert not needs_idle(ABORT)
    assert needs_idle(FLUSH)
    assert needs_idle(WEIGHTS)
    assert needs_idle(object())
    assert may_change_answers(WEIGHTS)
    assert not may_change_answers(FLUSH)


def test_inputs_wait_for_answered_requests_to_leave_their_batch(gate):
    answered = Scheduling(Request(done=True))
    assert list(gate.admit(answered, [ABORT])) == [ABORT]
    assert list(gate.admit(answered, [WEIGHTS])) == []
    assert list(gate.admit(answered, [ABORT, FLUSH])) == []
    assert gate.loads == []
    assert list(gate.admit(Scheduling(), [])) == [WEIGHTS, ABORT, FLUSH]
    assert (gate.loads, gate.epoch) == ([0], 1)
    assert list(gate.admit(Scheduling(), [])) == []


@pytest.mark.parametrize("place", ["batch", "waiting", "grammar"])
def test_a_replay_is_aborted_once_and_waited_for(gate, place):
    replay = Request(f"{REPLAY_PREFIX}3")
    busy = Scheduling(
        *([replay] if place == "batch" else []),
        waiting=[replay] if place == "waiting" else [],
    )
    if place == "grammar":
        busy.grammar_manager.grammar_queue.append(replay)
    for _ in range(3):
        assert list(gate.admit(busy, [])) == []
        assert list(gate.admit(busy, [FLUSH])) == []
    assert busy.aborted == [replay.rid]
    assert len(list(gate.admit(Scheduling(), []))) == 3
    assert gate.epoch == 0, "a flush changes no answer"


def test_replays_are_aborted_through_the_hook_that_compares_whole_ids(gate):
    """SGLang compares beginnings; the hook hides what only begins with an id."""

    class Hooked(Scheduling):
        """A scheduler with SGLang's comparison below our hook."""

        draft_worker, chunked_req = object(), None
        disagg_decode_prealloc_queue = disagg_decode_transfer_queue = None

        def abort_request(self, given):
            abort_request(Hooked.compare, self, given)

        def compare(self, given):
            rids = [req.rid for req in self.batch if req.rid.startswith(given.rid)]
            self.aborted.append(rids)

    replays = [Request(f"{REPLAY_PREFIX}{i}") for i in (1, 12)]
    busy = Hooked(*replays)
    assert list(gate.admit(busy, [WEIGHTS])) == []
    assert sorted(busy.aborted) == [[req.rid] for req in replays]


@pytest.mark.parametrize(
    "scheduling",
    [
        Scheduling(Request(done=True), Request()),
        Scheduling(Request(done=True), waiting=[Request()]),
        Scheduling(Request(f"{REPLAY_PREFIX}0"), Request()),
        Scheduling(Request(done=True), paused=True),
    ],
    ids=["running", "waiting", "beside a replay", "paused"],
)
def test_inputs_do_not_wait_for_what_may_last(gate, scheduling):
    assert list(gate.admit(scheduling, [FLUSH])) == [FLUSH]
    assert scheduling.aborted == []


def test_a_hold_has_an_end_that_all_ranks_reach_together(gate, caplog):
    stuck = Scheduling(Request(done=True))
    passed = [list(gate.admit(stuck, [FLUSH] if not i else [])) for i in range(400)]
    assert passed.index([FLUSH]) == MOST_ITERATIONS
    assert "wait no longer" in caplog.text
    assert list(gate.admit(stuck, [FLUSH])) == [], "the next one has its own time"
