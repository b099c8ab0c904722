"""Malformed bodies, hang-ups and aborted streams against a server with a small pool.

``python -m vericache_sglang.bench fuzz`` is the long version, beside plain SGLang.
"""

import asyncio
from dataclasses import dataclass, field

import pytest
from live_server import MODEL, LiveServer

from vericache_sglang.evaluation.attack import (
    AttackTarget,
    Tally,
    attack,
    probe,
    streams,
)
from vericache_sglang.evaluation.benchmarks.fuzz import ENGINE, SETTINGS, probe_prompts
from vericache_sglang.evaluation.fuzzing import draw
from vericache_sglang.evaluation.systems import described

pytestmark = [pytest.mark.server, pytest.mark.extended]

SEED = 7
BODIES = 120
STREAMS = 60


@dataclass
class Fuzzed:
    """What is left of a server after the attack."""

    target: AttackTarget
    tally: Tally
    ends: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)


@pytest.fixture(scope="module")
def probes(servers):
    """Return prompts that are drafted for, each with plain SGLang's answer."""
    prompts = probe_prompts(MODEL, SEED)
    answers = servers[1].generate(prompts, **probe(prompts[0])["sampling_params"])
    return {
        prompt: answer["text"] for prompt, answer in zip(prompts, answers, strict=True)
    }


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory, probes):
    """Attack a server of its own, and look at what it holds afterwards."""
    engine = {**ENGINE, "max_running_requests": 24}
    flags = described("fuzzed", SETTINGS, engine).flags
    server = LiveServer(tmp_path_factory.mktemp("fuzzed"), *flags)
    try:
        yield asyncio.run(under_attack(AttackTarget(server.wait()), probes))
    finally:
        server.close()


async def under_attack(target, probes):
    openapi = target.server.ask("/openapi.json")
    bodies = draw(openapi, list(probes), BODIES, SEED, spared=lambda content: False)
    tally = await attack([target], bodies, probes)
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
    assert fuzzed.tally.statuses[200] > BODIES / 10, "the bodies go no further"


def test_streams_that_finish_among_aborts_get_plain_answers(fuzzed):
    assert fuzzed.wrong == []
    assert sum(fuzzed.ends.values()) == STREAMS
    assert {"length", "abort", "hung up on"} <= set(fuzzed.ends)


def test_nothing_is_held_and_nothing_of_ours_raised(fuzzed):
    assert fuzzed.held == {}
    assert fuzzed.target.tracebacks() == []
    counters = fuzzed.target.server.counters()
    assert counters["accepted"] > 0
    assert counters["swap_outs"] > 0, "the pool has room for all"
