"""What a server's flags make of the store: whose KV, which folder, which key."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sample_segments import whole_of

from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.errors import ConfigError
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.prefix_cache.store.opening import (
    FOLDER_VARIABLE,
    fingerprint_of,
    identity_of,
    open_store,
)

pytestmark = pytest.mark.sglang

GEOMETRY = KVGeometry(
    layers=2, kv_heads=2, head_dim=4, v_head_dim=6, element_bytes=2, page_size=16
)
CONFIG = VeriCacheConfig()


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def arguments(model, extra=None, **changed):
    """SGLang's server arguments, as far as the store reads them."""
    return SimpleNamespace(
        **{
            "model_path": str(model),
            "served_model_name": str(model),
            "revision": None,
            "dtype": "bfloat16",
            "device": "cpu",
            "quantization": None,
            "tp_size": 1,
            "hicache_storage_backend": "file",
            "hicache_storage_backend_extra_config": extra,
            **changed,
        }
    )


def print_of(model, config=CONFIG, rank=0, **changed):
    given = arguments(model, **changed)
    found = fingerprint_of(GEOMETRY, torch.bfloat16, config, given)
    return replace(found, tp_rank=rank)


def opened(model, extra, config=CONFIG):
    given = arguments(model, extra)
    return open_store(given, config, print_of(model, config))


def test_the_same_model_elsewhere_is_the_same(model, tmp_path):
    copy = tmp_path / "copy"
    model.rename(copy)
    moved = print_of(copy)
    copy.rename(model)
    assert print_of(model) == moved
    assert print_of(model).kv_dtype == "bfloat16"


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "float16"},
        {"device": "cuda"},
        {"quantization": "fp8"},
        {"served_model_name": "tuned"},
        {"tp_size": 2},
        {"tp_size": 2, "rank": 1},
    ],
)
def test_what_makes_other_kv_makes_another_fingerprint(model, changed):
    assert print_of(model, **changed).short != print_of(model).short
    if "rank" in changed:
        assert print_of(model, **changed).short != print_of(model, tp_size=2).short


def test_a_model_that_is_nowhere_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--model-path"):
        print_of(tmp_path / "absent")


def test_a_key_is_part_of_whose_kv_it_is(model, tmp_path):
    file = tmp_path / "key"
    file.write_bytes(b"k" * 32)
    file.chmod(0o600)
    keyed = print_of(model, VeriCacheConfig(store_key=str(file)))
    assert keyed == replace(print_of(model), key=b"k" * 32)
    assert keyed.short != print_of(model).short


@pytest.mark.parametrize("how", ["text", "file", "variable"])
def test_the_folder_is_where_sglangs_flags_say(model, tmp_path, monkeypatch, how):
    folder, extra = tmp_path / "store", json.dumps({"directory": f"{tmp_path}/store"})
    if how == "file":
        (tmp_path / "extra.json").write_text(extra)
        extra = f"@{tmp_path}/extra.json"
    if how == "variable":
        monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
        extra = None
    assert opened(model, extra).put("name", whole_of(1))
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    ("extra", "wanted"),
    [
        ("[]", r"extra-config: wanted a JSON object.*\[\]"),
        ("{", r"extra-config: wanted a JSON object"),
        ("@/absent.json", r"extra-config.*absent"),
        (None, r"--hicache-storage-backend file.*directory"),
        ('{"directory": 7}', r"--hicache-storage-backend file.*directory, got 7"),
    ],
)
def test_a_configuration_that_says_nothing_is_refused(
    model, monkeypatch, extra, wanted
):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=wanted):
        opened(model, extra)


def test_a_folder_of_many_users_needs_its_flag(model, tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(0o777)
    extra = json.dumps({"directory": str(folder)})
    with pytest.raises(ConfigError, match="--vericache-store-shared-folder on"):
        opened(model, extra)
    shared = VeriCacheConfig(store_shared_folder="on")
    assert opened(model, extra, shared).put("name", whole_of(1))


def test_draft_kv_is_another_by_method_share_and_options():
    configs = [CONFIG, CONFIG.model_copy(update={"keep": 0.5})]
    lines = ["keynorm", "kvzip", "kvzip:chunk=64"]
    assert len({identity_of(line, each) for line in lines for each in configs}) == 6
