"""Whatever a call of a compressor does, the caller gets something well-formed."""

import logging
import sys
from dataclasses import dataclass

import pytest
import torch

from vericache_sglang.compression import guard as guards
from vericache_sglang.compression.base import (
    NOTHING,
    Needs,
    Probe,
    ProbeLayer,
    Selector,
    Step,
)
from vericache_sglang.compression.codecs.base import Codec, PartSpec, check_kv
from vericache_sglang.compression.guard import CALLS, MOST_FAILURES, CompressorGuard

HEADS, TOKENS, DIM, VOCABULARY = 2, 6, 4, 50
KEYS = torch.ones(HEADS, TOKENS, DIM, dtype=torch.bfloat16)


def fail(*given, **named):
    raise KeyError("theirs")


class Theirs(Selector):
    """A method that does all calls rightly."""

    needs = Needs(q_stream=True, probes=True)

    def update(self, step):
        return torch.rand(HEADS, step.queries.shape[1])

    def probes(self, rid, prompt):
        return [Probe((1, 2), 0, TOKENS)]

    def keep_share(self, noted):
        return 0.5

    def scores(self, rid, layer, keys, values, seen):
        return torch.rand(keys.shape[:2])


@dataclass(frozen=True)
class Packed(Codec):
    """Keeps the draft part as it is."""

    name = "test-packed"

    def draft_layout(self, part_shape):
        shape = (part_shape.heads, part_shape.tokens)
        return {
            "k": (part_shape.dtype, (*shape, part_shape.key_dim)),
            "v": (part_shape.dtype, (*shape, part_shape.value_dim)),
        }

    def _encode_draft(self, source):
        return source.part_shape, {"k": source.keys, "v": source.values}

    def _encode(self, source):
        whole = {"keys": source.keys, "values": source.values}
        return *self._encode_draft(source), whole

    def _decode(self, draft):
        return draft.tensors["k"], draft.tensors["v"]


STEP = Step(rid="r", layer=0, start=0, queries=torch.ones(4, TOKENS, DIM))
READ = ProbeLayer(layer=0, queries=KEYS, probe_keys=KEYS, keys=KEYS, values=KEYS)


def made(call, part):
    """Make one call and return what came of it, once it is seen to be well-formed."""
    if call == "encode_draft":
        draft = part.encode_draft(KEYS, KEYS)
        guards.require_layout(draft, part.draft_layout(draft.part_shape))
        return draft
    if call == "decode":
        part_shape = codec_draft().part_shape
        keys, values = part.decode(codec_draft())
        for entries in (keys, values):
            guards.require(entries, (HEADS, TOKENS, DIM), part_shape.dtype)
        return keys, values
    if call == "scores":
        scores = part.scores("r", 0, KEYS, KEYS, NOTHING)
        guards.require(scores, (HEADS, TOKENS))
        return scores
    if call == "update":
        noted = part.update(STEP)
        assert noted is None or noted.shape == (HEADS, TOKENS)
        return noted
    if call == "keep_share":
        share = part.keep_share([])
        assert share is None or 0 < share <= 1
        return share
    if call == "probes":
        probes = part.probes("r", [1] * TOKENS)
        assert all(0 <= t < VOCABULARY for each in probes for t in each.tokens)
        return probes
    if call == "observe":
        return part.observe("r", Probe((1,), 0, TOKENS), READ)
    return getattr(part, call)("r")


PART_SHAPE = check_kv(KEYS, KEYS)


def codec_draft():
    return Packed().encode_draft(KEYS, KEYS)


