"""Selectors for tiny engines, and what they were told."""

from known_kv import HEADS

from vericache_sglang.compression.about import About
from vericache_sglang.compression.base import Needs, Selector
from vericache_sglang.kv.split_layers import as_bits


class Noted(Selector):
    """Keeps the tokens with the highest score, which is its query's first element."""

    about = About(scenarios=("long-context",))
    needs = Needs(keys=False, q_stream=True)

    def __init__(self):
        super().__init__()
        self.calls = []

    def open(self, rid):
        self.calls.append(("open", rid))

    def close(self, rid):
        self.calls.append(("close", rid))

    def update(self, step):
        return step.queries[:HEADS, :, 0]

    def scores(self, rid, layer, keys, values, seen):
        return seen.noted


def of_one_prompt(kind):
    """Return a class that selects alike, but for a single prompt: never shared."""

    class OfOnePrompt(kind):
        def keep_share(self, noted):
            return super().keep_share(noted)

    return OfOnePrompt


class OfKeys(Selector):
    """Keeps the tokens whose keys have the highest bits; asks for nothing else."""

    about = About(scenarios=("long-context",))

    def scores(self, rid, layer, keys, values, seen):
        return as_bits(keys).float().sum(dim=2)
