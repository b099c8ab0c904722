"""Probes, and prompts' ends: one an iteration, in a row of their own, no slot left."""

import logging
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from known_kv import DIM, HEADS, LAYERS
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from tiny_engine import opened

from vericache_sglang.compression.base import Needs, Probe, Selector
from vericache_sglang.kv.query_tails import QueryTails
from vericache_sglang.kv.split_layers import as_bits
from vericache_sglang.runtime import probing
from vericache_sglang.runtime.admission import RequestAdmission
from vericache_sglang.runtime.forward import extend
from vericache_sglang.scheduling.draft_length import FIRST_WAIT
from vericache_sglang.scheduling.iteration_model import Work

pytestmark = pytest.mark.sglang

CONTEXT = 60


class Asking(Selector):
    """Wants these probes, and remembers what it was shown."""

    needs = Needs(probes=True)

    def __init__(self, probes):
        super().__init__()
        self.wanted, self.asked, self.shown, self.calls = probes, [], [], []

    def open(self, rid):
        self.calls.append(("open", rid))

    def close(self, rid):
        self.calls.append(("close", rid))

    def probes(self, rid, prompt):
        self.asked.append((rid, list(prompt)))
        return self.wanted

    def observe(self, rid, probe, layer):
        self.shown.append((rid, probe, layer))

    def scores(self, rid, layer, keys, values, seen):
        raise NotImplementedError


class Looking(Asking):
    """Reads the last queries of a prompt, which no prefill has shown."""

    needs = Needs(q_tail=6)