FAULTS = [
    *((call, fail) for call in CALLS),
    *((call, lambda *given, **named: sys.exit("theirs")) for call in CALLS),
    *((call, lambda *given, **named: "nonsense") for call in CALLS[2:4]),
    *((call, lambda *given, **named: "nonsense") for call in CALLS[5:]),
    ("update", lambda step: torch.ones(HEADS, TOKENS + 1)),
    ("update", lambda step: torch.ones(HEADS + 1, TOKENS)),
    ("update", lambda step: torch.ones(HEADS, TOKENS, dtype=torch.int64)),
    ("scores", lambda *given: torch.ones(HEADS, TOKENS - 1)),
    ("scores", lambda *given: torch.ones(TOKENS)),
    ("scores", lambda *given: torch.ones(HEADS, TOKENS, dtype=torch.bool)),
    ("scores", lambda *given: None),
    *(("keep_share", lambda noted, share=share: share) for share in (0, -1, 1.5, 2)),
    ("keep_share", lambda noted: float("nan")),
    ("keep_share", lambda noted: torch.ones(3)),
    ("probes", lambda rid, prompt: [Probe((VOCABULARY,), 0, 1)]),
    ("probes", lambda rid, prompt: [Probe((-1,), 0, 1)]),
    ("probes", lambda rid, prompt: [Probe((), 0, 1)]),
    ("probes", lambda rid, prompt: None),
    ("encode_draft", lambda keys, values, **given: None),
    (
        "encode_draft",
        lambda keys, values, **given: PartSpec("x", PART_SHAPE, 0, None, {}),
    ),
    ("decode", lambda draft: (KEYS, KEYS[:, 1:])),
    ("decode", lambda draft: (KEYS.float(), KEYS.float())),
    ("decode", lambda draft: (KEYS,)),
]
"""A call, and what stands in for it: it raises, ends the process, returns nonsense."""


def guarded(call, fault=None):
    """Return a guard and the part it watches, of which one call is wrong."""
    part = Packed() if call in guards.CODEC else Theirs()
    if fault is not None:
        object.__setattr__(part, call, fault)
    guard = CompressorGuard("theirs", HEADS)
    guard.vocabulary = VOCABULARY
    guard.wrap(part)
    return guard, part


@pytest.mark.parametrize(("call", "fault"), FAULTS)
def test_a_wrong_call_costs_its_request_the_drafts_and_no_more(call, fault, caplog):
    guard, part = guarded(call, fault)
    with guard.request("r"):
        for _ in range(3):
            made(call, part)
    assert guard.errors == {call: 3}
    assert guard.sound("r") is (call == "close")
    assert guard.sound("another")
    (line,) = caplog.records
    assert "theirs" in line.message
    assert call in line.message
    assert line.exc_info is not None, "the traceback is logged once"
    guard.forget("r")
    assert guard.sound("r")


@pytest.mark.parametrize("call", CALLS)
def test_a_right_call_is_passed_through(call, caplog):
    guard, part = guarded(call)
    with guard.request("r"):
        found = made(call, part)
    assert not guard.errors
    assert guard.sound("r")
    assert not caplog.records
    assert (found is None) is (call in ("open", "close", "observe"))


@pytest.mark.parametrize("call", ["scores", "keep_share", "decode"])
def test_a_call_that_hangs_fails_and_its_result_is_used(call, monkeypatch):
    """The first call of a name compiles kernels, and may take longer."""
    monkeypatch.setattr(guards, "LONGEST_S", -1.0)
    guard, part = guarded(call)
    with guard.request("r"):
        assert made(call, part) is not None
        assert not guard.errors
        assert made(call, part) is not None
    assert guard.errors == {call: 1}
    assert not guard.sound("r")


def test_a_lost_device_is_nothing_to_guard_against():
    def lost(*given):
        raise torch.AcceleratorError("the device is gone")

    guard, part = guarded("scores", lost)
    with pytest.raises(torch.AcceleratorError):
        part.scores("r", 0, KEYS, KEYS, NOTHING)
    assert not guard.errors


def test_a_method_that_fails_too_often_is_switched_off(caplog):
    guard, part = guarded("scores", fail)
    for i in range(MOST_FAILURES + 2):
        assert guard.off is (i >= MOST_FAILURES)
        part.scores(f"r{i}", 0, KEYS, KEYS, NOTHING)
        guard.abandon(f"r{i}")
    lines = [r for r in caplog.records if "switched off" in r.message]
    assert [line.levelno for line in lines] == [logging.ERROR]
    assert guard.report()["compressor_errors_scores"] == MOST_FAILURES + 2
    assert guard.report()["compressor_failures"] == MOST_FAILURES + 2


def test_ten_thousand_failed_requests_leave_nothing_behind():
    guard, part = guarded("scores", fail)
    for i in range(10_000):
        part.scores(f"r{i}", 0, KEYS[:, :1], KEYS[:, :1], NOTHING)
        guard.forget(f"r{i}")
    assert all(guard.sound(f"r{i}") for i in range(10_000))
    assert len(guard.errors) == 1
