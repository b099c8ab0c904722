"""Every token dropper against kvpress, run on the same tiny models.

Tolerances are those of float32 sums in another order. The prompts fill whole pages, and
counts are chosen so that kvpress' ``int(T * (1 - ratio))`` is the exact product.
"""

import pytest
import torch
from hf_runtime import TOKENS, attention_weights, drive, empty_cache
from tiny_models import AFTER, BEFORE, NAMES, TEMPLATE

from vericache_sglang.compression import kvzip
from vericache_sglang.compression.budget import Budget, keep_indices
from vericache_sglang.compression.expected_attention import ExpectedAttention
from vericache_sglang.compression.keynorm import KeyNorm
from vericache_sglang.compression.kvzap import KVzap
from vericache_sglang.compression.kvzap_weights import (
    AffineLayer,
    Scorer,
    write_weights,
)
from vericache_sglang.compression.kvzip import KVzip
from vericache_sglang.compression.observed import Observed
from vericache_sglang.compression.recency import Recency
from vericache_sglang.compression.snapkv import SnapKV

KEPT = TOKENS // 2
RELATIVE = 1e-5

models = pytest.mark.parametrize("name", NAMES)


@torch.inference_mode()
def theirs(press, prompt, attentions=None):
    """Ask a press for its scores of every layer, without its hooks."""
    scores = []
    for index, run in enumerate(prompt.layers):
        weights = None if attentions is None else attentions[index][None]
        found = press.score(
            prompt.attention(index),
            run.hidden[None],
            run.keys[None],
            run.values[None],
            weights,
            {"position_embeddings": run.embeddings},
        )
        scores.append(found[0])
    return scores


def assert_same_scores(ours, wanted, rel=RELATIVE):
    for layer, (mine, found) in enumerate(zip(ours, wanted, strict=True)):
        worst = ((mine - found).abs() / found.abs()).max().item()
        assert worst <= rel, f"layer {layer}: relative error {worst:.2e}"


def assert_same_kept(ours, wanted, kept=KEPT, sinks=0):
    """Compare what our rule keeps with what the highest of their scores are."""
    for mine, found in zip(ours, wanted, strict=True):
        index = keep_indices(mine, Budget(TOKENS, kept, sinks, 0))
        held = torch.zeros_like(found, dtype=torch.bool).scatter_(1, index, True)
        cut = found.sort(dim=1, descending=True).values[:, kept - 1 : kept + 1]
        # Between these two, rounding decides.
        above = found > cut[:, :1] * (1 + 1e-5)
        below = found < cut[:, 1:] * (1 - 1e-5)
        assert bool(held[above].all())
        assert not bool(held[below].any())
        assert int((~above & ~below).sum()) <= 4 * len(found), "the scores are flat"


