"""KVzap against loops in float64, its threshold, its checkpoints and their errors."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from vericache_sglang.compression.base import NOTHING, ModelSpec, Seen, Step
from vericache_sglang.compression.budget import Budget, keep_indices
from vericache_sglang.compression.kvzap import KVzap
from vericache_sglang.compression.kvzap_weights import (
    AffineLayer,
    Scorer,
    read_weights,
    write_weights,
)
from vericache_sglang.errors import CompressionError

DEMO = Path(__file__).parents[2] / "configs" / "demo-model"
SPEC = ModelSpec(
    layers=2, query_heads=4, kv_heads=2, head_dim=8, hidden_size=12, name="tiny"
)


def drawn_layers(width, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def affine(rows, columns):
        return AffineLayer(
            torch.randn(rows, columns, generator=generator),
            torch.randn(rows, generator=generator),
        )

    if width is None:
        return [Scorer(affine(2, 12)) for _ in range(2)]
    return [Scorer(affine(2, width), affine(width, 12)) for _ in range(2)]


def drawn_hidden(tokens, seed=1):
    return torch.randn(tokens, 12, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [None, 5])
def test_a_rank_scores_its_own_heads(width, tmp_path, make_services):
    """As where all heads are on one rank, each rank its rows."""
    write_weights(tmp_path / "w", drawn_layers(width), {})
    hidden = drawn_hidden(7)
    step = Step(rid="a", layer=1, start=0, queries=torch.zeros(2, 7, 8), hidden=hidden)

    def scores(**spec):
        selector = KVzap(weights=str(tmp_path / "w"))
        selector.bind(make_services(replace(SPEC, **spec)))
        return selector.update(step)

    whole = scores()
    for rank in (0, 1):
        own = scores(kv_heads=1, query_heads=2, all_kv_heads=2, first_kv_head=rank)
        torch.testing.assert_close(own, whole[rank : rank + 1])


@pytest.fixture
def make(tmp_path, make_services):
    """Return a function that writes a checkpoint and binds a selector to it."""

    def bound(width=None, **options):
        folder = tmp_path / f"kvzap-{width}"
        write_weights(folder, drawn_layers(width), {})
        selector = KVzap(weights=str(folder), **options)
        selector.bind(make_services(SPEC))
        return selector

    return bound


def update(selector, hidden, layer=1, start=0):
    return selector.update(Step(rid="r", layer=layer, start=start, hidden=hidden))


def rows(affine, x):
    return [
        math.fsum(w * v for w, v in zip(row, x, strict=True)) + bias
        for row, bias in zip(affine.weight.tolist(), affine.bias.tolist(), strict=True)
    ]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("width", [None, 1, 5])
def test_scores_equal_loops_in_float64(make, width, layer):
    hidden = drawn_hidden(9)
    scorer = drawn_layers(width)[layer]
    wanted = []
    for x in hidden.tolist():
        if scorer.inner is not None:
            x = [v / 2 * (1 + math.erf(v / 2**0.5)) for v in rows(scorer.inner, x)]
        wanted.append(rows(scorer.final, x))
    scores = update(make(width), hidden, layer)
    assert scores.dtype == torch.float32
    assert scores.shape == (2, 9)
    for token, heads in enumerate(wanted):
        assert scores[:, token].tolist() == pytest.approx(heads, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_scored_in_float32(make, dtype):
    hidden = drawn_hidden(50).to(dtype)
    scores = update(make(5), hidden)
    torch.testing.assert_close(scores, update(make(5), hidden.float()))
    assert len(scores.unique()) > 90, "no scores rounded onto each other"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("width", [None, 5])
def test_a_gpu_scores_half_precision_inputs_as_a_cpu_does(make, width):
    hidden = drawn_hidden(50).bfloat16()
    scores = update(make(width), hidden.cuda())
    assert scores.is_cuda
    assert scores.dtype == torch.float32
    wanted = update(make(width), hidden)
    torch.testing.assert_close(scores.cpu(), wanted, rtol=2e-2, atol=5e-2)
    assert len(scores.unique()) > 90, "no scores rounded onto each other"


@given(data=st.data(), width=st.sampled_from([None, 5]))
def test_a_score_depends_on_its_token_alone(data, width):
    scorer = drawn_layers(width)[0]
    hidden = drawn_hidden(data.draw(st.integers(1, 40)))
    whole = scorer.score(hidden)
    order = torch.tensor(data.draw(st.permutations(range(len(hidden)))))
    torch.testing.assert_close(scorer.score(hidden[order]), whole[:, order])
    cuts = data.draw(st.lists(st.integers(1, 7), min_size=40, max_size=40))
    parts, start = [], 0
    for cut in cuts:
        if start < len(hidden):
            parts.append(scorer.score(hidden[start : start + cut]))
            start += cut
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_the_best_scores_are_kept_and_the_unscored_before_them(make):
    selector, keys = make(), torch.zeros(2, 6, 8)
    noted = torch.tensor([[1.0, 5, math.nan, 4, -9, 2], [0, 1, 2, 3, math.nan, 5]])
    before = noted.clone()
    scores = selector.scores("r", 0, keys, keys, Seen(noted=noted))
    assert torch.equal(noted.nan_to_num(7), before.nan_to_num(7)), "not modified"
    one, three = (keep_indices(scores, Budget(6, kept, 0, 0)) for kept in (1, 3))
    assert one.tolist() == [[2], [4]]
    assert three.tolist() == [[1, 2, 3], [3, 4, 5]]


def test_without_a_threshold_the_configured_share_is_kept(make):
    assert make().keep_share([torch.zeros(2, 5)]) is None


def test_a_threshold_keeps_the_mean_share_at_or_above_it(make):
    noted = [
        torch.tensor([[-5.0, -4, -3, -2], [-4, -4, -9, -9]]),  # 3 of 4, 2 of 4
        torch.tensor([[math.nan, -9, -9, -9], [0, 0, 0, math.inf]]),  # 1 and 4 of 4
    ]
    assert make(threshold=-4.0).keep_share(noted) == pytest.approx(10 / 16)


def test_what_was_never_scored_is_all_kept(make):
    selector = make(threshold=-4.0)
    assert selector.keep_share([]) == 1
    assert selector.keep_share([torch.full((2, 5), math.nan)]) == 1


@given(
    st.lists(
        st.lists(st.floats(width=32), min_size=8, max_size=8), min_size=1, max_size=4
    ),
    st.lists(st.floats(allow_nan=False), min_size=2, max_size=2),
)
def test_a_share_is_valid_falls_with_the_threshold_and_is_one_at_minus_infinity(
    entries, thresholds
):
    noted = [torch.tensor(layer).view(2, 4) for layer in entries]
    low, high = (KVzap(threshold=x).keep_share(noted) for x in sorted(thresholds))
    assert 0 < high <= low <= 1
    assert KVzap(threshold=-math.inf).keep_share(noted) == 1


@pytest.mark.parametrize("width", [None, 5])
def test_a_checkpoint_survives_writing_and_reading(tmp_path, width):
    layers = drawn_layers(width)
    weights = write_weights(tmp_path / "new" / "folder", layers, {"training": {"n": 1}})
    assert (weights.input_dim, weights.output_dim) == (12, 2)
    for ours, read in zip(layers, weights.layers, strict=True):
        assert read.width == width
        for name, tensor in ours.named().items():
            assert torch.equal(read.named()[name], tensor)
    config = json.loads((weights.path / "config.json").read_text())
    assert config["hidden_dim"] == width
    assert config["training"] == {"n": 1}


def test_names_and_configs_are_the_published_ones(tmp_path):
    """Files written by hand, as kvpress' ``KVzapModel`` saves them, in bfloat16."""
    sizes = {"input_dim": 12, "output_dim": 2, "n_modules": 1, "model_type": "kvzap"}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "hidden_dim": 5}))
    names = {
        "layers.0.0.weight": (5, 12),
        "layers.0.0.bias": (5,),
        "layers.0.2.weight": (2, 5),
        "layers.0.2.bias": (2,),
    }
    tensors = {n: torch.randn(shape).bfloat16() for n, shape in names.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    layer = read_weights(tmp_path).layers[0]
    assert torch.equal(layer.final.weight, tensors["layers.0.2.weight"].float())
    (tmp_path / "config.json").write_text(json.dumps(sizes))  # no null is written
    tensors = {"layers.0.weight": torch.randn(2, 12), "layers.0.bias": torch.randn(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    layer = read_weights(tmp_path).layers[0]
    assert layer.inner is None
    assert torch.equal(layer.final.weight, tensors["layers.0.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_modules": 3}, r"safetensors: field 'layers.2.2.weight' is missing"),
        ({"n_modules": 1}, r"safetensors: field 'layers.1.0.bias' is not one of the 1"),
        ({"hidden_dim": None}, r"field 'layers.0.weight' is missing.*layers.0.0.bias"),
        ({"hidden_dim": 6}, r"'layers.0.2.weight' must be floats \[2, 6\].*\[2, 5\]"),
        ({"input_dim": 13}, r"'layers.0.0.weight' must be floats \[5, 13\]"),
        ({"output_dim": 3}, r"'layers.0.2.weight' must be floats \[3, 5\]"),
        ({"output_dim": 0}, r"config.json: field 'output_dim' must be .*>= 1, is 0"),
        ({"input_dim": "12"}, r"config.json: field 'input_dim' must be .*, is '12'"),
        ({"input_dim": None}, r"config.json: field 'input_dim' must be .*, is None"),
        ({"hidden_dim": -1}, r"config.json: field 'hidden_dim' must be .*, is -1"),
        ({"n_modules": True}, r"config.json: field 'n_modules' must be .*, is True"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, change, message):
    write_weights(tmp_path, drawn_layers(5), {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CompressionError, match=message):
        KVzap(weights=str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1]", "\x80"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, text):
    write_weights(tmp_path, drawn_layers(5), {})
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CompressionError, match=r"config.json: (not JSON|must be a)"):
        read_weights(tmp_path)


def test_a_config_of_another_model_names_the_missing_field():
    with pytest.raises(CompressionError, match=r"json: field 'input_dim'.*is missing"):
        read_weights(DEMO)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, dtype=torch.int32), r"must be floats \[2\], is torch.int32"),
        (torch.tensor([0, math.nan]), "holds NaN or infinities"),
        (torch.tensor([0, -math.inf]), "holds NaN or infinities"),
    ],
)
def test_a_field_that_is_no_finite_number_is_refused(tmp_path, tensor, message):
    write_weights(tmp_path, drawn_layers(None), {})
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "layers.1.bias": tensor}, path)
    with pytest.raises(CompressionError, match=rf"'layers.1.bias' {message}"):
        read_weights(tmp_path)


