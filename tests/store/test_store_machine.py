"""Two servers, one store that evicts and decays: only what was put ever comes back."""

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from storages import memory_store
from stored_segments import (
    KIVI,
    NAMES,
    SNAPKV,
    about,
    bit_flipped,
    is_content,
    pair_parts,
    tensors_of,
)

pytestmark = pytest.mark.sglang


class StoreMachine(RuleBasedStateMachine):
    """Two servers over one store that evicts and decays, against a dict of puts."""

    def __init__(self):
        super().__init__()
        first, self.storage, _ = memory_store()
        self.stores = [first, memory_store(self.storage)[0]]
        self.puts = defaultdict(set)  # (name, part, compressor) -> seeds

    servers = st.integers(0, 1)
    names = st.sampled_from(NAMES[:3])
    seeds = st.integers(0, 3)
    compressors = st.sampled_from([KIVI, SNAPKV])

    @rule(server=servers, name=names, seed=seeds)
    def put_a_whole_segment(self, server, name, seed):
        seed *= 10
        self.puts[name, "whole", ""].add(seed)
        stored = self.stores[server].put(name, {"whole": tensors_of(seed)}, about())
        assert stored or self._crowded(name)

    @rule(server=servers, name=names, seed=seeds, compressor=compressors)
    def put_a_pair(self, server, name, seed, compressor):
        seed *= 10
        self.puts[name, "draft", compressor].add(seed)
        self.puts[name, "rest", compressor].add(seed + 1)
        stored = self.stores[server].put(name, pair_parts(seed), about(compressor))
        assert stored or self._crowded(name)

    @rule(server=servers, name=names, compressor=compressors)
    def upgrade(self, server, name, compressor):
        self.puts[name, "draft", compressor].add(90)
        self.puts[name, "rest", compressor].add(91)
        self.stores[server].compress(
            [name], lambda _: pair_parts(90).values(), compressor
        )

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
            self.storage.objects[key] = bytearray(
                bit_flipped(bytes(self.storage.objects[key]), bit)
            )

    @rule(server=servers)
    def restart(self, server):
        self.stores[server] = memory_store(self.storage)[0]

    @rule(
        server=servers,
        name=names,
        kind=st.sampled_from(
            [
                ("whole", ""),
                *((p, c) for p in ("draft", "rest") for c in (KIVI, SNAPKV)),
            ]
        ),
    )
    def get(self, server, name, kind):
        payload = self.stores[server].get(name, *kind)
        if payload is not None:
            assert is_content(payload, self.puts[(name, *kind)])
            assert payload.label.part == kind[0]
            assert payload.label.about.compressor == kind[1]

    @rule(server=servers, name=names, compressor=st.sampled_from(["", KIVI, SNAPKV]))
    def restore(self, server, name, compressor):
        store = self.stores[server]
        found = store.restore(name, compressor)
        if found is None:
            # All that is damaged is known now, so lookup and restore agree.
            assert store.lookup([name]) == 0
            return
        if set(found) == {"whole"}:
            assert is_content(found["whole"], self.puts[name, "whole", ""])
            return
        assert set(found) == {"draft", "rest"}
        packer = found["draft"].label.about.compressor
        (seed,) = (
            s
            for s in self.puts[name, "draft", packer]
            if is_content(found["draft"], [s])
        )
        assert is_content(found["rest"], [seed + 1])

    @invariant()
    def lookup_is_the_run_of_what_exists(self):
        for store in self.stores:
            run = store.lookup(NAMES[:3])
            ones = [store.lookup([name]) for name in NAMES[:3]]
            assert run == (ones.index(0) if 0 in ones else 3)

    def _crowded(self, name):
        return sum(f"{name}.record" in key for key in self.storage.objects) >= 10


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None
)