def jaccard(mine, found):
    """Return the overlap of two choices of half, the smallest of the heads."""
    sets, tokens = [], mine.shape[1]
    for scores in (mine, found):
        index = keep_indices(scores, Budget(tokens, tokens // 2, 0, 0))
        sets.append(torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, index, 1))
    both, either = (sets[0] & sets[1]).sum(1), (sets[0] | sets[1]).sum(1)
    return float((both / either).min())


def spearman(mine, found):
    """Return the rank correlation, the smallest of the heads."""
    ranks = torch.stack(
        [scores.float().argsort(dim=1).argsort(dim=1) for scores in (mine, found)], 1
    )
    return min(float(torch.corrcoef(pair)[0, 1]) for pair in ranks.float())


def test_transformers_stays_as_it_was(presses):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    wrapped = [
        name
        for name, function in ALL_ATTENTION_FUNCTIONS.items()
        if function.__module__.startswith("kvpress")
    ]
    assert wrapped == []


@models
@pytest.mark.parametrize("window", [16, 64])
def test_snapkv_scores_as_kvpress_does(presses, prompts, name, window):
    prompt = prompts(name)
    ours = drive(SnapKV(), prompt, window=window)
    wanted = theirs(presses.SnapKVPress(window_size=window), prompt)
    # In the window kvpress has one value for all; ours ascends. Both are the highest.
    assert all(bool((each[:, -window:] > 1).all()) for each in (*ours, *wanted))
    assert_same_kept(ours, wanted)
    parted = [[each[:, :-window] for each in side] for side in (ours, wanted)]
    assert_same_scores(*parted)


@models
@pytest.mark.parametrize("pooling", [1, 7])
def test_snapkv_pools_as_kvpress_does(presses, prompts, name, pooling):
    prompt = prompts(name)
    ours = drive(SnapKV(pooling=pooling), prompt)
    wanted = theirs(presses.SnapKVPress(kernel_size=pooling), prompt)
    assert_same_scores([s[:, :-64] for s in ours], [s[:, :-64] for s in wanted])


OPTIONS = {
    "default": ({}, {}),
    "mean-alone": ({"covariance": False}, {"use_covariance": False}),
    "attention-alone": ({"value_norm": False}, {"use_vnorm": False}),
    "epsilon": ({"epsilon": 0.01}, {"epsilon": 0.01}),
    "near-future": ({"future": 7}, {"n_future_positions": 7}),
    "no-sinks": ({"sinks": 0}, {"n_sink": 0}),
}


@models
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_expected_attention_scores_as_kvpress_does(presses, prompts, name, options):
    prompt, (mine, other) = prompts(name), options
    ours = drive(ExpectedAttention(**mine), prompt)
    wanted = theirs(presses.ExpectedAttentionPress(**other), prompt)
    assert_same_scores(ours, wanted)
    assert_same_kept(ours, wanted)


@models
def test_key_norms_are_those_of_kvpress(presses, prompts, name):
    prompt = prompts(name)
    assert_same_scores(drive(KeyNorm(), prompt), theirs(presses.KnormPress(), prompt))


@models
def test_observed_attention_is_the_mean_that_kvpress_takes(presses, prompts, name):
    # kvpress reads the weights of the forward; 512 votes are all 300 queries of ours.
    # Its mean is over the queries that could see a token: our option, not H2O's sum.
    prompt = prompts(name)
    ours = drive(Observed(mean=True), prompt)
    wanted = theirs(presses.ObservedAttentionPress(), prompt, attention_weights(prompt))
    assert_same_scores(ours, wanted)
    assert_same_kept(ours, wanted)


def test_recency_keeps_what_kvpress_streams(presses, prompts):
    prompt = prompts("llama")
    wanted = theirs(presses.StreamingLLMPress(compression_ratio=0.5, n_sink=4), prompt)
    for mine, found in zip(drive(Recency(), prompt), wanted, strict=True):
        index = keep_indices(mine, Budget(TOKENS, KEPT, 4, 0))
        assert torch.equal(index[0], found[0].nonzero()[:, 0])


@models
@pytest.mark.parametrize("method", ["snapkv", "expected"])
def test_our_rule_keeps_the_tokens_kvpress_leaves_in_the_cache(
    presses, prompts, name, method
):
    press, selector = {
        "snapkv": (presses.SnapKVPress(0.5), SnapKV()),
        "expected": (presses.ExpectedAttentionPress(0.5), ExpectedAttention()),
    }[method]
    prompt, cache = prompts(name), empty_cache(prompts(name).model)
    with torch.inference_mode(), press(prompt.model):
        # transformers 5.12 gives hooks no cache_position unless the caller does.
        prompt.model(
            input_ids=prompt.ids[None],
            past_key_values=cache,
            cache_position=torch.arange(TOKENS),
        )
    for index, scores in enumerate(drive(selector, prompt)):
        left, whole = cache.layers[index].keys[0], prompt.layers[index].keys
        # They are in the order of their scores: find each key in the whole cache.
        found = torch.cdist(left, whole).argmin(2).sort(dim=1).values
        assert torch.equal(found, keep_indices(scores, Budget(TOKENS, KEPT, 0, 0)))


class KVzipOracle:
    """A ``KVzipPress`` that ran; its own scores are gone by the time it returns."""

    def __init__(self, presses, prompt, **options):
        class Keeping(presses.KVzipPress):
            def compress_post(self, model):
                self.before = self.score_val[:, 0].clone()
                super().compress_post(model)
                self.after = self.score_val[:, 0].clone()

        press = Keeping(compression_ratio=0.6, **options)
        with torch.inference_mode(), press(prompt.model):
            prompt.model(
                input_ids=prompt.ids[None], past_key_values=empty_cache(prompt.model)
            )
        self.scores, self.final = press.before, press.after
        self.removed = torch.zeros_like(self.scores, dtype=torch.bool)
        for index, layer in enumerate(prompt.model.model.layers):
            _, heads, places = layer.self_attn.__dict__.pop("masked_key_indices")
            self.removed[index, heads, places] = True


@pytest.fixture
def same_request(monkeypatch):
    """Have our probes ask in kvpress' words: without the official trailing space."""
    monkeypatch.setattr(kvzip, "REPEAT_PART", kvzip.REPEAT_PART.rstrip())


@models
@pytest.mark.parametrize("plus", [False, True], ids=["plain", "plus"])
@pytest.mark.parametrize("size", [(2048, TOKENS), (128, TOKENS), (5, 23)], ids=str)
@pytest.mark.usefixtures("same_request")
def test_kvzip_scores_as_kvpress_does(presses, prompts, name, plus, size):
    # A chunk of 5 is shorter than the 8 tokens that lead into the next one.
    chunk, tokens = size
    prompt = prompts(name, tokens=tokens)
    oracle = KVzipOracle(
        presses, prompt, kvzip_plus_normalization=plus, chunk_size=chunk
    )
    ours = drive(KVzip(chunk=chunk, plus=plus), prompt)
    assert_same_scores(ours, oracle.scores)


@models
@pytest.mark.usefixtures("same_request")
def test_kvzip_behind_a_chat_template_scores_as_kvpress_does(presses, prompts, name):
    # kvpress drops a template's tokens first, unless they are sinks; ours always are.
    prompt = prompts(name, template=TEMPLATE)
    oracle = KVzipOracle(presses, prompt, n_sink=len(BEFORE), chunk_size=128)
    ours = drive(KVzip(chunk=128, prefix=len(BEFORE), suffix=AFTER), prompt)
    context = [
        [each[:, len(BEFORE) :] for each in side] for side in (ours, oracle.scores)
    ]
    assert_same_scores(*context)
    assert not bool(oracle.removed[:, :, : len(BEFORE)].any())
    assert all(
        bool((each[:, : len(BEFORE)] > each[:, len(BEFORE) :].max()).all())
        for each in ours
    )


@models
@pytest.mark.parametrize("layerwise", [False, True], ids=["global", "layerwise"])
@pytest.mark.usefixtures("same_request")
def test_kvzip_removes_what_kvpress_removes(presses, prompts, name, layerwise):
    # Counts per head are theirs: equal counts are our budget's rule, not KVzip's.
    prompt = prompts(name)
    oracle = KVzipOracle(presses, prompt, chunk_size=128, layerwise=layerwise)
    ours = torch.stack(drive(KVzip(chunk=128), prompt))
    ours[:, :, :4] = torch.inf
    groups = ours.flatten(1) if layerwise else ours.flatten()[None]
    lowest = groups.argsort(dim=1)[:, : int(groups.shape[1] * 0.6)]
    removed = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, lowest, True)
    assert torch.equal(removed.view(ours.shape), oracle.removed)


