"""What a segment holds and who uses it, against a dictionary kept by hand."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.errors import InvariantError
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.host_pages import HostPagePool
from vericache_sglang.kv.residual import RawResidual
from vericache_sglang.prefix_cache.index import SegmentIndex
from vericache_sglang.prefix_cache.segment import Content, Form, PlacedPart, Tier, Use
from vericache_sglang.prefix_cache.segment_images import SegmentDraft, SegmentImage

GEOMETRY = KVGeometry(
    layers=2, kv_heads=2, head_dim=4, v_head_dim=6, element_bytes=4, page_size=1
)
NAMES = "abcd"
USE = dict.fromkeys(Form, Use.IMAGES)
USE |= {"draft": Use.DRAFT, Form.RESIDUAL: Use.RESIDUAL}

ON_HOST = Content(tokens=8, residual=PlacedPart(64, Tier.HOST))


def draft(name):
    """Draft KV of as many slots as the name's place, and one more."""
    slots = NAMES.index(name) + 1
    return SegmentDraft(
        torch.arange(slots), torch.zeros(1, 1, slots, dtype=torch.int32)
    )


class World:
    """An index, its pages, and what every segment should hold.

    Attributes:
        held: By name, bytes of images by form, and slots as ``"draft"``.
        users: By user, what it reads by name.
        damaged: Names and forms of images found corrupt and not freed yet.
        order: Names with draft KV, the latest used last.
    """

    def __init__(self):
        self.index = SegmentIndex()
        self.pages = HostPagePool(1 << 16, 96, pinned=False)
        self.held = {name: {} for name in NAMES}
        self.users, self.damaged, self.order = {}, set(), []

    def image(self, name):
        noted = torch.full((2, 5 * NAMES.index(name) + 1), 1.0)
        return SegmentImage.copied({"noted": noted}, self.pages)

    def residual(self, name):
        slots = NAMES.index(name) + 2
        return RawResidual(GEOMETRY, slots, 3, torch.float32, self.pages)

    def read(self, name, use):
        return any(each.get(name, Use.NONE) & use for each in self.users.values())

    def refused(self, call, *given):
        with pytest.raises(InvariantError):
            call(*given)

    def add(self, name, form):
        """Add what is missing; a second one is refused but for an image."""
        held, index = self.held[name], self.index
        if form == "draft":
            if form in held:
                self.refused(index.add_draft, name, draft(name))
                return
            index.add_draft(name, part := draft(name))
            assert index.find(name).draft is part
            held[form] = len(part.slots)
            self.order.append(name)
            return
        residual = form is Form.RESIDUAL
        made = self.residual(name) if residual else self.image(name)
        if form in held and (form is not Form.SCORES or self.read(name, Use.IMAGES)):
            self.refused(index.add_image, name, form, made)
            return
        index.add_image(name, form, made)
        assert index.find(name).images[form] is made
        assert (index.find(name).residual is made) is residual
        held[form] = made.held_bytes
        self.damaged.discard((name, form))

    def drop(self, name, form):
        """Take something away; what is missing or read is refused."""
        index = self.index
        call, use, given = index.drop_image, USE[form], (name, form)
        if form == "draft":
            call, given = index.remove_draft, (name,)
        if form not in self.held[name] or self.read(name, use):
            self.refused(call, *given)
            return
        call(*given)
        del self.held[name][form]
        self.damaged.discard((name, form))
        if form == "draft":
            self.order.remove(name)

    def damage(self, name, form):
        if form != "draft" and form in self.held[name]:
            self.index.discard_image(name, form)
            self.damaged.add((name, form))
            self.end_damaged()

    def hold(self, user, name, use):
        self.index.hold(user, {name: use})
        mine = self.users.setdefault(user, {})
        mine[name] = mine.get(name, Use.NONE) | use
        if use & Use.DRAFT and name in self.order:
            self.order.remove(name)
            self.order.append(name)

    def release(self, user, use):
        mine = self.users.pop(user, {})
        assert sorted(self.index.release(user, use)) == sorted(mine)
        left = {name: each & ~use for name, each in mine.items() if each & ~use}
        if left:
            self.users[user] = left
        self.end_damaged()

    def end_damaged(self):
        """A corrupt image goes with its last reader."""
        for name, form in sorted(self.damaged, key=str):
            if not self.read(name, USE[form]):
                del self.held[name][form]
                self.damaged.remove((name, form))

    def check(self):
        index = self.index
        index.check()
        self.pages.check()
        used, slots = Counter(), Counter()
        for name, held in self.held.items():
            mine = {u: each[name] for u, each in self.users.items() if name in each}
            segment = index.find(name)
            assert segment.empty is not bool(held or mine)
            known = name in index._segments or name in index._unlinked
            assert known is bool(held or mine or name in index)
            nbytes = sum(size for form, size in held.items() if form != "draft")
            used[bool(mine)] += nbytes
            slots[self.read(name, Use.DRAFT)] += held.get("draft", 0)
            assert segment.users == mine
            assert segment.host_bytes == nbytes
            for form in Form:
                intact = form in held and (name, form) not in self.damaged
                assert segment.has(form) is intact
        assert index.host_bytes == self.pages.used_bytes == used.total()
        assert index.evictable_bytes == used[False]
        rests = [held.get(Form.RESIDUAL, 0) for held in self.held.values()]
        assert index.residual_bytes == sum(rests)
        assert (index.idle_slots, index.used_slots) == (slots[False], slots[True])
        assert index.drafts() == self.order
        assert set(index.users()) == set(self.users)


