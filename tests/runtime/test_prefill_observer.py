"""What selectors are shown of prompts, and the scores kept with every slot."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("sglang")

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from vericache_sglang.compression.base import Needs, Selector
from vericache_sglang.errors import CompressionError
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.prefill_observer import (
    PrefillObserver,
    attention_parents,
)

pytestmark = pytest.mark.sglang

LAYERS, HEADS, QUERY_HEADS, DIM, WIDTH, SLOTS = 2, 2, 4, 4, 6, 40


class Recorder(Selector):
    """Scores a token by its first query element, or by its attention input."""

    def __init__(self, **needs):
        super().__init__()
        self.needs = Needs(**needs)
        self.calls, self.steps, self.share = [], [], None

    def open(self, rid):
        self.calls.append(("open", rid))

    def close(self, rid):
        self.calls.append(("close", rid))

    def update(self, step):
        self.steps.append(step)
        if step.hidden is not None:
            return step.hidden.t()[:HEADS]
        return step.queries[:HEADS, :, 0]

    def keep_share(self, noted):
        return self.share

    def scores(self, rid, layer, keys, values, seen):
        raise NotImplementedError


class Silent(Recorder):
    """Keeps what it needs itself."""

    def update(self, step):
        self.steps.append(step)


def watch_of(selector):
    geometry = KVGeometry(
        layers=LAYERS,
        kv_heads=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        element_bytes=4,
        page_size=1,
    )
    pool = SimpleNamespace(k_buffer=[torch.zeros(SLOTS, HEADS, DIM)] * LAYERS)
    return PrefillObserver(selector, SimpleNamespace(geometry=geometry, pool=pool))


def batch_of(parts, mode="EXTEND"):
    """Present (rid, first position, slots) of several requests as one batch."""
    rids, starts, slots = zip(*parts, strict=True)
    lengths = [len(own) for own in slots]
    positions = [
        start + i for start, n in zip(starts, lengths, strict=True) for i in range(n)
    ]
    return SimpleNamespace(
        rids=list(rids),
        forward_mode=ForwardMode[mode],
        extend_prefix_lens_cpu=None if mode == "DECODE" else list(starts),
        extend_seq_lens_cpu=None if mode == "DECODE" else lengths,
        positions=torch.tensor(positions),
        out_cache_loc=torch.tensor([slot for own in slots for slot in own]),
    )


def run(watch, parts, mode="EXTEND", salt=0.0):
    """Run every layer; a token's query is its position and layer, unlike any other."""
    batch = batch_of(parts, mode)
    if not watch.observes(batch):
        return
    for layer in range(LAYERS):
        places = batch.positions.float()
        heads = torch.arange(QUERY_HEADS) * 0.1
        value = places[:, None] + heads + 1000 * layer + salt
        queries = value[..., None].expand(-1, -1, DIM)
        watch.observe(layer, queries, queries[:, :HEADS], batch)


def score(layer, head, position, salt=0.0):
    return position + 0.1 * head + 1000 * layer + salt


def expect(watch, slots, positions, salt=0.0):
    noted = watch.noted(torch.tensor(slots))
    for layer in range(LAYERS):
        for head in range(HEADS):
            wanted = [score(layer, head, p, salt) for p in positions]
            assert noted[layer][head].tolist() == pytest.approx(wanted)


# -- what is hooked ------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.attn = RadixAttention(QUERY_HEADS, DIM, 1.0, HEADS, layer)

    def forward(self, positions, hidden_states, batch):
        queries = hidden_states.new_ones(len(hidden_states), QUERY_HEADS * DIM)
        keys = hidden_states.new_ones(len(hidden_states), HEADS * DIM)
        return self.attn(queries, keys, keys, batch)


def model():
    return nn.ModuleList([Attention(0), nn.Linear(2, 2), Attention(1)])


@pytest.fixture
def unattended(monkeypatch):
    """Let attention return the arguments it was called with."""

    def attend(*args, **kwargs):
        return args, kwargs

    monkeypatch.setattr(RadixAttention, "forward", attend)


@pytest.mark.parametrize(
    ("needs", "watched", "inputs"),
    [
        (None, False, False),
        ({}, False, False),
        ({"q_tail": 8}, True, False),
        ({"q_stream": True}, True, False),
        ({"probes": True}, True, False),
        ({"hidden": True}, True, True),
    ],
)
def test_layers_are_watched_only_where_somebody_asks(needs, watched, inputs):
    made = model()
    watch_of(None if needs is None else Recorder(**needs)).attach(made)
    layers = [layer for layer, _ in attention_parents(made)]
    assert [layer.layer_id for layer in layers] == [0, 1]
    assert {"forward" in vars(layer) for layer in layers} == {watched}
    hooked = {bool(parent._forward_pre_hooks) for _, parent in attention_parents(made)}
    assert hooked == {inputs}


