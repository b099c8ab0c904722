"""Small indexes for the tests: contents, random trees, prices with exact results."""

from hypothesis import strategies as st

from vericache_sglang.prefix_cache.index import SegmentIndex
from vericache_sglang.prefix_cache.restore_costs import Prices
from vericache_sglang.prefix_cache.segment import Content, Part, PlacedPart, Tier, Use

TOKENS = 512
HALF_LIFE_S = 64.0

EXACT = Prices(
    link_in_s_per_byte=2.0**-10,
    link_out_s_per_byte=2.0**-11,
    store_latency_s=2.0**-3,
    store_s_per_byte=2.0**-9,
    prefill_s_per_token=2.0**-7,
    prefill_s_per_square=2.0**-20,
)
"""Powers of two: with bytes that are powers of two, equal losses are equal floats."""


def whole(nbytes, tier, tokens=TOKENS):
    return Content(tokens=tokens, residual=PlacedPart(nbytes, tier))


def parted(draft, draft_tier, rest, rest_tier, compressor="a"):
    return Content(
        tokens=TOKENS,
        residual=PlacedPart(rest, rest_tier),
        draft=PlacedPart(draft, draft_tier),
        compressor=compressor,
    )


def chain_of(index, contents, now=0.0, name="s", parent=None, stored=True):
    """Add contents one after another, the store has them all; return their names."""
    names = []
    for number, content in enumerate(contents):
        names.append(f"{name}{number}")
        assert index.add(names[-1], parent, content, now)
        index.note_stored(names[-1], stored)
        parent = names[-1]
    return names


def apply(index, moves):
    for move in moves:
        assert index.get(move.name).content.held(move.part).tier is move.source
        index.place(move.name, move.part, move.target)


def matched(index, names, start=0):
    """Count the consecutive restorable segments from ``names[start]`` on."""
    found = [index.get(name) for name in names[start:]]
    here = [segment is not None and segment.content.restorable for segment in found]
    return [*here, False].index(False)


def after_of(index, name):
    """Return the names of all segments here that follow ``name``."""
    found = []
    waiting = list(index.children(name))
    while waiting:
        found.append(waiting.pop())
        waiting += index.children(found[-1])
    return found


TIERS = st.sampled_from([Tier.DEVICE, Tier.HOST, Tier.STORE])


@st.composite
def contents(draw):
    sizes = st.integers(4, 12).map(lambda power: 2**power)
    if draw(st.booleans()):
        return whole(draw(sizes), draw(TIERS))
    return parted(draw(sizes), draw(TIERS), draw(sizes), draw(TIERS))


@st.composite
def forests(draw, most=24):
    """Draw an index of several branching prompts, used, pinned and damaged, and a time.

    Times are all different, so that no two chances are equal by accident.
    """
    index, names = SegmentIndex(HALF_LIFE_S), []
    for now in range(draw(st.integers(1, most))):
        parent = draw(st.sampled_from([None, *names[-6:]]))
        names.append(f"s{now}")
        index.add(names[-1], parent, draw(contents()), now + 0.125)
        index.note_stored(names[-1], draw(st.booleans()))
    now = float(most)
    for name in draw(st.lists(st.sampled_from(names), max_size=most)):
        now += draw(st.integers(1, 50))
        index.touch([name], now)
    damaged = st.sampled_from(names)
    for name in draw(st.lists(damaged, max_size=2, unique=True)):
        if index.get(name).content.draft is not None:
            index.place(name, Part.DRAFT, Tier.GONE)
        else:
            index.drop(name, strand=True)
    here = st.sampled_from(names).filter(lambda name: name in index)
    if len(index):
        pinned = draw(st.lists(here, max_size=3))
        index.hold("request", dict.fromkeys(pinned, Use.ALL))
    index.check()
    return index, now
