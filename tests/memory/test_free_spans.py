"""Free spans are found by size wherever one is large enough."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.memory.free_spans import (
    GRAIN,
    FreeSpans,
    Span,
    class_floor,
    size_class,
)


@given(st.integers(1, 1 << 30))
def test_size_classes_are_in_order_and_an_eighth_apart(number):
    size = number * GRAIN
    index = size_class(size)
    floor, following = class_floor(index), class_floor(index + 1)
    assert floor <= size < following
    assert size_class(floor) == index
    assert size_class(following) == index + 1
    assert following - floor <= max(GRAIN, floor / 8)


@given(st.lists(st.integers(1, 3000), max_size=30), st.integers(1, 3000), st.randoms())
@settings(deadline=None, max_examples=60)
def test_a_span_is_found_wherever_one_is_large_enough(sizes, wanted, rng):
    spans = [Span(64 * i, 64 * size) for i, size in enumerate(sizes)]
    free = FreeSpans()
    for span in spans:
        free.add(span)
    for span in rng.sample(spans, len(spans) // 3):
        free.discard(span)
        spans.remove(span)
    free.discard(Span(0, 64 * wanted))  # it was never listed
    assert free.listed() == set(spans)
    large = [span for span in spans if span.size >= 64 * wanted]
    found = free.find(64 * wanted)
    assert (found in large) if large else found is None