class Runner:
    """Stands for the model: shows every layer, writes KV where it is told."""

    def __init__(self, engine, watch, fails=False):
        self.engine, self.watch, self.fails = engine, watch, fails
        self.model_config = SimpleNamespace(context_len=CONTEXT)
        self.forwards = []

    def forward(self, batch):
        inputs, engine = batch.inputs, self.engine
        (table_row,), (prefix,) = inputs.table_rows.tolist(), inputs.prefixes.tolist()
        count = len(inputs.tokens)
        listed = engine.table[table_row, : prefix + count]
        free = set(engine.allocator.get_all_free_pages().tolist())
        assert not {slot // engine.page for slot in listed.tolist()} & free
        assert listed[prefix:].tolist() == inputs.slots.tolist()
        engine.kv.put(inputs.slots, engine.kv.drawn(count))
        self.forwards.append((batch, inputs, listed.clone()))
        queries = torch.randn(count, 2 * HEADS, DIM)
        keys = torch.randn(count, HEADS, DIM)
        for layer in range(LAYERS):
            self.watch.observe(layer, queries, keys, batch)
            if self.fails and layer:
                raise RuntimeError("out of memory")


@pytest.fixture(autouse=True)
def rows_as_they_are(monkeypatch):
    """A forward is what ``build_forward`` was given; SGLang's batch is not built."""

    def build(batch, inputs, runner):
        return SimpleNamespace(
            inputs=inputs,
            batch=batch,
            rids=["a"],
            extend_seq_lens_cpu=inputs.lengths,
            extend_prefix_lens_cpu=inputs.bounds,
            forward_mode=ForwardMode.TARGET_VERIFY,
            spec_info="positions",
        )

    monkeypatch.setattr(extend, "build_forward", build)


class World:
    """A request whose prompt is whole, and who probes it."""

    def __init__(self, engine, probes, tokens=20, fails=False, kind=Asking):
        self.engine = engine
        self.selector = kind(probes)
        self.watch = engine.placement.observer
        self.watch._selector = self.selector
        self.watch.tails = QueryTails(kind.needs.q_tail)
        self.runner = Runner(engine, self.watch, fails)
        self.row = engine.table.shape[0] - 1
        self.probing = probing.Probing(
            self.selector,
            self.watch,
            engine.placement.handles,
            self.runner,
            self.row,
            engine.placement._tp_sync,
        )
        self.state = engine.admit("a", "x", tokens)
        self.batch = SimpleNamespace(tree_cache=engine.tree)

    def step(self):
        return self.probing.step(self.state, 3, self.batch)


def probe(tokens, start=0, stop=9):
    return Probe(tuple(range(100, 100 + tokens)), start, stop)


@pytest.mark.parametrize("page", [1, 4])
def test_probes_run_one_a_step_in_order_and_give_their_slots_back(page):
    wanted = [probe(3), probe(6, 9, 20), probe(1)]
    with opened(page=page) as engine:
        world = World(engine, wanted)
        before = engine.checks.books()
        for i in range(3):
            assert not world.probing.done(world.state)
            assert world.step()
            assert world.probing.forwards == len(world.runner.forwards) == i + 1
            after = engine.checks.books()
            assert after[1:] == before[1:], "slots, lengths, tree, host: as before"
            engine.checks.row(engine.requests["a"])
        assert world.probing.done(world.state)
        assert [shown[1] for shown in world.selector.shown] == [
            asked for asked in wanted for _ in range(LAYERS)
        ]
        assert world.watch.probe is None


def test_a_probe_stands_behind_the_prompt_in_a_row_of_its_own():
    with opened() as engine:
        world = World(engine, [probe(5)])
        assert not world.probing.done(world.state)
        world.step()
        ((forward, inputs, listed),) = world.runner.forwards
        assert (inputs.batch_indices, inputs.lengths) == ([3], [5])
        assert inputs.table_rows.tolist() == [world.row]
        assert (inputs.bounds, inputs.prefixes.tolist()) == ([20], [20])
        assert inputs.positions.tolist() == [20, 21, 22, 23, 24]
        assert inputs.tokens.tolist() == [100, 101, 102, 103, 104]
        own = engine.table[world.state.req.kv.req_pool_idx, :20]
        assert listed[:20].tolist() == own.tolist()
        assert forward.forward_mode is ForwardMode.EXTEND
        assert forward.spec_info is None
        assert forward.batch is not world.batch, "the decode batch stays as it is"


def test_the_selector_sees_the_prompt_s_keys_and_values():
    with opened() as engine:
        world = World(engine, [probe(5)])
        assert not world.probing.done(world.state)
        world.step()
        kv = engine.kv.truth("x")[0]
        for layer, (rid, _, read) in enumerate(world.selector.shown):
            assert (rid, read.layer, read.hidden) == ("a", layer, None)
            assert read.queries.shape == (2 * HEADS, 5, DIM)
            assert read.probe_keys.shape == (HEADS, 5, DIM)
            for found, wanted in (
                (read.keys, kv[layer, 0]),
                (read.values, kv[layer, 1]),
            ):
                bits = as_bits(found.contiguous())
                assert torch.equal(bits, wanted[:20].transpose(0, 1))


@pytest.mark.parametrize("page", [1, 4])
def test_a_probe_that_fails_leaves_no_slot_and_no_observer(page):
    with opened(page=page) as engine:
        world = World(engine, [probe(5)], fails=True)
        assert not world.probing.done(world.state)
        before = engine.checks.books()
        with pytest.raises(RuntimeError, match="out of memory"):
            world.step()
        assert engine.checks.books()[1:] == before[1:]
        assert world.watch.probe is None
        assert not world.probing.done(world.state), "it is still to be run"
        assert world.probing.forwards == 0


def test_without_free_slots_nothing_happens():
    with opened() as engine:
        world = World(engine, [probe(5)])
        assert not world.probing.done(world.state)
        hog = engine.allocator.alloc(engine.allocator.available_size() - 4)
        before = engine.checks.held()
        assert not world.step()
        assert engine.checks.held() == before
        assert world.runner.forwards == []
        engine.allocator.free(hog)
        assert world.step()
        assert world.probing.done(world.state)


@pytest.mark.parametrize("page", [1, 4])
def test_the_end_of_a_prompt_prefilled_elsewhere_is_run_again(page):
    with opened(page=page) as engine:
        world = World(engine, [], kind=Looking)
        assert world.probing.done(world.state), "its prefill was seen"
        world.watch.forget("a")
        before = engine.checks.books()
        assert not world.probing.done(world.state)
        assert world.step()
        assert world.probing.done(world.state)
        ((_, inputs, listed),) = world.runner.forwards
        assert inputs.positions.tolist() == [14, 15, 16, 17, 18, 19]
        assert inputs.tokens.tolist() == list(world.state.req.origin_input_ids)[14:]
        assert (inputs.lengths, inputs.prefixes.tolist()) == ([6], [14])
        own = engine.table[world.state.req.kv.req_pool_idx, :20].tolist()
        assert listed[:14].tolist() == own[:14]
        assert not set(listed[14:].tolist()) & set(own), "its KV stays as it came"
        assert engine.checks.books()[1:] == before[1:]
        engine.checks.row(engine.requests["a"])
        tails = world.watch.tails.of("a")
        assert [tails[layer].end for layer in range(LAYERS)] == [20] * LAYERS
        assert {tail.rows.shape for tail in tails.values()} == {(2 * HEADS, 6, DIM)}


def test_probes_behind_the_context_are_skipped_with_a_warning(caplog):
    fits, late = probe(CONTEXT - 20, 0, 7), probe(CONTEXT - 19, 7, 15)
    with opened() as engine, caplog.at_level(logging.WARNING):
        world = World(engine, [late, fits, late])
        assert not world.probing.done(world.state)
        assert world.step()
        assert world.probing.done(world.state)
        assert [shown[1] for shown in world.selector.shown] == [fits] * LAYERS
        says = "a: a probe to token 61 does not fit the context of 60; tokens 7 to 15"
        assert [says in record.message for record in caplog.records] == [True, True]


def test_a_prompt_is_asked_about_once_and_again_once_it_is_forgotten():
    with opened() as engine:
        world = World(engine, [probe(2)])
        state = world.state
        for _ in range(3):
            assert not world.probing.done(state)
        tokens = list(state.req.origin_input_ids)
        assert world.selector.asked == [("a", tokens)]
        assert world.selector.calls == [("open", "a")]
        world.probing.forget("a")
        world.probing.forget("a")
        world.watch.forget("a")
        # Retracted: the output so far is part of the prompt it prefills next.
        state.prompt = 21
        assert not world.probing.done(state)
        assert world.selector.asked[1:] == [("a", [*tokens, 7])]
        assert world.selector.calls == [("open", "a"), ("close", "a"), ("open", "a")]


def test_selectors_that_ask_nothing_are_done_at_once():
    with opened() as engine:
        state = engine.admit("a", "x", 20)
        for selector in (None, engine.selector):
            placement = engine.placement
            made = probing.Probing(
                selector, placement.observer, placement.handles, None, 0, None
            )
            assert made.done(state)
        world = World(engine, [])
        assert world.probing.done(state)


class Priced:
    """Stands for the runtime: says whether probes pay, and remembers their work."""

    def __init__(self, pays):
        self.pays, self.asked, self.arrived = pays, [], []

    def probes_pay(self, spec, rows, probes):
        self.asked.append((spec.rid, rows, probes))
        return self.pays

    def arrive(self, spec):
        self.arrived.append(spec.compressible)


def iterations(world, runtime, count, *, full=False):
    """Return how many probes have run after so many iterations of a batch."""
    placement = world.engine.placement
    admission = RequestAdmission(
        *(placement, world.probing, runtime, placement._tp_sync), overlap=False
    )
    world.batch.batch_is_full, world.batch.reqs = full, [world.state.req]
    for _ in range(count):
        placement.counters.note_iteration(1)
        before = world.probing.forwards
        ran = admission.pass_on(world.batch, {0: world.state})
        assert ran == (world.probing.forwards > before)
    return world.probing.forwards


def test_probes_run_once_they_pay_or_memory_is_short():
    with opened() as engine:
        world = World(engine, [probe(3), probe(6)])
        runtime = Priced(pays=False)
        assert iterations(world, runtime, FIRST_WAIT) == 0
        work = [Work(3, 23, 60), Work(6, 26, 120)]
        assert runtime.asked == [("a", 1, work)]
        assert runtime.arrived == []
        assert iterations(world, runtime, 1, full=True) == 1
        runtime = Priced(pays=True)
        assert iterations(world, runtime, 3) == 2
        assert runtime.arrived == [True]


def test_a_request_whose_probes_do_not_pay_may_have_an_inner_drafter():
    with opened() as engine:
        world = World(engine, [probe(3)])
        world.state.stats.proposals = 4
        runtime = Priced(pays=False)
        assert iterations(world, runtime, 3) == 0
        assert runtime.arrived == [False]