@pytest.fixture(params=[None, 48], ids=["linear", "mlp"])
def kvzap(request, presses, tmp_path):
    """Return a function from a prompt to kvpress' KVzap press and a saved folder."""

    def make(prompt):
        config = prompt.model.config
        torch.manual_seed(5)
        regressors = presses.KVzapModel(
            presses.KVzapConfig(
                input_dim=config.hidden_size,
                output_dim=config.num_key_value_heads,
                n_modules=config.num_hidden_layers,
                hidden_dim=request.param,
            )
        )
        regressors.save_pretrained(tmp_path)
        press = presses.KVzapPress(model_type="mlp" if request.param else "linear")
        # The name it would download; it does not where it has that already.
        base = config.name_or_path.split("/")[-1]
        press.kvzap_model_name = f"nvidia/KVzap-{press.model_type}-{base}"
        press.kvzap_model = regressors
        return press, tmp_path

    return make


@models
def test_kvzap_reads_kvpress_checkpoints_and_scores_alike(prompts, name, kvzap):
    prompt = prompts(name)
    press, folder = kvzap(prompt)
    ours = drive(KVzap(weights=str(folder)), prompt)
    for mine, found in zip(ours, theirs(press, prompt), strict=True):
        assert (mine - found).abs().max() <= 1e-5