FORMS = st.sampled_from(["draft", *Form])
USERS = st.sampled_from(["r", "q"])
USES = st.sampled_from([*Use, Use.NONE, Use.ALL])
NAME = st.sampled_from(NAMES)
ACTS = st.one_of(
    st.tuples(st.just("add"), NAME, FORMS),
    st.tuples(st.just("add"), NAME, FORMS),
    st.tuples(st.just("drop"), NAME, FORMS),
    st.tuples(st.just("damage"), NAME, FORMS),
    st.tuples(st.just("hold"), USERS, NAME, USES),
    st.tuples(st.just("hold"), USERS, NAME, USES),
    st.tuples(st.just("release"), USERS, USES),
    st.tuples(st.just("link"), NAME),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(ACTS, max_size=60))
def test_users_bytes_slots_and_the_order_of_use_are_counted(acts):
    world = World()
    for act, *what in acts:
        if act == "link":  # in the index or out of it: what it holds stays
            (name,) = what
            known = world.index.get(name)
            if known is None:
                world.index.add(name, None, ON_HOST, 0.0)
            elif not known.in_use:
                world.index.drop(name)
        else:
            getattr(world, act)(*what)
        world.check()
    for user in list(world.users):
        world.refused(world.index.clear)
        world.release(user, Use.ALL)
    world.index.clear()
    assert world.pages.used_bytes == len(world.index) == 0
    assert world.index.drafts() == []
    world.index.check()


def test_an_operation_protects_what_it_uses_until_it_ends_or_fails():
    world = World()
    world.add("a", Form.RESIDUAL)
    with world.index.used({"a": Use.NONE}):
        assert world.index.evictable_bytes == 0
    assert world.index.evictable_bytes == world.index.host_bytes
    with pytest.raises(KeyError), world.index.used({"a": Use.RESIDUAL}):
        raise KeyError
    assert world.index.evictable_bytes == world.index.host_bytes > 0
    assert world.index.users() == []


def break_bytes(world):
    world.index.host_bytes += 96


def break_used(world):
    world.index._used_bytes += 96


def break_residual(world):
    world.index.residual_bytes -= 96


def break_slots(world):
    world.index.idle_slots += 1


def break_pages(world):
    world.index.find("a").images[Form.WHOLE].free()


def break_users(world):
    world.index.find("a").users["q"] = Use.RESIDUAL


def break_names(world):
    del world.index._names_of["r"]["a"]


def break_unlinked(world):
    world.index._unlinked["d"] = type(world.index.find("a"))(name="d")


@pytest.mark.parametrize(
    "damage",
    [
        *(break_bytes, break_used, break_residual, break_slots),
        *(break_pages, break_users, break_names, break_unlinked),
    ],
)
def test_a_count_that_is_off_is_found(damage):
    world = World()
    for form in ("draft", Form.RESIDUAL, Form.WHOLE):
        world.add("a", form)
    world.hold("r", "a", Use.RESIDUAL)
    world.check()
    damage(world)
    with pytest.raises(InvariantError, match="segment"):
        world.index.check()