def test_files_that_are_missing_or_truncated_are_refused(tmp_path):
    missing = tmp_path / "nowhere"
    with pytest.raises(CompressionError, match=r"nowhere/config\.json: cannot be read"):
        KVzap(weights=str(missing))
    write_weights(tmp_path, drawn_layers(5), {})
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CompressionError, match=r"model\.safetensors: truncated"):
            read_weights(tmp_path)
    path.unlink()
    with pytest.raises(CompressionError, match=r"model\.safetensors: cannot be read"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("field", "size", "message"),
    [
        ("hidden_size", 16, "'input_dim' is 12, but the hidden size of tiny is 16"),
        ("kv_heads", 4, "'output_dim' is 2, but the KV heads of tiny is 4"),
        ("layers", 3, "'n_modules' is 2, but the layers of tiny is 3"),
    ],
)
def test_weights_of_another_model_are_refused(
    tmp_path, make_services, field, size, message
):
    write_weights(tmp_path, drawn_layers(5), {})
    sizes = {name: getattr(SPEC, name) for name in ModelSpec.__dataclass_fields__}
    services = make_services(ModelSpec(**{**sizes, field: size}))
    with pytest.raises(CompressionError, match=rf"config\.json: {message}"):
        KVzap(weights=str(tmp_path)).bind(services)


def test_what_is_missing_is_named(make, make_services):
    with pytest.raises(CompressionError, match=r"'weights' must name .* on tiny"):
        KVzap().bind(make_services(SPEC))
    with pytest.raises(CompressionError, match="attention inputs are missing"):
        update(make(), None)
    with pytest.raises(CompressionError, match="bind was not called"):
        update(KVzap(), drawn_hidden(3))
    keys = torch.zeros(2, 3, 8)
    with pytest.raises(CompressionError, match="scores are missing"):
        make().scores("r", 0, keys, keys, NOTHING)
