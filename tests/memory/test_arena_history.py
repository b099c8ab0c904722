"""Any history of an arena against a dictionary: no byte lost, none lent twice."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lent_bytes import BYTES, content, grains, new_arena, read, write

from vericache_sglang.memory.free_spans import rounded


class ArenaMachine(RuleBasedStateMachine):
    """Any history against a dictionary: extent number -> bytes, holds, address."""

    SIZE = 40 * 64

    def __init__(self):
        super().__init__()
        self.arena = new_arena(self.SIZE + 17)
        self.extents = {}
        self.bytes = {}
        self.fixed = {}
        self.leaving = set()
        self.count = 0

    def some(self, data, among):
        return data.draw(st.sampled_from(sorted(among)))

    @property
    def used(self):
        return sum(grains(len(raw)) for raw in self.bytes.values())

    @rule(
        nbytes=st.one_of(st.integers(0, 400), st.integers(0, 2600)),
        held=st.booleans(),
    )
    def take(self, nbytes, held):
        free = self.SIZE - self.used
        promised = self.arena.room_for(nbytes)
        extent = self.arena.take(nbytes, held and nbytes % 3 == 0)
        assert (extent is not None) == promised
        if extent is None:
            assert grains(nbytes) > free or self.fixed, "refused for nothing"
            return
        assert grains(nbytes) <= free
        write(extent, self.count)
        self.extents[self.count] = extent
        self.bytes[self.count] = content(self.count, nbytes)
        if extent.holds:
            self.fixed[self.count] = extent.start
        self.count += 1

    @precondition(lambda self: self.bytes.keys() - self.leaving)
    @rule(data=st.data())
    def give(self, data):
        number = self.some(data, self.bytes.keys() - self.leaving)
        self.arena.give(self.extents[number])
        if number in self.fixed:
            self.leaving.add(number)
        else:
            del self.extents[number], self.bytes[number]

    @precondition(lambda self: self.bytes.keys() - self.leaving)
    @rule(data=st.data())
    def hold(self, data):
        number = self.some(data, self.bytes.keys() - self.leaving)
        self.extents[number].hold()
        self.fixed[number] = self.extents[number].start

    @precondition(lambda self: self.fixed)
    @rule(data=st.data())
    def release(self, data):
        number = self.some(data, self.fixed)
        self.extents[number].release()
        if self.extents[number].holds:
            return
        del self.fixed[number]
        if number in self.leaving:
            self.leaving.remove(number)
            del self.extents[number], self.bytes[number]

    @precondition(lambda self: self.bytes.keys() - self.leaving)
    @rule(data=st.data(), share=st.floats(0, 1))
    def shrink(self, data, share):
        number = self.some(data, self.bytes.keys() - self.leaving)
        extent, raw = self.extents[number], self.bytes[number]
        self.arena.shrink(extent, int(share * extent.nbytes))
        # It keeps whole grains; those bytes behind what was asked for become its own.
        tail = grains(len(raw)) - len(raw)
        padded = (raw + bytes(tail))[-extent.size :]
        if tail:
            extent.view(BYTES, (tail,), extent.size - tail).zero_()
        self.bytes[number] = padded
        assert extent.size == grains(int(share * len(raw)))
        if number in self.fixed:
            self.fixed[number] = extent.start

    @rule()
    def compact(self):
        self.arena.compact()

    @invariant()
    def every_byte_is_there_and_nobody_s_twice(self):
        at = 0
        for extent in sorted(self.extents.values(), key=lambda e: e.start):
            assert extent.start >= at
            at = extent.start + extent.size
        assert at <= self.SIZE
        for number, raw in self.bytes.items():
            assert read(self.extents[number]) == raw
            assert self.extents[number].size == grains(len(raw))
        for number, start in self.fixed.items():
            assert self.extents[number].start == start

    @invariant()
    def counts_are_exact(self):
        assert self.arena.used_bytes == self.used
        assert self.arena.free_bytes == self.SIZE - self.used
        gone = sum(grains(len(self.bytes[number])) for number in self.leaving)
        assert self.arena.leaving_bytes == gone
        self.arena.check()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(
    deadline=None, max_examples=60, stateful_step_count=60
)


@given(st.lists(st.integers(0, 900), max_size=60), st.randoms())
@settings(deadline=None, max_examples=60)
def test_with_nothing_held_it_refuses_only_what_exceeds_the_free_bytes(sizes, rng):
    arena, live = new_arena(64 * 100), {}
    for number, nbytes in enumerate(sizes):
        while arena.free_bytes < rounded(nbytes) or (live and rng.random() < 0.3):
            gone = rng.choice(sorted(live))
            arena.give(live.pop(gone))
        extent = arena.take(nbytes)
        assert extent is not None
        write(extent, number)
        live[number] = extent
    arena.check()
    for number, extent in live.items():
        assert read(extent) == content(number, extent.nbytes)
