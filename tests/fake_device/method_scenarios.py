"""Every selector and every codec on the device; a new one is among them by itself."""

import tempfile
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from decoding_world import SERVED, published_arguments, served
from device_model import DeviceModel, compressor
from scenarios import TO_DEVICE, TO_HOST, looked_at, prepared, scenario
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from tiny_engine import TinyEngine

from vericache_sglang.compression.base import SELECTORS
from vericache_sglang.compression.catalog import CODECS
from vericache_sglang.runtime.probing import Probing

PROMPT = 40
TAIL = 8
"""Queries that are looked at; there are tokens in front of them."""


class MethodEngine(TinyEngine):
    """A tiny engine whose prompts are seen by a model's attention.

    Args:
        line: Names of a selector, a codec, or both.
    """

    def __init__(self, line, **options):
        self.model, self.line = DeviceModel(), line
        super().__init__(**options)
        self.placement.observer.attach(self.model)

    def open_compressor(self, codec, selects, shares):
        return compressor(self.line, folder(), self.model.services())

    def show(self, req, slots, scores, start, mode):
        batch = SimpleNamespace(
            rids=[req.rid],
            forward_mode=ForwardMode[mode],
            extend_seq_lens_cpu=[len(slots)],
            extend_prefix_lens_cpu=[start],
            positions=torch.arange(start, start + len(slots), device="cuda"),
            out_cache_loc=slots,
        )
        self.model.run(batch)

    def same_scores(self, cached, scores):
        """Scores are the method's, not the text's."""


@cache
def folder():
    """Return where calibration files are."""
    return tempfile.mkdtemp(prefix="vericache-methods-")


@contextmanager
def method(line, kind=MethodEngine, **options):
    """Open an engine of wider heads that compresses with ``line``."""
    with prepared() as patch:
        for each in map(SELECTORS.__getitem__, SELECTORS.names()):
            short = replace(each.needs, q_tail=min(TAIL, each.needs.q_tail))
            patch.setattr(each, "needs", short)
        made = kind(line, **options)
        try:
            yield made
        finally:
            made.placement.handles.transfers.close()


class Runner:
    """Runs probes: the model's layers over the tokens of a forward."""

    def __init__(self, model):
        self.model = model
        self.model_config = SimpleNamespace(context_len=400)

    def forward(self, batch):
        self.model.run(batch)


def probed(made, device):
    """Run a method's probes as ``Probing`` does; returns what waited."""
    runner = Runner(made.model)
    probing = Probing(
        made.selector,
        made.placement.observer,
        made.placement.handles,
        runner,
        made.placement.verify_rows[0],
        made.placement._tp_sync,
    )
    state = made.requests["a"].state
    batch = SimpleNamespace(tree_cache=made.tree, device="cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "vericache_sglang.runtime.forward.extend.build_forward",
            lambda batch, inputs, runner: SimpleNamespace(
                rids=["a"], forward_mode=None, positions=inputs.positions
            ),
        )
        with device.noting() as waits:
            while not probing.done(state):
                assert probing.step(state, 0, batch)
    return waits


def prefilled(name):
    def run(device):
        with method(name) as made, device.noting() as waits:
            assert made.admit("a", "text", PROMPT)
            made.show(
                made.requests["a"].state.req,
                torch.tensor([3], device="cuda"),
                None,
                PROMPT,
                "DECODE",
            )
        return waits

    return run


def chosen(name):
    def run(device):
        with method(name) as made:
            assert made.admit("a", "text", PROMPT)
            probed(made, device)
            return looked_at(device, made, [], TO_HOST)

    return run


def asked(name):
    def run(device):
        with method(name) as made:
            assert made.admit("a", "text", PROMPT)
            return probed(made, device)

    return run


for name in SELECTORS.names():
    scenario(f"selector {name}: prefill")(prefilled(name))
    scenario(f"selector {name}: compress to host")(chosen(name))
    if SELECTORS[name].needs.probes:
        scenario(f"selector {name}: probes")(asked(name))


KEEP = 0.8
"""Share of a prompt that is kept beside a codec: more than it packs together."""


def packs(made, tokens):
    """Say whether a prompt of so many tokens is packed, in part at least."""
    return made.placement.compressor.budget(tokens).coded > 0


def compressed(line, move):
    def run(device):
        with method(line, keep=KEEP) as made:
            assert packs(made, PROMPT)
            assert made.admit("a", "text", PROMPT)
            return looked_at(device, made, [], move)

    return run


def drafted(line):
    options = {"residency": "device", "slots": 600, "keep": KEEP}

    def run(device):
        with published_arguments(), method(line, **options) as made:
            assert packs(made, SERVED)
            return served(device, made)

    return run


for codec in CODECS:
    for name in (f"codec {codec}", f"pair snapkv+{codec}"):
        line = name.split()[1]
        scenario(f"{name}: compress on device")(compressed(line, TO_DEVICE))
        scenario(f"{name}: compress to host")(compressed(line, TO_HOST))
        scenario(f"{name}: draft and verify")(drafted(line))
