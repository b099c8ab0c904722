"""Two servers, one store that evicts and decays: only what was put ever comes back."""

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sample_segments import (
    KIVI,
    NAMES,
    SNAPKV,
    bit_flipped,
    is_by,
    is_content,
    pair_of,
    same,
    whole_of,
)
from storages import memory_store

pytestmark = pytest.mark.sglang


class StoreMachine(RuleBasedStateMachine):
    """Two servers over one store that evicts and decays, against a dict of puts."""

    def __init__(self):
        super().__init__()
        first, self.storage, _ = memory_store()
        self.stores = [first, memory_store(self.storage)[0]]
        self.puts = defaultdict(set)  # (name, compressor) -> seeds

    servers = st.integers(0, 1)
    names = st.sampled_from(NAMES[:3])
    seeds = st.integers(0, 3)
    compressors = st.sampled_from([KIVI, SNAPKV])

    @rule(server=servers, name=names, seed=seeds)
    def put_a_whole_segment(self, server, name, seed):
        self.puts[name, ""].add(seed)
        stored = self.stores[server].put(name, whole_of(seed))
        assert stored or self._crowded(name)

    @rule(server=servers, name=names, seed=seeds, compressor=compressors)
    def put_a_pair(self, server, name, seed, compressor):
        self.puts[name, compressor].add(seed)
        stored = self.stores[server].put(name, pair_of(seed), compressor)
        assert stored or self._crowded(name)

    @rule(server=servers, name=names, compressor=compressors)
    def upgrade(self, server, name, compressor):
        self.puts[name, compressor].add(90)
        self.stores[server].compress([name], lambda _: pair_of(90).values(), compressor)

    @rule(data=st.data())
    def evict(self, data):
        if self.storage.objects:
            del self.storage.objects[
                data.draw(st.sampled_from(sorted(self.storage.objects)))
            ]

    @rule(data=st.data(), bit=st.integers(0, 8 * 700))
    def decay(self, data, bit):
        if self.storage.objects:
            key = data.draw(st.sampled_from(sorted(self.storage.objects)))
            content = bytes(self.storage.objects[key])
            damaged = bit_flipped(content, bit % (8 * len(content)))
            self.storage.objects[key] = bytearray(damaged)

    @rule(server=servers)
    def restart(self, server):
        self.stores[server] = memory_store(self.storage)[0]

    @rule(server=servers, name=names, compressor=compressors)
    def draft(self, server, name, compressor):
        found = self.stores[server].restore(name, [compressor], only="draft")
        if found is not None:
            seeds = self.puts[name, compressor]
            assert any(same(found.parts["draft"], pair_of(s)["draft"]) for s in seeds)

    @rule(server=servers, name=names, compressor=st.sampled_from(["", KIVI, SNAPKV]))
    def restore(self, server, name, compressor):
        store = self.stores[server]
        found = store.restore(name, [compressor])
        if found is None:
            # All that is damaged is known now, so lookup and restore agree.
            assert store.lookup([name]) == 0
        elif is_by(found, ""):
            assert is_content(found, self.puts[name, ""])
        else:
            (packer,) = (each for each in (KIVI, SNAPKV) if is_by(found, each))
            assert is_content(found, self.puts[name, packer], pair_of)

    @invariant()
    def lookup_is_the_run_of_what_exists(self):
        for store in self.stores:
            run = store.lookup(NAMES[:3])
            ones = [store.lookup([name]) for name in NAMES[:3]]
            assert run == (ones.index(0) if 0 in ones else 3)

    def _crowded(self, name):
        return sum(f"{name}.manifest" in key for key in self.storage.objects) >= 10


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=15, stateful_step_count=30, deadline=None
)
