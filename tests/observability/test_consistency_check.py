"""Which requests are replayed, when, what is sent, and how answers are compared."""

import asyncio
from array import array
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang")

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.aio_rwlock import RWLock

from vericache_sglang.observability.consistency_check import (
    MOST_ATTEMPTS,
    MOST_PENDING,
    REPLAY_PREFIX,
    ConsistencyCheck,
    compare,
    is_replay,
    replay_of,
)
from vericache_sglang.observability.guard import Guard
from vericache_sglang.observability.request_stats import KEY

pytestmark = pytest.mark.sglang

LENGTH = {"type": "length", "length": 3}
STOP = {"type": "stop", "matched": 3}
ABORT = {"type": "abort", "message": "Aborted"}


def request(**fields):
    params = {"temperature": 0.0, **fields.pop("sampling_params", {})}
    made = GenerateReqInput(text="prompt", sampling_params=params, **fields)
    made.normalize_batch_and_arguments()
    return made


def told(rid="r", finish=LENGTH, cycles=2):
    """Return the ``meta_info`` of an answer."""
    return {"id": rid, "finish_reason": finish, KEY: {"cycles": cycles}}


class Manager:
    """What the check uses of SGLang's ``TokenizerManager``, with its real lock.

    A replay is answered with ``output`` once ``release`` is set.
    """

    preferred_sampling_params = None
    sampling_params_class = SamplingParams

    def __init__(self, output=(4, 5, 6), finish=LENGTH):
        self.output, self.finish = list(output), finish
        self.rid_to_state = {}
        self.replays, self.withdrawn, self.epoch = [], [], 0
        self.release = asyncio.Event()
        self.release.set()
        self.model_update_lock, self.lora_update_lock = RWLock(), asyncio.Lock()

    async def get_internal_state(self):
        return [{KEY: {"answer_epoch": self.epoch}}]

    async def generate_request(self, asked):
        asked.normalize_batch_and_arguments()
        self.replays.append(asked)
        self.rid_to_state[asked.rid] = None
        try:
            async with self.model_update_lock.reader_lock:
                await self.release.wait()
                margin = [[[-1.0, 9, None], [-1.5, 8, None]]] * len(self.output)
                meta = {"finish_reason": self.finish, "prompt_tokens": 11}
                meta["output_top_logprobs"] = margin
                yield {"output_ids": self.output, "meta_info": meta}
        except asyncio.CancelledError:
            self.withdrawn.append(asked.rid)
            raise
        finally:
            del self.rid_to_state[asked.rid]


@asynccontextmanager
async def checking(manager, rate=1.0):
    check = ConsistencyCheck(rate, 0, manager, Guard())
    yield check
    if check._task is not None:
        check._task.cancel()


def finished(check, rid="r", output=(4, 5, 6), finish=LENGTH, **fields):
    """Tell the check of a request, as the hook does: its last tokens come later."""
    state = SimpleNamespace(obj=request(rid=rid, **fields), output_ids=[])
    check.finished(state, told(rid, finish))
    state.output_ids.extend(output)


async def settled(check):
    while check.report()["consistency_pending"]:
        await asyncio.sleep(0.01)
    return check.report()


async def until(holds):
    while not holds():
        await asyncio.sleep(0.01)


def run(exchange):
    return asyncio.run(asyncio.wait_for(exchange(), 60))


# -- which requests -----------------------------------------------------------------


def repeatable(asked=None, **meta):
    manager = SimpleNamespace(
        preferred_sampling_params=None, sampling_params_class=SamplingParams
    )
    check = ConsistencyCheck(1.0, 0, manager, Guard())
    return check.repeatable(asked or request(), told(**meta))


def test_a_drafted_greedy_request_is_checked():
    assert repeatable()
    assert repeatable(request(sampling_params={"temperature": 1.0, "top_k": 1}))


@pytest.mark.parametrize(
    ("fields", "meta"),
    [
        ({}, {"cycles": 0}),
        ({}, {"finish": ABORT}),
        ({"session_params": {"id": "s"}}, {}),
        ({"session_id": "s"}, {}),
        ({"image_data": "http://127.0.0.1/x.png"}, {}),
        ({"sampling_params": {"temperature": 0.7}}, {}),
    ],
    ids=str,
)
def test_what_cannot_be_repeated_is_not_checked(fields, meta):
    assert not repeatable(request(**fields), **meta)


def test_the_servers_preferred_sampling_decides_where_the_request_does_not():
    manager = SimpleNamespace(
        preferred_sampling_params={"temperature": 0.6},
        sampling_params_class=SamplingParams,
    )
    check = ConsistencyCheck(1.0, 0, manager, Guard())
    asked = GenerateReqInput(text="p", sampling_params={})
    asked.normalize_batch_and_arguments()
    assert not check.repeatable(asked, told())
    manager.preferred_sampling_params = {"temperature": 0.0}
    assert check.repeatable(asked, told())


