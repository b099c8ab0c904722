"""Entries are dealt out to spans in order, in pieces as long as can be."""

from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.pieces import Piece, assign_spans
from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.kv.staging import Span, StagingBuffer

LEAST = 500_000
"""Bytes from which a copy is long (design: 0.5 to 2 MB each)."""


@given(
    counts=st.lists(st.integers(0, 9), max_size=6),
    sizes=st.lists(st.integers(1, 9), max_size=6),
    spare=st.integers(1, 9),
)
def test_every_entry_has_the_slot_whose_turn_it_is(counts, sizes, spare):
    total = sum(counts)
    sizes = [*sizes, max(0, total - sum(sizes)) + spare]
    spans, start = [], 0
    for size in sizes:
        spans.append(Span(start, size))
        start += size + 2
    slots = [slot for span in spans for slot in range(span.start, span.end)]
    entries = [(block, i) for block, count in enumerate(counts) for i in range(count)]
    pieces = list(assign_spans(counts, spans))
    dealt = [
        ((piece.block, i), slot)
        for piece in pieces
        for i, slot in zip(
            range(piece.rows.start, piece.rows.stop),
            range(piece.slots.start, piece.slots.stop),
            strict=True,
        )
    ]
    assert dealt == list(zip(entries, slots, strict=False))
    assert len(pieces) <= len([c for c in counts if c]) + len(spans) - 1 + (not total)
    assert all(piece.span.slots for piece in pieces)


def test_what_fits_is_one_piece():
    assert list(assign_spans([24576], [Span(7, 24576)])) == [
        Piece(0, 0, Span(7, 24576))
    ]
    cut = list(assign_spans([3, 4], [Span(0, 5), Span(9, 2)]))
    assert [(p.block, p.first, *p[2].__getstate__()) for p in cut] == [
        *((0, 0, 0, 3), (1, 0, 3, 2), (1, 2, 9, 2)),
    ]


# -- how long copies are ----------------------------------------------------------


def llama(layers, heads):
    """KV of a Llama in bf16: 128 dimensions a head."""
    return KVGeometry(
        layers=layers,
        kv_heads=heads,
        head_dim=128,
        v_head_dim=128,
        element_bytes=2,
        page_size=1,
    )


def copies(geometry, counts, spans):
    """Return the bytes of every copy of a layer's keys; values are as long."""
    size = geometry.kv_heads * geometry.head_dim * geometry.element_bytes
    return [piece.span.slots * size for piece in assign_spans(counts, spans)]


def test_a_prompt_of_its_own_is_copied_in_48_mib_a_layer_and_side():
    eight_b = llama(32, 8)
    rest = 32768 - 32768 // 4
    sizes = copies(eight_b, [rest], [Span(0, rest)])
    assert sizes == [48 << 20]
    assert 2 * 32 * sizes[0] == rest * eight_b.token_bytes


def test_a_segment_is_copied_in_768_kib_a_layer_and_side():
    counts = [SEGMENT - SEGMENT // 4] * (32768 // SEGMENT)
    sizes = copies(llama(32, 8), counts, [Span(0, sum(counts))])
    assert sizes == [768 << 10] * 64
    assert min(sizes) >= LEAST


def test_on_8_ranks_only_prompts_of_their_own_are_copied_in_long_pieces():
    one_head = llama(80, 1)
    assert copies(one_head, [24576], [Span(0, 24576)]) == [6 << 20]
    assert copies(one_head, [384] * 2, [Span(0, 768)]) == [96 << 10] * 2


def test_a_scattered_staging_region_cuts_a_prompt_no_more_than_it_must():
    """Half full with leases of 2K slots, every other one given back."""
    region = StagingBuffer(0, 65536)
    leases = [region.take(2048) for _ in range(32)]
    for lease in leases[::2]:
        region.give(lease)
    spans = region.take(24576).first(24576)
    sizes = copies(llama(32, 8), [24576], spans)
    assert sizes == [4 << 20] * 12
    segments = copies(llama(32, 8), [384] * 64, spans)
    assert len(segments) == 64 + 12 - 4, "four ends of spans are ends of segments"
    assert sorted(segments)[:9] == [256 << 10] * 8 + [512 << 10], "a cut takes a third"
    assert sum(segments) == sum(sizes)
