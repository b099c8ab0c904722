"""What holds for every selector of ours, whatever it looks at."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vericache_sglang.compression import catalog, chunks, kvzip
from vericache_sglang.compression.base import (
    NOTHING,
    SELECTORS,
    ModelSpec,
    ProbeLayer,
    QueryTail,
    Seen,
    Step,
)
from vericache_sglang.errors import CompressionError

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
@pytest.mark.parametrize("elements", [1, 7 * 4 * END])
def test_intermediates_of_any_size_give_the_same_scores(
    bound, name, options, elements, monkeypatch
):
    wanted = run(bound(name, options), {"r": drawn()})["r"]
    monkeypatch.setattr(chunks, "HOST_ELEMENTS", elements)
    monkeypatch.setattr(kvzip, "CACHED_ELEMENTS", elements)
    scores = run(bound(name, options), {"r": drawn()})["r"]
    torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-6)


STREAMED = pytest.mark.parametrize("name", ["expected-attention", "observed"])


@STREAMED
def test_a_prefill_that_begins_again_forgets_the_first_attempt(bound, name):
    selector, steps = bound(name, {}), []
    for seed, starts in ((1, (0,)), (0, (8, 20))):
        for start, end in pairwise([*starts, END]):
            rows = drawn(seed).queries[0, :, start:end]
            steps.append(Step(rid="r", layer=0, start=start, queries=rows))

    def scores(selector, steps):
        selector.open("r")
        for step in steps:
            assert selector.update(step) is None
        keys, values = drawn().keys[0], drawn().values[0]
        return selector.scores("r", 0, keys, values, NOTHING)

    again = scores(selector, steps)
    assert torch.equal(again, scores(bound(name, {}), steps[1:]))
    assert not torch.equal(again, run(bound(name, {}), {"r": drawn()})["r"][0])


@STREAMED
def test_what_was_not_run_or_is_closed_is_refused(bound, name):
    selector, keys = bound(name, {}), drawn().keys[0]
    selector.close("never opened")
    selector.open("r")
    with pytest.raises(CompressionError, match="a step without queries"):
        selector.update(Step(rid="r", layer=0, start=0))
    for _ in range(2):
        with pytest.raises(CompressionError, match="no query of the prompt was run"):
            selector.scores("r", 0, keys, keys, NOTHING)
        selector.open("r")
        selector.update(Step(rid="r", layer=0, start=0, queries=drawn().queries[0]))
        selector.close("r")
