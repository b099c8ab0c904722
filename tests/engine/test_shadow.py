"""Which requests are checked again, what is kept of them, and how answers compare."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang")

from array import array

from sglang.srt.managers.io_struct import (
    AbortReq,
    FlushCacheReqInput,
    UpdateWeightFromDiskReqInput,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from vericache_patches import managers_output_streamer
from vericache_sglang.engine.figures import KEY, Figures
from vericache_sglang.engine.shadow import MOST_PENDING, Shadow
from vericache_sglang.engine.shadow_inputs import may_change_answers, needs_quiet
from vericache_sglang.engine.shadow_record import (
    Served,
    compare,
    repeatable,
    served_from,
)
from vericache_sglang.engine.tiered_cache import TieredCache

pytestmark = pytest.mark.sglang

LENGTH = {"type": "length", "length": 3}
STOP = {"type": "stop", "matched": 3}


def finished(rid="r", rounds=2, temperature=0.0, custom=None):
    """Return a request that emitted four tokens, the last one past its end."""
    params = SamplingParams(temperature=temperature, custom_params=custom)
    params.normalize(None)
    req = Req(rid, None, array("q", [1, 2, 3]), params)
    req.output_ids.extend([4, 5, 6, 7])
    req.finished_len = 3
    req.finished_reason = FINISH_LENGTH(3)
    req.customized_info = {KEY: Figures(True, 8, rounds=rounds)}
    return req


def served(output, finish=LENGTH):
    return Served(rid="r", prompt=[1], output=output, finish=finish, params=None)


def test_a_drafted_greedy_request_is_checked():
    assert repeatable(finished())


@pytest.mark.parametrize(
    "change",
    [
        {"customized_info": None},
        {"customized_info": {KEY: Figures(True, 8)}},
        {"finished_reason": FINISH_ABORT()},
        {"session": SimpleNamespace()},
        {"session_id": "s"},
        {"multimodal_inputs": SimpleNamespace()},
        {"input_embeds": [[0.0]]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_cannot_be_repeated_is_not_checked(change):
    req = finished()
    for name, value in change.items():
        setattr(req, name, value)
    assert not repeatable(req)


def test_a_sampled_request_is_not_checked():
    assert not repeatable(finished(temperature=0.7))


def test_the_copy_ends_where_the_client_saw_it_end_and_is_decoded_plainly():
    custom = {"mine": 1, KEY: {"enabled": True, "draft_length": 2}}
    req = finished(custom=custom)
    copied = served_from(req)
    assert list(copied.output) == [4, 5, 6]
    assert list(copied.prompt) == [1, 2, 3]
    assert copied.finish == LENGTH
    assert copied.params.custom_params == {"mine": 1, KEY: {"enabled": False}}
    assert req.sampling_params.custom_params[KEY] == custom[KEY], "the request's own"
    req.output_ids[0] = 9
    assert copied.output[0] == 4


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_the_sample_has_the_size_asked_for(rate):
    shadow = Shadow(rate, seed=1)
    rids = [f"{i:032x}" for i in range(4000)]
    chosen = [rid for rid in rids if shadow.samples(rid)]
    # Six standard deviations.
    spread = 6 * (rate * (1 - rate) * len(rids)) ** 0.5
    assert abs(len(chosen) - rate * len(rids)) <= spread
    assert chosen == [rid for rid in rids if Shadow(rate, seed=1).samples(rid)]
    other = [rid for rid in rids if Shadow(rate, seed=2).samples(rid)]
    assert (chosen == other) is (rate in (0.0, 1.0))


def test_nothing_is_remembered_at_rate_0():
    shadow = Shadow(0.0, seed=0)
    shadow.note_finished(finished())
    assert set(shadow.report().values()) == {0}


def test_the_latest_requests_are_remembered():
    shadow = Shadow(1.0, seed=0)
    for i in range(MOST_PENDING + 3):
        shadow.note_finished(finished(f"r{i}"))
    report = shadow.report()
    assert report["shadow_pending"] == MOST_PENDING
    assert report["shadow_dropped"] == 3
    assert report["shadow_checks"] == 0


@given(
    st.lists(st.integers(0, 2), max_size=6),
    st.lists(st.integers(0, 2), max_size=6),
)
def test_the_first_difference_is_found(ours, full):
    top = [(-1.0, -1.5 - i) for i in range(len(full))]
    found = compare(served(ours), full, LENGTH, top)
    if ours == full:
        assert found is None
        return
    assert ours[: found.position] == full[: found.position]
    assert ours[found.position : found.position + 1] == (
        [] if found.served is None else [found.served]
    )
    assert full[found.position : found.position + 1] == (
        [] if found.full is None else [found.full]
    )
    assert found.served != found.full
    past = found.position >= len(full)
    assert found.margin == (None if past else 0.5 + found.position)


def test_another_finish_reason_is_a_difference():
    found = compare(served([4, 5, 3], LENGTH), [4, 5, 3], STOP, [(0.0, -1.0)] * 3)
    assert (found.position, found.served, found.full) == (3, None, None)
    assert compare(served([4, 5, 3], STOP), [4, 5, 3], STOP, [(0.0, -1.0)] * 3) is None


def test_only_what_is_known_to_be_harmless_is_served_beside_a_shadow():
    weights = UpdateWeightFromDiskReqInput(model_path="m")
    flush = FlushCacheReqInput()
    assert not needs_quiet(AbortReq(rid="r"))
    assert needs_quiet(flush)
    assert needs_quiet(weights)
    assert needs_quiet(object())
    assert may_change_answers(weights)
    assert not may_change_answers(flush)


class Scheduling:
    """What a shadow asks SGLang's scheduler, with these requests in its batches."""

    def __init__(self, *batch, waiting=(), paused=False):
        self.batch, self.waiting_queue, self._engine_paused = batch, waiting, paused

    def collect_inflight_reqs(self):
        return set(self.batch)

    def is_fully_idle(self):
        return not self.batch and not self.waiting_queue


