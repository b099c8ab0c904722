"""The queries kept of a prefill: chunks, prefix hits, a prefill begun anew."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from vericache_sglang.kv.query_tails import QueryTails

pytestmark = pytest.mark.sglang

WIDTH, HEADS, DIM, LAYERS = 8, 3, 4, 2


def queries(tokens, seed=0):
    """Return one prompt's queries by layer, [L, T, Hq, D]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, tokens, HEADS, DIM, generator=generator)


def prefill(tails, *parts):
    """Run one forward over (rid, prompt queries, from, to) of several requests."""
    batch = SimpleNamespace(
        rids=[rid for rid, *_ in parts],
        extend_prefix_lens_cpu=[start for *_, start, _ in parts],
        extend_seq_lens_cpu=[stop - start for *_, start, stop in parts],
    )
    for layer in range(LAYERS):
        rows = torch.cat([q[layer, start:stop] for _, q, start, stop in parts])
        tails.observe(layer, rows, batch)


def expect(tails, rid, whole, start, stop):
    """The tail of ``rid`` is the queries of positions ``start`` to ``stop``."""
    assert len(tails.of(rid)) == LAYERS
    for layer, tail in tails.of(rid).items():
        assert torch.equal(tail.rows, whole[layer, start:stop].transpose(0, 1))
        assert (tail.start, tail.end) == (start, stop)


@pytest.mark.parametrize("chunk", [1, 3, 7, 8, 9, 20, 50])
@pytest.mark.parametrize("tokens", [1, 5, 8, 21, 48])
def test_chunks_leave_what_one_forward_leaves(tokens, chunk):
    tails, whole = QueryTails(WIDTH), queries(tokens)
    for start in range(0, tokens, chunk):
        prefill(tails, ("a", whole, start, min(start + chunk, tokens)))
    expect(tails, "a", whole, max(0, tokens - WIDTH), tokens)


def test_requests_of_one_batch_are_told_apart():
    tails, a, b, c = QueryTails(WIDTH), queries(20), queries(3, 1), queries(9, 2)
    prefill(tails, ("a", a, 0, 20), ("b", b, 0, 3), ("c", c, 0, 4))
    prefill(tails, ("c", c, 4, 9))
    expect(tails, "a", a, 12, 20)
    expect(tails, "b", b, 0, 3)
    expect(tails, "c", c, 1, 9)


@pytest.mark.parametrize("cached", [19, 15, 4])
def test_a_prefix_hit_leaves_the_tokens_that_were_run(cached):
    tails, whole = QueryTails(WIDTH), queries(20)
    prefill(tails, ("a", whole, cached, 20))
    expect(tails, "a", whole, max(cached, 12), 20)


@pytest.mark.parametrize("start", [0, 5, 19, 21])
def test_a_prefill_begun_anew_replaces_the_tail(start):
    tails, before, after = QueryTails(WIDTH), queries(20), queries(24, 1)
    prefill(tails, ("a", before, 0, 20))
    prefill(tails, ("a", after, start, 24))
    expect(tails, "a", after, max(start, 16), 24)


def test_forgotten_is_gone_and_forgetting_twice_is_allowed():
    tails = QueryTails(WIDTH)
    prefill(tails, ("a", queries(9), 0, 9), ("b", queries(9), 0, 9))
    assert len(tails) == 2
    tails.forget("a")
    tails.forget("a")
    assert tails.of("a") == {}
    assert len(tails) == 1


def test_only_the_tail_is_held_and_it_is_a_copy():
    tails, whole = QueryTails(WIDTH), queries(1000)
    prefill(tails, ("a", whole, 0, 1000))
    kept = whole.clone()
    whole.zero_()
    expect(tails, "a", kept, 992, 1000)
    for tail in tails.of("a").values():
        assert tail.rows.untyped_storage().nbytes() == WIDTH * HEADS * DIM * 4


def test_a_warm_up_without_requests_is_passed_over():
    tails = QueryTails(WIDTH)
    tails.observe(0, queries(4)[0], SimpleNamespace(rids=None))
    assert len(tails) == 0