def test_an_answer_without_statistics_is_none_of_ours():
    meta = told()
    del meta[KEY]
    check = ConsistencyCheck(1.0, 0, None, Guard())
    assert not check.repeatable(request(), meta)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_the_sample_has_the_size_asked_for(rate):
    def sample(seed):
        check = ConsistencyCheck(rate, seed, None, Guard())
        return [rid for rid in rids if check.samples(rid)]

    rids = [f"{i:032x}" for i in range(4000)]
    # Six standard deviations.
    spread = 6 * (rate * (1 - rate) * len(rids)) ** 0.5
    assert abs(len(sample(1)) - rate * len(rids)) <= spread
    assert sample(1) == sample(1)
    assert (sample(1) == sample(2)) is (rate in (0.0, 1.0))


def test_a_replay_is_alone_greedy_and_without_speculation():
    custom = {"mine": 1, KEY: {"enabled": True, "draft_length": 2}}
    params = {"stop": ["x"], "custom_params": custom}
    asked = request(sampling_params=params, lora_path="adapter")
    asked.sampling_params["n"] = 3  # one of several answers to a prompt
    sent = replay_of(asked, f"{REPLAY_PREFIX}7")
    assert sent.sampling_params == {
        **{"temperature": 0.0, "n": 1, "stop": ["x"]},
        "custom_params": {"mine": 1, KEY: {"enabled": False, "inner": False}},
    }
    assert asked.sampling_params["custom_params"] == custom, "the request's own"
    assert (sent.text, sent.lora_path) == ("prompt", "adapter")
    assert sent.extra_key == sent.rid, "no cached prefix has its key"
    assert sent.log_metrics is sent.stream is False
    assert is_replay(sent.rid)
    assert not is_replay("client")


# -- when ---------------------------------------------------------------------------


def test_answers_are_compared_and_differences_logged(caplog):
    async def exchange():
        async with checking(Manager()) as check:
            finished(check, "right")
            finished(check, "wrong", output=(4, 9, 6))
            return await settled(check)

    report = run(exchange)
    assert report == {
        **{"consistency_checks": 2, "consistency_mismatches": 1},
        **{"consistency_pending": 0, "consistency_dropped": 0},
    }
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "VeriCache: online consistency check of wrong: output token 1 is 9, the full "
        "KV gives 5 by 0.5 logits; prompt 11 tokens"
    )


def test_no_replay_begins_while_a_client_is_served():
    async def exchange():
        manager = Manager()
        async with checking(manager) as check:
            manager.rid_to_state = {"client": None, "HEALTH_CHECK_1": None}
            finished(check)
            await asyncio.sleep(0.3)
            assert manager.replays == []
            del manager.rid_to_state["client"]
            return await settled(check)

    assert run(exchange)["consistency_checks"] == 1


async def client(manager):
    manager.rid_to_state["client"] = None
    return lambda: manager.rid_to_state.pop("client")


async def new_weights(manager):
    """Wait for the lock as ``TokenizerManager.update_weights_from_disk`` does."""
    await asyncio.wait_for(manager.model_update_lock.acquire_writer(), 30)
    return lambda: asyncio.create_task(manager.model_update_lock.release_writer())


async def new_adapter(manager):
    await manager.lora_update_lock.acquire()
    return manager.lora_update_lock.release


@pytest.mark.parametrize("arrives", [client, new_weights, new_adapter])
def test_a_replay_is_withdrawn_for_others_and_made_later(arrives):
    async def exchange():
        manager = Manager()
        manager.release.clear()
        async with checking(manager) as check:
            finished(check)
            await until(lambda: manager.replays)
            leave = await arrives(manager)  # new weights get their lock
            await until(lambda: manager.withdrawn)
            manager.release.set()
            await asyncio.sleep(0.2)
            assert len(manager.replays) == 1
            assert check.report()["consistency_pending"] == 1
            leave()
            return await settled(check)

    assert run(exchange)["consistency_checks"] == 1


def test_answers_of_earlier_weights_are_not_compared():
    async def exchange():
        manager = Manager(output=(1, 2, 3))
        async with checking(manager) as check:
            manager.rid_to_state["client"] = None
            finished(check, "before")
            await until(lambda: check._epoch == 0)
            manager.epoch = 1
            del manager.rid_to_state["client"]
            await settled(check)
            finished(check, "after", output=(1, 2, 3))
            await settled(check)
            # While it is replayed, too.
            manager.release.clear()
            finished(check, "during")
            await until(lambda: len(manager.replays) == 2)
            manager.epoch = 2
            manager.release.set()
            return await settled(check)

    report = run(exchange)
    assert report["consistency_dropped"] == 2
    assert report["consistency_checks"] == 1
    assert report["consistency_mismatches"] == 0


