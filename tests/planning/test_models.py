"""Model shapes against published parameter counts and files written here."""

import json
from pathlib import Path

import pytest

from vericache_sglang.errors import ConfigError, UnsupportedError
from vericache_sglang.planning.models import CATALOGUE, find_model

ROOT = Path(__file__).parents[2]
SHAPE = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 100,
}


@pytest.fixture
def folder(tmp_path):
    def write(fields, **files):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        for name, value in files.items():
            (tmp_path / name.replace("__", ".")).write_text(value)
        return str(tmp_path)

    return write


@pytest.mark.parametrize(
    ("name", "params", "kv_bytes"),
    [
        ("llama-3.1-8b", 8_030_261_248, 131_072),
        ("llama-3.1-70b", 70_553_706_496, 327_680),
        ("mistral-small-24b", 23_572_403_200, 163_840),
        ("qwen3-8b", 8_190_735_360, 147_456),
        ("qwen3-14b", 14_768_307_200, 163_840),
        ("qwen3-32b", 32_762_123_264, 262_144),
    ],
)
def test_catalogue_meets_the_model_cards(name, params, kv_bytes):
    model = find_model(name)
    assert model.params == pytest.approx(params, rel=1e-5)  # QK norms are left out
    assert model.kv_bytes_per_token == kv_bytes
    assert model.weight_bytes == 2 * model.params


def test_names_do_not_care_about_case_and_unknown_ones_list_the_known():
    assert find_model("Qwen3-8B") == find_model("qwen3-8b")
    with pytest.raises(ConfigError) as error:
        find_model("qwen9")
    assert all(name in str(error.value) for name in CATALOGUE)


def test_demo_model_is_sized_by_its_file():
    folder = ROOT / "configs" / "demo-model"
    model = find_model(str(folder))
    assert model.kv_bytes_per_token == 2 * 4 * 2 * 64 * 4  # float32
    assert model.weight_bytes == (folder / "model.safetensors").stat().st_size


def test_params_counted_by_hand(folder):
    # Per layer: q and o 32x32, k and v 32x16, three of 32x64, two norms of 32.
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 64
    untied = find_model(folder(SHAPE))
    assert untied.params == 2 * layer + 2 * 3200 + 32
    tied = find_model(folder({**SHAPE, "tie_word_embeddings": True}))
    assert untied.params - tied.params == 3200
    assert untied.head_dim == 8
    assert untied.kv_bytes_per_token == 2 * 2 * 2 * 8 * 2


def test_index_wins_over_the_estimate(folder):
    index = json.dumps({"metadata": {"total_size": 12_345}})
    name = folder(SHAPE, model__safetensors__index__json=index)
    assert find_model(name).weight_bytes == 12_345


def test_multimodal_configs_are_read_one_level_down(folder):
    assert find_model(folder({"text_config": SHAPE})).layers == 2


@pytest.mark.parametrize("field", sorted(set(SHAPE) - {"num_key_value_heads"}))
def test_a_missing_field_is_named(folder, field):
    fields = {name: value for name, value in SHAPE.items() if name != field}
    with pytest.raises(ConfigError, match=field):
        find_model(folder(fields))


@pytest.mark.parametrize(
    ("extra", "words"),
    [({"kv_lora_rank": 512}, "kv_lora_rank"), ({"num_experts": 8}, "index.json")],
    ids=["mla", "moe"],
)
def test_other_architectures_are_refused(folder, extra, words):
    with pytest.raises(UnsupportedError, match=words):
        find_model(folder({**SHAPE, **extra}))


def test_a_strange_file_is_named(folder):
    name = folder([1])
    with pytest.raises(ConfigError, match=r"config\.json is not a JSON object"):
        find_model(name)
    with pytest.raises(ConfigError, match="torch_dtype"):
        find_model(folder({**SHAPE, "torch_dtype": "float8"}))
