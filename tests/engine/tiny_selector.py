"""A selector for tiny engines, and what it was told."""

from known_kv import HEADS

from vericache_sglang.compression.about import About
from vericache_sglang.compression.base import Needs, Selector


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