def test_a_replay_that_is_aborted_is_tried_again_a_few_times():
    async def exchange():
        manager = Manager(finish=ABORT)
        async with checking(manager) as check:
            finished(check)
            return await settled(check), len(manager.replays)

    report, replays = run(exchange)
    assert replays == MOST_ATTEMPTS
    assert (report["consistency_checks"], report["consistency_dropped"]) == (0, 1)


def test_a_check_that_fails_is_dropped_and_the_next_one_made():
    async def exchange():
        manager = Manager()
        failed = []

        async def refuses(asked):
            failed.append(asked)
            raise ValueError("no")
            yield

        async with checking(manager) as check:
            manager.generate_request = refuses
            finished(check)
            await settled(check)
            del manager.generate_request
            finished(check, "next")
            return await settled(check), failed

    report, failed = run(exchange)
    assert len(failed) == 1
    assert (report["consistency_checks"], report["consistency_dropped"]) == (1, 1)


def test_the_latest_requests_are_remembered():
    async def exchange():
        manager = Manager()
        manager.rid_to_state["client"] = None
        async with checking(manager) as check:
            for i in range(MOST_PENDING + 3):
                finished(check, f"r{i}")
            finished(check, f"{REPLAY_PREFIX}0")
            return check.report()

    report = run(exchange)
    assert report["consistency_pending"] == MOST_PENDING
    assert report["consistency_dropped"] == 3


@pytest.mark.parametrize(("rate", "finish"), [(0.0, LENGTH), (1.0, None)])
def test_nothing_is_remembered_at_rate_0_nor_of_an_unfinished_answer(rate, finish):
    async def exchange():
        async with checking(Manager(), rate) as check:
            finished(check, finish=finish)
            return check.report()

    assert set(run(exchange).values()) == {0}


def test_a_fault_in_the_check_stays_there(caplog):
    check = ConsistencyCheck(1.0, 0, None, Guard())
    for _ in range(5):
        check.finished(None, {"finish_reason": LENGTH})
    faults = [record for record in caplog.records if record.exc_info]
    assert len(faults) == 1, "logged once, with its traceback"


def test_a_server_that_reports_nothing_ends_the_checks_and_nothing_else(caplog):
    async def exchange():
        manager = Manager()

        async def nothing():
            return [{KEY: {}}]

        manager.get_internal_state = nothing
        async with checking(manager) as check:
            finished(check)
            await until(check._task.done)
            return manager.replays

    assert run(exchange) == []
    assert "is switched off" in caplog.text


# -- the comparison -----------------------------------------------------------------


@given(
    st.lists(st.integers(0, 2), max_size=6),
    st.lists(st.integers(0, 2), max_size=6),
)
def test_the_first_difference_is_found(ours, full):
    margins = [0.5 + i for i in range(len(full))]
    found = compare(ours, LENGTH, full, LENGTH, margins)
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
    tokens, margins = [4, 5, 3], [1.0] * 3
    found = compare(tokens, LENGTH, tokens, STOP, margins)
    assert (found.position, found.served, found.full) == (3, None, None)
    assert "output token 3 is the end, the full KV gives the end by no" in str(found)
    assert compare(tokens, STOP, tokens, STOP, margins) is None


# -- the prefix cache ---------------------------------------------------------------


def test_the_prompt_of_a_replay_stays_out_of_the_prefix_tree(monkeypatch):
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from vericache_sglang.prefix_cache.tiered_cache import TieredCache

    reached = []
    table = torch.arange(40, dtype=torch.int32).reshape(4, 10)
    cache = TieredCache.__new__(TieredCache)
    cache.req_to_token_pool = SimpleNamespace(req_to_token=table)
    cache.segments = SimpleNamespace(active=False)
    monkeypatch.setattr(
        UnifiedRadixCache,
        "cache_unfinished_req",
        lambda cache, req, chunked: reached.append(req.rid),
    )
    params = SamplingParams(temperature=0.0)
    for rid in ("client", f"{REPLAY_PREFIX}0"):
        req = Req(rid, None, array("q", [1, 2, 3]), params)
        req.kv.req_pool_idx = 2
        req.get_fill_ids = lambda: array("q", range(6))
        cache.cache_unfinished_req(req, chunked=True)
    assert reached == ["client"]
    assert req.prefix_indices.tolist() == [20, 21, 22, 23, 24, 25]
    assert req.prefix_indices.dtype == torch.int64
