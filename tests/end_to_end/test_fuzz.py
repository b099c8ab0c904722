"""Malformed bodies, hang-ups and aborted streams against a server with a small pool.

``scripts/fuzz_http.py`` is the long version, beside plain SGLang.
"""

import asyncio
from dataclasses import dataclass, field

import pytest
from live_server import MODEL, LiveServer

from fuzzing.attack import Tally, attack, probe
from fuzzing.bodies import draw
from fuzzing.streams import streams
from fuzzing.target import FLAGS, OURS, Target
from lossless.prompts import load_tokenizer, record_prompts

pytestmark = pytest.mark.server

SEED = 7
BODIES = 200
STREAMS = 100


@dataclass
class Fuzzed:
    """What is left of a server after the attack."""

    target: Target
    tally: Tally
    ends: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)


@pytest.fixture(scope="module")
def probes(servers):
    """Return prompts that are drafted for, each with plain SGLang's answer."""
    lengths = [100 + 20 * i for i in range(16)]
    prompts = record_prompts(load_tokenizer(MODEL), lengths, SEED)
    wanted = probe(prompts[0])["sampling_params"]
    answers = servers[1].generate(prompts, **wanted)
    return {
        prompt: answer["text"] for prompt, answer in zip(prompts, answers, strict=True)
    }


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory, probes):
    """Attack a server of its own, and look at what it holds afterwards."""
    more = ("--max-running-requests", "24")
    server = LiveServer(tmp_path_factory.mktemp("fuzzed"), *FLAGS, *OURS, *more)
    try:
        server.wait()
        target = Target("VeriCache", server.url, server.log, server.process)
        target.remember()
        yield asyncio.run(under_attack(target, probes))
    finally:
        server.close()


async def under_attack(target, probes):
    tally = await attack([target], draw(SEED, BODIES, list(probes)), probes)
    after_bodies = await target.settle()
    ends, wrong = await streams(target, STREAMS, probes, SEED)
    after_streams = await target.settle()
    target.require_alive()
    return Fuzzed(target, tally, ends, wrong, {**after_bodies, **after_streams})


def test_healthy_requests_among_bad_bodies_get_plain_answers(fuzzed):
    assert fuzzed.tally.wrong == []
    assert fuzzed.tally.probes == BODIES // 10
    assert sum(fuzzed.tally.statuses.values()) == BODIES
    assert fuzzed.tally.statuses[400] > BODIES / 10, "the bodies are not bad"


def test_streams_that_finish_among_aborts_get_plain_answers(fuzzed):
    assert fuzzed.wrong == []
    assert sum(fuzzed.ends.values()) == STREAMS
    assert {"length", "abort", "hung up on"} <= set(fuzzed.ends)


def test_nothing_is_held_and_nothing_of_ours_raised(fuzzed):
    assert fuzzed.held == {}
    assert fuzzed.target.tracebacks() == []
    counters = fuzzed.target.counters()
    assert counters["accepted"] > 0
    assert counters["parks"] > 0, "the pool has room for all"