@pytest.mark.usefixtures("unattended")
@pytest.mark.parametrize("by_name", [True, False])
def test_attention_inputs_are_those_of_the_layer(by_name):
    """Models of SGLang pass them by position or by name."""
    selector, made = Recorder(hidden=True), model()
    watch = watch_of(selector)
    watch.attach(made)
    batch = batch_of([("a", 0, [3, 4, 5]), ("b", 7, [9])])
    hidden = [torch.randn(4, WIDTH) for _ in range(LAYERS)]
    for layer, module in enumerate((made[0], made[2])):
        if by_name:
            module(positions=None, hidden_states=hidden[layer], batch=batch)
        else:
            module(None, hidden[layer], batch)
    seen = [(s.rid, s.layer, s.start, len(s.hidden)) for s in selector.steps]
    assert seen == [("a", 0, 0, 3), ("b", 0, 7, 1), ("a", 1, 0, 3), ("b", 1, 7, 1)]
    for step in selector.steps:
        rows = slice(0, 3) if step.rid == "a" else slice(3, 4)
        assert torch.equal(step.hidden, hidden[step.layer][rows])
    noted = watch.noted(torch.tensor([3, 4, 5, 9]))
    for layer in range(LAYERS):
        assert torch.equal(noted[layer], hidden[layer].t()[:HEADS])


@pytest.mark.parametrize(
    ("mode", "seen"),
    [("EXTEND", True), ("DECODE", False), ("TARGET_VERIFY", False), ("MIXED", True)],
)
@pytest.mark.parametrize("needs", [{"q_tail": 4}, {"q_stream": True}])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.usefixtures("unattended")
def test_queries_of_prefills_alone_are_shown(mode, seen, needs, direct):
    selector = Recorder(**needs)
    watch, layer = watch_of(selector), RadixAttention(QUERY_HEADS, DIM, 1.0, HEADS, 1)
    watch.attach(nn.ModuleList([nn.ModuleList([layer])]))
    batch = batch_of([("a", 0, [5] if mode == "DECODE" else [5, 6, 7])], mode)
    rows = torch.randn(len(batch.positions), QUERY_HEADS * DIM)
    keys = torch.randn(len(rows), HEADS * DIM)

    attend = layer.forward if direct else layer  # some models call it themselves
    args, kwargs = attend(rows, keys, 2, batch, False, extra=3)
    assert args[0] is layer
    assert args[1] is rows
    assert (args[3:], kwargs) == ((2, batch, False), {"extra": 3})
    assert [*watch.tails.of("a")] == ([1] if seen and "q_tail" in needs else [])
    assert len(selector.steps) == (seen and "q_stream" in needs)
    for step in selector.steps:
        wanted = rows.view(-1, QUERY_HEADS, DIM).transpose(0, 1)
        assert torch.equal(step.queries, wanted)


def test_a_warm_up_without_requests_is_passed_over():
    selector = Recorder(q_stream=True, q_tail=4)
    watch = watch_of(selector)
    assert not watch.observes(SimpleNamespace(rids=None))


def test_a_probe_takes_what_its_forward_shows_and_no_selector_is_updated():
    selector, shown = Recorder(q_stream=True, q_tail=4), []
    watch = watch_of(selector)
    watch.probe = lambda *args: shown.append(args[0])
    run(watch, [("a", 0, [1, 2, 3])])
    assert shown == [0, 1]
    assert (selector.steps, len(watch)) == ([], 0)
    watch.probe = None
    run(watch, [("a", 0, [1, 2, 3])])
    assert [step.layer for step in selector.steps] == [0, 1]


# -- scores by slot ------------------------------------------------------------


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_chunks_note_what_one_prefill_notes(chunks):
    total = sum(chunks)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(total))
    slots, watch, start = slots[:total].tolist(), watch_of(Recorder(q_stream=True)), 0
    for count in chunks:
        run(watch, [("a", start, slots[start : start + count])])
        start += count
    expect(watch, slots, range(total))


def test_requests_of_one_batch_are_told_apart():
    selector = Recorder(q_stream=True)
    watch = watch_of(selector)
    run(watch, [("a", 0, [4, 2]), ("b", 6, [9]), ("c", 1, [])])
    expect(watch, [4, 2], [0, 1])
    expect(watch, [9], [6])
    assert [step.rid for step in selector.steps] == ["a", "b"] * LAYERS
    assert selector.calls == [("open", "a"), ("open", "b")], "c ran nothing"


def test_a_prefix_hit_keeps_the_scores_of_its_slots():
    watch = watch_of(Recorder(q_stream=True))
    run(watch, [("a", 0, [4, 2, 7])])
    run(watch, [("b", 2, [11, 12])], salt=0.5)  # its first two tokens are a's
    expect(watch, [4, 2], [0, 1])
    expect(watch, [11, 12], [2, 3], salt=0.5)
    seen = watch.seen("b", 1, torch.tensor([4, 2, 11, 12]))
    assert seen.noted[0].tolist() == [1000.0, 1001.0, 1002.5, 1003.5]


