"""What an engine does on the device, one thing at a time: each yields its waits.

Everything is the engine's own but the model: pool, allocator and tree are SGLang's, the
KV is known (``engine/tiny_engine.py``) and compared bit by bit after every step.
"""

from collections.abc import Callable
from contextlib import contextmanager

import pytest
from segment_world import SHORT, shorten_segments
from tiny_engine import TinyEngine, opened
from tiny_segments import tiered

from vericache_sglang.scheduling.plan import (
    Compress,
    Load,
    Offload,
    Residency,
    Restore,
    SwapIn,
    SwapOut,
)

SCENARIOS: dict[str, Callable] = {}
"""By name; called with the device, returns what waited."""

SEGMENTED = ("compress", "tiered_cache")
"""Further modules that know how long a segment is."""


def scenario(name):
    """Enter a function as a scenario."""

    def enter(does):
        assert name not in SCENARIOS
        SCENARIOS[name] = does
        return does

    return enter


@contextmanager
def prepared():
    """Put pools on the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TinyEngine, "device", "cuda")
        yield patch


@contextmanager
def engine(**options):
    """Open a tiny engine whose pool is on the device."""
    with prepared(), opened(**options) as made:
        yield made


@contextmanager
def tiered_engine(**options):
    """Open a tiny engine with segments below its tree, short ones."""
    with prepared() as patch:
        shorten_segments(patch, SEGMENTED)
        with tiered(**options) as made:
            yield made


@scenario("boot")
def boot(device):
    with device.noting() as waits, engine():
        pass
    return waits


# -- moves of a request ------------------------------------------------------------

TO_HOST = Compress("a", Residency.HOST)
TO_DEVICE = Compress("a", Residency.DEVICE)
HELD = 21
"""Tokens of the prompt."""

MOVES = {
    "compress to host": ([], TO_HOST),
    "compress on device": ([], TO_DEVICE),
    "offload": ([TO_DEVICE], Offload("a")),
    "load": ([TO_HOST], Load("a")),
    "swap out": ([TO_HOST], SwapOut("a")),
    "swap in": ([TO_HOST, SwapOut("a")], SwapIn("a")),
    "fall back": ([TO_DEVICE], Restore("a")),
    "draft from host": ([TO_HOST], TinyEngine.draft),
    "verify from host": ([TO_HOST, TinyEngine.draft], "verify"),
    "draft on device": ([TO_DEVICE], TinyEngine.draft),
    "verify on device": ([TO_DEVICE, TinyEngine.draft], "verify"),
    "finish from host": ([TO_HOST], TinyEngine.finish),
    "finish from host, prefix evicted": ([TO_HOST, "evict"], TinyEngine.finish),
    "finish on device": ([TO_DEVICE], TinyEngine.finish),
    "abort swapped out": ([TO_HOST, SwapOut("a")], TinyEngine.abort),
}
"""What was done before, and what is looked at."""


def take(made, step):
    """Make one step of request ``a``."""
    if step == "verify":
        made.verify("a", 1)
    elif step == "evict":
        made.evict()
    elif callable(step):
        step(made, "a")
    else:
        assert made.move(step, "a")


def looked_at(device, made, before, step):
    """Make steps, the last of them under observation; returns what waited."""
    for each in before:
        take(made, each)
        made.checks.all()
    with device.noting() as waits:
        take(made, step)
    made.checks.all()
    return waits


def moved(before, step, **options):
    def run(device):
        with engine(**options) as made:
            assert made.admit("a", "text", HELD)
            return looked_at(device, made, before, step)

    return run


for name, (before, step) in MOVES.items():
    scenario(name)(moved(before, step))
    if name not in ("fall back", "finish from host, prefix evicted"):
        scenario(f"{name}, no prefix cache")(moved(before, step, cached=False))


# -- prefixes that several prompts share ---------------------------------------------


def shared(before, step):
    """Return a scenario over a prompt of two segments and a bit."""

    def run(device):
        with tiered_engine() as made:
            assert made.admit("a", "text", 2 * SHORT + 5)
            return looked_at(device, made, before, step)

    return run


def leave(made, rid):
    """Have the tree keep a finished request's prefix, and give it up."""
    made.finish(rid)
    made.evict()


def come_back(made, rid):
    """Prefill a prompt whose beginning has left the tree."""
    assert made.admit("b", "text", 2 * SHORT + 5)


SHARED = {
    "shared: compress to host": ([], TO_HOST),
    "shared: compress on device": ([], TO_DEVICE),
    "shared: offload": ([TO_DEVICE], Offload("a")),
    "shared: draft": ([TO_HOST], TinyEngine.draft),
    "shared: verify": ([TO_HOST, TinyEngine.draft], "verify"),
    "shared: finish": ([TO_HOST, TinyEngine.draft], TinyEngine.finish),
    "prefix: evict": ([], leave),
    "prefix: load back": ([leave], come_back),
    "prefix: evict what is compressed": ([TO_DEVICE], leave),
    "prefix: load back what is compressed": ([TO_HOST, leave], come_back),
}

for name, (before, step) in SHARED.items():
    scenario(name)(shared(before, step))
