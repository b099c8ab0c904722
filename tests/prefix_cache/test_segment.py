"""What a segment may be, how its tokens are shared out, how its uses fade."""

import pytest
from forest import parted, whole
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import InvariantError
from vericache_sglang.prefix_cache.segment import (
    Content,
    Part,
    PlacedPart,
    Segment,
    Tier,
)

ON_HOST = PlacedPart(8, Tier.HOST)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": 0, "residual": ON_HOST},
        {"tokens": 1, "residual": ON_HOST, "compressor": "a"},
        {"tokens": 1, "residual": ON_HOST, "draft": ON_HOST},
    ],
)
def test_a_content_that_cannot_be_is_refused(fields):
    with pytest.raises(InvariantError):
        Content(**fields)


def test_a_part_without_bytes_cannot_be():
    with pytest.raises(InvariantError, match="0 bytes"):
        PlacedPart(0, Tier.HOST)


@given(st.integers(1, 1 << 17), st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_the_parts_share_every_token_once(tokens, draft, rest):
    content = Content(
        tokens=tokens,
        residual=PlacedPart(rest, Tier.HOST),
        draft=PlacedPart(draft, Tier.DEVICE),
        compressor="a",
    )
    kept, left = (content.tokens_of(part) for part in Part)
    assert kept + left == tokens
    assert kept <= tokens * draft / (draft + rest) * (1 + 1e-12)
    assert kept > tokens * draft / (draft + rest) * (1 - 1e-12) - 1


@given(st.integers(1, 511), st.integers(1, 1 << 20))
def test_with_a_selector_they_are_the_tokens_it_kept_and_dropped(kept, token_bytes):
    bytes_of = [kept * token_bytes, (512 - kept) * token_bytes]
    content = parted(bytes_of[0], Tier.DEVICE, bytes_of[1], Tier.HOST)
    assert content.tokens_of(Part.DRAFT) == kept
    assert content.tokens_of(Part.RESIDUAL) == 512 - kept


def test_a_whole_segment_has_no_draft_part():
    content = whole(64, Tier.STORE)
    assert content.held(Part.DRAFT) is None
    assert content.parts == ((Part.RESIDUAL, PlacedPart(64, Tier.STORE)),)
    assert [content.tokens_of(part) for part in Part] == [0, 512]
    assert content.restorable
    assert not whole(64, Tier.GONE).restorable


@pytest.mark.parametrize("lost", list(Part))
def test_a_parted_segment_needs_both_parts(lost):
    tiers = {Part.DRAFT: Tier.DEVICE, Part.RESIDUAL: Tier.HOST}
    content = parted(8, tiers[Part.DRAFT], 8, tiers[Part.RESIDUAL])
    assert content.restorable
    tiers[lost] = Tier.GONE
    assert not parted(8, tiers[Part.DRAFT], 8, tiers[Part.RESIDUAL]).restorable


def test_uses_halve_every_half_life_and_never_grow():
    segment = Segment(
        name="a",
        parent=None,
        start=0,
        content=whole(8, Tier.HOST),
        last_use=100.0,
        uses=3.0,
    )
    assert segment.uses_at(100.0, 10.0) == 3.0
    assert segment.uses_at(110.0, 10.0) == 1.5
    assert segment.uses_at(130.0, 10.0) == 0.375
    assert segment.uses_at(90.0, 10.0) == 3.0
    assert segment.end == 512