@models
@pytest.mark.parametrize("window", [0, 128])
def test_kvzap_drops_below_a_threshold_what_kvpress_masks(
    presses, prompts, name, kvzap, window
):
    prompt, threshold = prompts(name), 0.05
    press, folder = kvzap(prompt)
    dropping = presses.DMSPress(press, threshold, sliding_window_size=window)
    modules = [prompt.attention(index) for index in range(len(prompt.layers))]
    for module in modules:
        module.masked_key_indices = None  # as kvpress' own attention does at a prefill
    with torch.inference_mode(), dropping(prompt.model):
        prompt.model(
            input_ids=prompt.ids[None],
            past_key_values=empty_cache(prompt.model),
            cache_position=torch.arange(TOKENS),
        )
    selector = KVzap(weights=str(folder), threshold=threshold)
    ours = drive(selector, prompt)
    for mine, module in zip(ours, modules, strict=True):
        _, heads, places = module.__dict__.pop("masked_key_indices")
        masked = torch.zeros_like(mine, dtype=torch.bool)
        masked[heads, places] = True
        below = mine < threshold
        below[:, TOKENS - window :] = False  # the runtime's recent tokens
        assert torch.equal(masked, below)
    if window == 0:
        share = selector.keep_share(ours)
        assert share == pytest.approx(1 - dropping.compression_ratio, abs=1e-12)
        assert 0.1 < share < 0.9


@pytest.mark.parametrize("width", [None, 24], ids=["linear", "mlp"])
def test_kvpress_loads_the_checkpoints_we_write(presses, tmp_path, width):
    generator = torch.Generator().manual_seed(3)

    def affine(outputs, inputs):
        return AffineLayer(
            torch.randn(outputs, inputs, generator=generator),
            torch.randn(outputs, generator=generator),
        )

    layers = [
        Scorer(affine(2, width or 16), affine(width, 16) if width else None)
        for _ in range(3)
    ]
    write_weights(tmp_path, layers, {})
    loaded = presses.KVzapModel.from_pretrained(tmp_path)
    hidden = torch.randn(5, 16, generator=generator)
    for layer, theirs_ in zip(layers, loaded.layers, strict=True):
        found = theirs_(hidden)
        inner = hidden
        if layer.inner is not None:
            inner = inner @ layer.inner.weight.t() + layer.inner.bias
            inner = 0.5 * inner * (1 + torch.erf(inner / 2**0.5))
        mine = inner @ layer.final.weight.t() + layer.final.bias
        assert torch.allclose(mine, found, atol=1e-5)


@pytest.mark.usefixtures("same_request")
def test_in_bfloat16_both_keep_nearly_the_same(presses, prompts):
    # kvpress takes softmaxes in the model's type, we in float32: ranks differ a little.
    prompt = prompts("llama", dtype=torch.bfloat16)
    pairs = {
        "snapkv": (drive(SnapKV(), prompt), theirs(presses.SnapKVPress(), prompt)),
        "expected-attention": (
            drive(ExpectedAttention(), prompt),
            theirs(presses.ExpectedAttentionPress(), prompt),
        ),
        "kvzip": (drive(KVzip(), prompt), list(KVzipOracle(presses, prompt).scores)),
    }
    for method, (ours, wanted) in pairs.items():
        # Without SnapKV's window, where kvpress has ties.
        end = TOKENS - 64 if method == "snapkv" else TOKENS
        for mine, found in zip(ours, wanted, strict=True):
            mine, found = mine[:, :end], found[:, :end]
            assert jaccard(mine, found) >= 0.9, method
            assert spearman(mine, found) >= 0.98, method
