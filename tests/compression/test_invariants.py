"""What holds for every selector of ours, whatever it looks at."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vericache_sglang.compression import catalog
from vericache_sglang.compression.base import (
    SELECTORS,
    ModelSpec,
    ProbeLayer,
    QueryTail,
    Seen,
    Step,
)
from vericache_sglang.compression.budget import (
    Budget,
    budget_for,
    keep_indices,
    residual_indices,
)

SPEC = ModelSpec(layers=2, query_heads=6, kv_heads=2, head_dim=8, hidden_size=12)
OFFERED, END = 40, 43
PAGE = 4

NEED_ARTIFACTS = {"kvzap"}
"""They score with weights of a trained model; their own tests have some."""

assert catalog.OURS, "importing the catalog registers them"
OPTIONS = {
    "expected-attention": [{"covariance": False}, {"future": 1, "epsilon": 0.01}],
    "kvzip": [{"chunk": 16}, {"plus": True}, {"prefix": 6, "chunk": 10}],
    "observed": [{"mean": True}, {"queries": 9}],
    "snapkv": [{"pooling": 1}],
}
CASES = [
    pytest.param(name, options, id="-".join([name, *options]))
    for name in sorted(set(SELECTORS.names()) - NEED_ARTIFACTS)
    for options in [{}, *OPTIONS.get(name, [])]
]
LENIENT = settings(
    deadline=None,
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@dataclass(frozen=True)
class Prompt:
    """What a model would show of a prompt; index 0 is the layer. Peaky attention."""

    seed: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    hidden: torch.Tensor
    order: tuple[int, ...] = tuple(range(SPEC.query_heads))

    def probe_layer(self, probe, layer):
        """Return what the probe read, the same for the same probe."""
        generator = torch.Generator().manual_seed(self.seed + 7 * probe.start + layer)
        new = len(probe.tokens)
        rows = torch.randn(SPEC.query_heads, new, SPEC.head_dim, generator=generator)
        shape = (SPEC.kv_heads, new, SPEC.head_dim)
        return ProbeLayer(
            layer=layer,
            queries=2 * rows[list(self.order)],
            probe_keys=torch.randn(shape, generator=generator),
            keys=self.keys[layer],
            values=self.values[layer],
            hidden=torch.randn(new, SPEC.hidden_size, generator=generator),
        )


@cache
def drawn(seed=0):
    generator = torch.Generator().manual_seed(1000 * seed)

    def normal(heads):
        shape = (SPEC.layers, heads, END, SPEC.head_dim)
        return torch.randn(shape, generator=generator)

    hidden = torch.randn(SPEC.layers, END, SPEC.hidden_size, generator=generator)
    return Prompt(
        seed,
        2 * normal(SPEC.query_heads),
        2 * normal(SPEC.kv_heads),
        normal(SPEC.kv_heads),
        hidden,
    )


def run(selector, prompts, cuts=(17,), scored_keys=None):
    """Take requests through their lifetime side by side, as the runtime does.

    Args:
        selector: Bound.
        prompts: By request id, in the order in which they are served.
        cuts: Where the prefill is cut in chunks.
        scored_keys: [L, H, END, D] that ``scores`` gets instead of the prompts'.

    Returns:
        Scores [L, H, OFFERED] by request id.
    """
    for rid in prompts:
        selector.open(rid)
    noted = prefill(selector, prompts, [0, *sorted(cuts), END])
    result = {}
    for rid, prompt in prompts.items():
        probe(selector, rid, prompt)
        keys = prompt.keys if scored_keys is None else scored_keys
        result[rid] = torch.stack(
            [
                selector.scores(
                    rid,
                    layer,
                    keys[layer, :, :OFFERED],
                    prompt.values[layer, :, :OFFERED],
                    collected(selector.needs, prompt, layer, noted[rid, layer]),
                )
                for layer in range(SPEC.layers)
            ]
        )
    for rid in prompts:
        selector.close(rid)
    return result


def prefill(selector, prompts, edges):
    """Run the chunks between ``edges``; return what was noted by request and layer."""
    noted = {(rid, layer): [] for rid in prompts for layer in range(SPEC.layers)}
    for start, end in pairwise(edges):
        for (rid, layer), parts in noted.items():
            step = shown(selector.needs, rid, prompts[rid], layer, start, end)
            if step is not None:
                parts.append(selector.update(step))
    return noted


def probe(selector, rid, prompt):
    if selector.needs.probes:
        for each in selector.probes(rid, list(range(END))):
            for layer in range(SPEC.layers):
                selector.observe(rid, each, prompt.probe_layer(each, layer))


def shown(needs, rid, prompt, *where):
    """Return the step that a selector with these needs sees, if any."""
    layer, start, end = where
    if not (needs.q_stream or needs.hidden):
        return None
    rows = prompt.queries[layer, :, start:end] if needs.q_stream else None
    hidden = prompt.hidden[layer, start:end] if needs.hidden else None
    return Step(rid=rid, layer=layer, start=start, queries=rows, hidden=hidden)


def collected(needs, prompt, layer, noted):
    tail = None
    if needs.q_tail:
        width = min(needs.q_tail, 10)
        tail = QueryTail(prompt.queries[layer, :, END - width :], END)
    noted = [part for part in noted if part is not None]
    return Seen(tail=tail, noted=torch.cat(noted, 1)[:, :OFFERED] if noted else None)


@pytest.fixture
def bound(make_services):
    """Return a function from a method and its options to a bound selector."""

    def make(name, options, order=None):
        selector = SELECTORS[name](3, **options)
        services = make_services(SPEC)
        if order is not None:
            services.weights = [weight[list(order)] for weight in services.weights]
        selector.bind(services)
        return selector

    return make


every_selector = pytest.mark.parametrize(("name", "options"), CASES)


@every_selector
@given(st.data())
@LENIENT
def test_kept_and_dropped_tokens_are_all_tokens_once(bound, name, options, data):
    seed = data.draw(st.integers(0, 3))
    scores = run(bound(name, options), {"r": drawn(seed)})["r"]
    kept = data.draw(st.integers(1, OFFERED))
    sinks = data.draw(st.integers(0, kept))
    recent = data.draw(st.integers(0, kept - sinks))
    protected = {*range(sinks), *range(OFFERED - recent, OFFERED)}
    for layer in scores:
        chosen = keep_indices(layer, Budget(OFFERED, kept, sinks, recent))
        dropped = residual_indices(chosen, OFFERED)
        assert chosen.shape == (SPEC.kv_heads, kept)
        for mine, theirs in zip(chosen.tolist(), dropped.tolist(), strict=True):
            assert mine == sorted(mine)
            assert sorted(mine + theirs) == list(range(OFFERED))
            assert protected <= set(mine)


@every_selector
def test_keeping_more_keeps_what_was_kept(bound, name, options):
    scores = run(bound(name, options), {"r": drawn()})["r"]
    for layer in scores:
        before = [set()] * SPEC.kv_heads
        for keep in (0.1, 0.25, 0.5, 0.75, 1.0):
            budget = budget_for(OFFERED, keep, 1, 2, PAGE)
            rows = [set(row) for row in keep_indices(layer, budget).tolist()]
            assert all(a < b for a, b in zip(before, rows, strict=True))
            before = rows
        assert before == [set(range(OFFERED))] * SPEC.kv_heads, "keep 1 is everything"


@every_selector
def test_scores_are_numbers_and_inputs_stay_as_they_are(bound, name, options):
    prompt = drawn()
    parts = (prompt.queries, prompt.keys, prompt.values, prompt.hidden)
    before = [part.clone() for part in parts]
    scores = run(bound(name, options), {"r": prompt})["r"]
    assert scores.shape == (SPEC.layers, SPEC.kv_heads, OFFERED)
    assert torch.isfinite(scores).all()
    for part, copy in zip(parts, before, strict=True):
        assert torch.equal(part, copy)


@every_selector
@given(st.permutations(range(4)))
@LENIENT
def test_the_order_of_requests_changes_nothing(bound, name, options, order):
    """Also not for equal requests, nor for those that share a selector's lifetime."""
    alone = {i: run(bound(name, options), {f"r{i}": drawn(i // 2)}) for i in range(4)}
    together = run(bound(name, options), {f"r{i}": drawn(i // 2) for i in order})
    for i in range(4):
        assert torch.equal(together[f"r{i}"], alone[i][f"r{i}"])
    if name != "random":  # the one that asks for the request's name
        assert torch.equal(together["r0"], together["r1"])


@every_selector
def test_a_closed_request_leaves_nothing_to_the_next(bound, name, options):
    selector = bound(name, options)
    first = run(selector, {"r": drawn(0)})["r"]
    run(selector, {"r": drawn(1)})
    assert torch.equal(run(selector, {"r": drawn(0)})["r"], first)


@every_selector
@given(st.permutations(range(3)), st.permutations(range(3, 6)))
@LENIENT
def test_query_heads_of_a_group_may_change_places(bound, name, options, one, two):
    prompt, order = drawn(), (*one, *two)
    turned = replace(prompt, queries=prompt.queries[:, list(order)], order=order)
    scores = run(bound(name, options, order), {"r": turned})["r"]
    wanted = run(bound(name, options), {"r": prompt})["r"]
    torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-6)


@every_selector
@given(st.sets(st.integers(1, END - 1), max_size=6))
@LENIENT
def test_the_cuts_of_a_prefill_change_nothing(bound, name, options, cuts):
    scores = run(bound(name, options), {"r": drawn()}, cuts)["r"]
    whole = run(bound(name, options), {"r": drawn()}, ())["r"]
    torch.testing.assert_close(scores, whole, rtol=1e-5, atol=1e-6)


@every_selector
def test_a_method_that_needs_no_keys_reads_none(bound, name, options):
    prompt, selector = drawn(), bound(name, options)
    nothing = torch.full_like(prompt.keys, torch.nan)
    wanted = run(bound(name, options), {"r": prompt})["r"]
    scores = run(selector, {"r": prompt}, scored_keys=nothing)["r"]
    assert torch.equal(scores, wanted) is not selector.needs.keys


@every_selector
@pytest.mark.parametrize("keep", [0.1, 0.5, 1.0])
def test_decoding_on_kept_tokens_is_dense_attention_with_a_mask(
    bound, make_services, name, options, keep
):
    """Kept keys are rotated at their original positions, never at their slots."""
    prompt, rope = drawn(), make_services(SPEC).rope
    scores = run(bound(name, options), {"r": prompt})["r"]
    budget = budget_for(OFFERED, keep, 1, 2, PAGE)
    for layer in range(SPEC.layers):
        chosen = keep_indices(scores[layer], budget)
        keys = prompt.keys[layer, :, :OFFERED]
        values = prompt.values[layer, :, :OFFERED].double()
        query = rope(prompt.queries[layer, :, :1], torch.tensor([END])).double()
        query = query.view(SPEC.kv_heads, -1, SPEC.head_dim)
        rows = chosen[..., None].expand(-1, -1, SPEC.head_dim)
        pruned = torch.nn.functional.scaled_dot_product_attention(
            query, rope(keys.gather(1, rows), chosen).double(), values.gather(1, rows)
        )
        everywhere = rope(keys, torch.arange(OFFERED)).double()
        mask = torch.full((SPEC.kv_heads, 1, OFFERED), -torch.inf)
        mask.scatter_(2, chosen[:, None], 0)
        logits = query @ everywhere.transpose(1, 2) / SPEC.head_dim**0.5
        dense = torch.softmax(logits + mask, dim=2) @ values
        torch.testing.assert_close(pruned, dense, rtol=1e-6, atol=1e-6)
