"""What is timed at boot on the device: codes and slots in the same units."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from device_model import QUERY_HEADS
from fake_cuda import BYTES_PER_S, open_device
from known_kv import DIM, HEADS, LAYERS
from method_scenarios import KEEP, PROMPT, MethodEngine, method
from scenarios import TO_HOST, prepared, take
from tiny_engine import TinyEngine

from vericache_sglang.compression.codecs.kvquant_tables import KVQuantTables
from vericache_sglang.kv.calibration import starting_coefficients
from vericache_sglang.runtime.scheduler_settings import runtime_settings
from vericache_sglang.scheduling.acceptance import Acceptance
from vericache_sglang.scheduling.draft_length import Patience
from vericache_sglang.scheduling.estimates import START_COEFFICIENTS, Estimates
from vericache_sglang.scheduling.iteration_model import IterationModel
from vericache_sglang.scheduling.plan import RequestSpec, Residency
from vericache_sglang.scheduling.residency import ENTER
from vericache_sglang.scheduling.scheduled_request import ScheduledRequest
from vericache_sglang.scheduling.throughput import Throughput

pytestmark = pytest.mark.sglang

LONG, ROWS = 32 * 1024, 16
LAYER = SimpleNamespace(tp_q_head_num=QUERY_HEADS, head_dim=DIM, scaling=0.25)
LITTLE = {"base_s": 1e-9, "per_token_s": 1e-12}
"""An iteration costs what it reads, as one over long prompts does."""


def measured(pool, **known):
    found = starting_coefficients(pool, [LAYER] * LAYERS, draft_length=4)
    return replace(found, **known)


class Measured(MethodEngine):
    """An engine that knows what a slot costs on its device."""

    def estimates(self):
        start = measured(self.pool, **LITTLE)
        return Estimates(iteration=IterationModel(start))


def test_attention_is_timed_on_the_device():
    with open_device(), prepared(), method("recency", slots=900) as made:
        found = measured(made.pool)
        read_s = LAYERS * 2 * HEADS * DIM * made.dtype.itemsize / BYTES_PER_S
        each = found.per_read_s + found.per_product_s
    assert each == pytest.approx(read_s, rel=0.2)
    assert found.base_s == START_COEFFICIENTS.base_s


@pytest.mark.parametrize("codec", ["kivi", "split-planes", "kvquant", "rotatekv"])
def test_a_codec_that_reads_less_drafts_where_that_is_faster(codec):
    with open_device(), method(codec, Measured, residency="auto", slots=900) as made:
        placement = made.placement
        budget = placement.compressor.budget(LONG)
        assert budget.coded > 0.99 * LONG
        reads = placement.draft_reads(budget)
        settings = runtime_settings(made.config, placement, deterministic=False)
        estimates = placement._tp_sync.estimates
    shape = RequestSpec(
        rid="a",
        prompt=LONG,
        kept=budget.slots,
        dropped=budget.offered - budget.slots,
        staged=budget.staged,
        reads=reads,
        remaining=500,
    )
    track = ScheduledRequest(shape, Acceptance(estimates.prior), Patience())
    assert budget.coded / 20 < reads < 0.8 * budget.offered
    throughput = Throughput(settings, estimates)
    throughput.refresh(ROWS)
    choice = throughput.best(track, Residency.DEVICE)
    assert choice.gain > ENTER


def test_tables_are_on_the_device_before_anything_is_served():
    """Other streams read them, behind nothing but what was waited for at boot."""

    def tables():
        return KVQuantTables.on.cache_info().misses

    before = tables()
    with open_device(), method("kvquant", keep=KEEP) as made:
        known = tables()
        assert known != before
        assert made.admit("a", "text", PROMPT)
        for step in (TO_HOST, TinyEngine.draft, "verify", TinyEngine.finish):
            take(made, step)
        assert tables() == known