def unfinished():
    req = finished("unfinished")
    req.finished_reason = None
    return req


def test_inputs_wait_for_answered_requests_to_leave_their_batch():
    shadow = Shadow(0.0, seed=0)
    weights, flush, abort = object(), FlushCacheReqInput(), AbortReq(rid="r")
    assert list(shadow.inputs(Scheduling(finished()), [abort])) == [abort]
    assert list(shadow.inputs(Scheduling(finished()), [weights])) == []
    assert list(shadow.inputs(Scheduling(finished()), [abort, flush])) == []
    assert list(shadow.inputs(Scheduling(), [])) == [weights, abort, flush]
    assert list(shadow.inputs(Scheduling(), [])) == []


@pytest.mark.parametrize(
    "scheduling",
    [
        Scheduling(finished(), unfinished()),
        Scheduling(finished(), waiting=[unfinished()]),
        Scheduling(finished(), paused=True),
    ],
    ids=["running", "waiting", "paused"],
)
def test_inputs_do_not_wait_for_what_may_last(scheduling):
    flush = FlushCacheReqInput()
    assert list(Shadow(0.0, seed=0).inputs(scheduling, [flush])) == [flush]


def test_new_weights_make_remembered_answers_worthless():
    shadow = Shadow(1.0, seed=0)
    shadow.note_finished(finished())
    flush, weights = FlushCacheReqInput(), UpdateWeightFromDiskReqInput(model_path="m")
    assert list(shadow.inputs(Scheduling(), [flush])) == [flush]
    assert shadow.report()["shadow_pending"] == 1
    assert list(shadow.inputs(Scheduling(), [weights])) == [weights]
    assert shadow.report()["shadow_pending"] == 0
    assert shadow.report()["shadow_dropped"] == 1


def test_a_shadow_reaches_neither_the_prefix_tree_nor_a_client(monkeypatch):
    reached = []
    table = torch.arange(40, dtype=torch.int32).reshape(4, 10)
    cache = TieredCache.__new__(TieredCache)
    cache.req_to_token_pool = SimpleNamespace(req_to_token=table)
    cache.segments = SimpleNamespace(active=False)
    monkeypatch.setattr(
        UnifiedRadixCache,
        "cache_unfinished_req",
        lambda cache, req, chunked: reached.append("tree"),
    )
    for req in (finished(), finished()):
        req.kv.req_pool_idx = 2
        req.get_fill_ids = lambda: array("q", range(6))
        req.vericache_shadow = bool(reached)
        cache.cache_unfinished_req(req, chunked=True)
        managers_output_streamer.accept(
            lambda accumulator, req: reached.append("client"),
            SimpleNamespace(default_stream_interval=1),
            req=req,
        )
    assert reached == ["tree", "client"], "the ordinary request does"
    assert req.prefix_indices.tolist() == [20, 21, 22, 23, 24, 25]
    assert req.prefix_indices.dtype == torch.int64