def test_a_slot_written_anew_has_a_score_anew():
    """Decoding is watched where inputs are asked for: its slots come to be cached."""
    selector = Recorder(hidden=True)
    watch = watch_of(selector)
    for mode, parts in (
        ("EXTEND", [("a", 0, [4, 2, 7])]),
        ("DECODE", [("b", 30, [2]), ("c", 31, [8])]),
        ("TARGET_VERIFY", [("b", 31, [7, 9])]),
    ):
        batch = batch_of(parts, mode)
        rows = torch.zeros(len(batch.positions), QUERY_HEADS, DIM)
        for layer in range(LAYERS):
            own = batch.positions.float()[:, None] + 1000 * layer
            watch._hidden[layer] = own.expand(-1, WIDTH)
            watch.observe(layer, rows, rows, batch)
    for layer, scores in enumerate(watch.noted(torch.tensor([4, 2, 7, 8, 9]))):
        wanted = [1000 * layer + p for p in (0, 30, 31, 31, 32)]
        assert scores[0].tolist() == scores[1].tolist() == wanted


def test_slots_nobody_scored_are_nan():
    watch = watch_of(Recorder(q_stream=True))
    run(watch, [("a", 0, [4])])
    noted = torch.stack(watch.noted(torch.tensor([4, 5])))
    assert noted[..., 0].isfinite().all()
    assert noted[..., 1].isnan().all()


def test_notes_follow_their_tokens_to_other_slots():
    watch = watch_of(Recorder(q_stream=True))
    run(watch, [("a", 0, [4, 2, 7])])
    kept = [scores.clone() for scores in watch.noted(torch.tensor([4, 2, 7]))]
    run(watch, [("b", 20, [4, 2, 7])])
    expect(watch, [4, 2, 7], [20, 21, 22])
    watch.note(torch.tensor([30, 31, 4]), kept)
    expect(watch, [30, 31, 4, 2], [0, 1, 2, 21])


def test_without_scores_nothing_is_noted_or_allocated():
    for selector in (None, Silent(q_stream=True), Recorder()):
        watch = watch_of(selector)
        run(watch, [("a", 0, [4, 2])])
        slots = torch.tensor([4, 2])
        assert watch.noted(slots) == []
        watch.note(slots, [])
        assert watch._noted is None
        assert watch.seen("a", 0, slots).noted is None


# -- a request's life ----------------------------------------------------------


def test_a_request_is_opened_once_and_closed_once():
    selector = Recorder(q_stream=True, q_tail=2)
    watch = watch_of(selector)
    run(watch, [("a", 0, [4, 2])])
    run(watch, [("a", 2, [7])])
    watch.open("a")
    watch.seen("a", 0, torch.tensor([4]))
    assert len(watch) == 1
    watch.forget("a")
    watch.forget("a")
    assert selector.calls == [("open", "a"), ("close", "a")]
    assert len(watch) == 0
    watch.forget("never seen")
    assert len(selector.calls) == 2


@given(st.lists(st.tuples(st.sampled_from("odsf"), st.sampled_from("ab")), max_size=25))
def test_in_any_history_opens_and_closes_alternate(history):
    selector = Recorder(hidden=True)
    watch = watch_of(selector)
    for act, rid in history:
        if act == "o":
            watch.open(rid)
        elif act == "s":
            watch.seen(rid, 0, torch.tensor([1]))
        elif act == "f":
            watch.forget(rid)
        else:  # decodes, maybe after it was split and forgotten
            watch._hidden[0] = torch.zeros(1, WIDTH)
            rows = torch.zeros(1, QUERY_HEADS, DIM)
            watch.observe(0, rows, rows, batch_of([(rid, 5, [1])], "DECODE"))
    for rid in "ab":
        watch.forget(rid)
        own = [kind for kind, of in selector.calls if of == rid]
        assert own == ["open", "close"] * (len(own) // 2)
    assert len(watch) == 0


def test_tails_are_ready_once_every_layer_has_one():
    watch = watch_of(Recorder(q_tail=3))
    assert not watch.ready("a")
    batch = batch_of([("a", 0, [1, 2])])
    rows = torch.randn(2, QUERY_HEADS, DIM)
    watch.observe(0, rows, rows, batch)
    assert not watch.ready("a")
    watch.observe(1, rows, rows, batch)
    assert watch.ready("a")
    tail = watch.seen("a", 1, torch.tensor([1, 2])).tail
    assert torch.equal(tail.rows, rows.transpose(0, 1))
    assert watch_of(Recorder(q_stream=True)).ready("anybody")


def test_a_method_s_own_share_is_checked():
    selector = Recorder(q_stream=True)
    watch, slots = watch_of(selector), torch.tensor([1])
    assert watch.share(slots) is None
    assert watch_of(None).share(slots) is None
    for share in (0.25, 1.0):
        selector.share = share
        assert watch.share(slots) == share
    for share in (0.0, 1.5, float("nan")):
        selector.share = share
        with pytest.raises(
            CompressionError, match=f"asked to keep {share} of a prompt"
        ):
            watch.share(slots)
