"""The memory ledger and SGLang's own sizing, for the same arguments of a GPU server."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang

from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops  # noqa: E402

define_missing_ops()

from cuda_server import resolved  # noqa: E402
from sglang.srt.arg_groups.memory_hook import reserve_for_graph_mb  # noqa: E402
from sglang.srt.mem_cache import kv_cache_configurator as configurator  # noqa: E402

from vericache_patches.mem_cache_kv_cache_budget import (  # noqa: E402
    profile_available_bytes,
)
from vericache_sglang.config.schema import (  # noqa: E402
    VeriCacheConfig,
    resolve_staging,
)
from vericache_sglang.errors import ConfigError  # noqa: E402
from vericache_sglang.planning.memory import GIB, MIB, ledger  # noqa: E402
from vericache_sglang.planning.memory_rows import Phase  # noqa: E402
from vericache_sglang.planning.models import find_model  # noqa: E402
from vericache_sglang.planning.sglang_memory import (  # noqa: E402
    fraction_static,
    prefill_graph_sizes,
    tier_of,
)
from vericache_sglang.runtime import (  # noqa: E402
    algorithm,
    cuda_arguments,
    device_memory,
    staging_size,
)
from vericache_sglang.runtime.device_memory import deployment  # noqa: E402
from vericache_sglang.runtime.planned_memory import planned  # noqa: E402
from vericache_sglang.serving import start  # noqa: E402


@pytest.mark.parametrize("mib", [16380, 24564, 46068, 81559, 97887, 143771, 183359])
@pytest.mark.parametrize("ranks", [1, 4])
def test_defaults_by_memory_are_sglangs(tmp_path, mib, ranks):
    _, found = resolved(
        tmp_path, "qwen3-8b", mib, tp_size=ranks, speculative_algorithm=None
    )
    tier = tier_of(mib)
    rows = tier.graph_rows if ranks < 4 else tier.graph_rows_tp4
    prefill = prefill_graph_sizes(tier.chunk)
    graphs = found.cuda_graph_config
    assert found.chunked_prefill_size == tier.chunk
    assert graphs.decode.max_bs == rows
    assert len(graphs.prefill.bs) == prefill
    fraction = fraction_static(mib, ranks, tier.chunk, rows, prefill)
    assert found.mem_fraction_static == fraction


NO_GRAPHS = {"disable_cuda_graph": True, "cuda_graph_backend_prefill": "disabled"}
GPUS = [
    ("qwen3-8b", 143771, {}),
    ("llama-3.1-8b", 143771, {"attention_backend": "vericache"}),
    ("qwen3-32b", 81559, {"context_length": 32768}),
    ("mistral-small-24b", 97887, {"max_running_requests": 20, "page_size": 64}),
    ("qwen3-14b", 81559, {"tp_size": 2} | NO_GRAPHS),
]


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Return what resolves a GPU server and lets SGLang size its KV pool."""

    def build(name, mib, config, flags):
        for module in (cuda_arguments, algorithm):
            monkeypatch.setattr(module, "active_config", lambda: config)
        args, view = resolved(tmp_path, name, mib, **(ENOUGH | flags))
        model = find_model(name)
        at = deployment(config, view, model.weight_bytes, mib)
        for module in (device_memory, staging_size):
            monkeypatch.setattr(module, "get_server_args", lambda: args)
        monkeypatch.setattr(algorithm, "get_spec", lambda: view)
        one = SimpleNamespace(
            launch_world_size=1, world_group=SimpleNamespace(cpu_group=None)
        )
        monkeypatch.setattr(configurator, "get_parallel", lambda: one)
        monkeypatch.setattr(configurator, "get_schedule", lambda: view)
        monkeypatch.setattr(configurator, "get_mm", lambda: view)
        return view, at

    return build


ENOUGH = {"max_running_requests": 48}
"""Without it SGLang has 2,048 to 4,096 rows for a custom speculative algorithm."""


@pytest.mark.parametrize(("name", "mib", "flags"), GPUS, ids=lambda value: str(value))
def test_sglang_sizes_the_pool_that_the_ledger_foretells(
    server, monkeypatch, name, mib, flags
):
    config = VeriCacheConfig()
    _, at = server(name, mib, config, flags)
    expected = ledger(at)
    loaded = sum(b for row, b in expected.sizes.items() if row.phase is Phase.LOADED)
    (context,) = (b for row, b in expected.sizes.items() if row.name == "CUDA context")
    # What SGLang measures: free bytes before and after the weights were loaded.
    free = (mib * MIB - loaded) / GIB
    monkeypatch.setattr(
        configurator, "get_available_gpu_memory", lambda *args, **kwargs: free
    )
    sizer = SimpleNamespace(
        device="cuda",
        gpu_id=0,
        mambaish_config=None,
        post_capture_kv_active=False,
        model_config=SimpleNamespace(is_multimodal=False),
    )
    profile = configurator.KVCacheConfigurator._profile_available_bytes
    found = profile_available_bytes(profile, sizer, (mib * MIB - context) / GIB)
    slots = found // at.slot_bytes // at.page * at.page
    assert slots == pytest.approx(expected.slots, abs=at.page)
    staging = staging_size.staging_slots(staging_size.with_staging(slots))
    assert staging == pytest.approx(expected.staging, abs=64)


def test_the_staging_buffer_of_a_pool_is_never_larger_than_what_was_set_aside():
    config = VeriCacheConfig()
    for total in range(0, 300_000, 97):
        aside = resolve_staging(config, 40960, None, total)
        left = max(0, total - aside)
        pool = staging_size.with_staging(left)
        assert resolve_staging(config, 40960, None, pool) <= aside


@pytest.mark.parametrize(("name", "mib", "flags"), GPUS, ids=lambda value: str(value))
@pytest.mark.parametrize("compressor", ["snapkv", "recency", "kvzap:threshold=-4"])
def test_flags_are_planned_as_sglang_resolves_them(
    server, name, mib, flags, compressor
):
    config = VeriCacheConfig(compressor=compressor, draft_length=15)
    _, at = server(name, mib, config, flags)
    hopper = (9, 0)
    foretold = planned(find_model(name), config, mib, hopper, ENOUGH | flags)
    assert foretold == replace(at, model=foretold.model)


def test_a_deployment_is_what_sglang_resolved(server):
    view, at = server("qwen3-8b", 143771, VeriCacheConfig(draft_length=15), {})
    assert at.model == replace(find_model("qwen3-8b"), name=at.model.name)
    assert (at.context, at.running, at.chunk, at.page) == (40960, 48, 8192, 1)
    assert at.graph_rows == 48
    assert at.graph_tokens == 48 + 2 * 15
    assert at.prefill_graphs == 0, "snapkv looks at queries"
    assert (at.kept, at.tail, at.packed, at.scored) == (0.25, 64, False, False)
    assert at.fraction == view.mem_fraction_static


@pytest.mark.parametrize(
    ("compressor", "facts"),
    [
        ("recency", {"kept": 0.25, "tail": 0}),
        ("expected-attention", {"scored": True}),
        ("kivi", {"kept": 1.0, "packed": True, "tail": 0}),
    ],
)
def test_a_deployment_has_what_the_compressor_needs(server, compressor, facts):
    config = VeriCacheConfig(compressor=compressor)
    flags = {"attention_backend": "vericache"}
    _, at = server("qwen3-8b", 143771, config, flags)
    assert {name: getattr(at, name) for name in facts} == facts


def test_the_pool_leaves_its_bytes_to_sglang_where_vericache_is_off(
    server, monkeypatch
):
    server("qwen3-8b", 143771, VeriCacheConfig(), {})
    monkeypatch.setattr(algorithm, "is_disabled", lambda: True)
    assert device_memory.reserved_bytes(10**10) == 0


def test_a_buffer_that_leaves_nothing_is_refused_by_its_flag(server):
    server("qwen3-8b", 143771, VeriCacheConfig(staging_tokens=100_000), {})
    assert device_memory.reserved_bytes(2 * 10**10) < 2 * 10**10
    with pytest.raises(ConfigError, match=r"--vericache-staging-tokens: .* 100032"):
        device_memory.reserved_bytes(10**10)


# -- before the model is loaded ------------------------------------------------------


@pytest.fixture
def seen(monkeypatch):
    """Have our check see a GPU of the same memory as SGLang's resolution does."""

    def gpu(mib):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(start, "get_device_memory_capacity", lambda device: mib)

    return gpu


def test_sglangs_resolution_ends_where_the_gpu_is_too_small(tmp_path, seen):
    seen(16380)
    with pytest.raises(ConfigError) as caught:
        resolved(tmp_path, "qwen3-8b", 16380, **ENOUGH)
    for words in ("a GPU of 16.0 GiB is too small", "weights: 15.26 GiB, raise --tp"):
        assert words in str(caught.value)
    seen(143771)
    resolved(tmp_path, "qwen3-8b", 143771, **ENOUGH)


def test_a_server_that_fits_says_how_many_tokens_it_expects(tmp_path, seen, caplog):
    seen(143771)
    caplog.set_level("INFO", "vericache_sglang")
    _, view = resolved(tmp_path, "qwen3-8b", 143771, **ENOUGH)
    at = deployment(
        VeriCacheConfig(), view, find_model("qwen3-8b").weight_bytes, 143771
    )
    assert f"expected KV pool of {ledger(at).slots} tokens" in caplog.text


def weights_of(folder, *, files=None, config=None, **flags):
    _, view = resolved(folder, "qwen3-8b", 143771, changes=config, **ENOUGH)
    for name, size in (files or {}).items():
        (folder / name).write_bytes(b"x" * size)
    return device_memory.known_weights(Asked(view, flags))


class Asked:
    """A view of arguments in which some are different."""

    def __init__(self, view, changes):
        self._view = view
        vars(self).update(changes)

    def __getattr__(self, name):
        return getattr(self._view, name)


@pytest.mark.parametrize(
    ("case", "known"),
    [
        ({}, find_model("qwen3-8b").weight_bytes),
        ({"files": {"model.safetensors": 1000}}, 1000),
        (
            {"files": {"a.safetensors": 600, "consolidated.safetensors": 600}},
            600,
        ),
        # Stored as float32, served as bfloat16.
        (
            {"files": {"a.safetensors": 1000}, "config": {"torch_dtype": "float32"}},
            500,
        ),
        ({"quantization": "fp8"}, None),
        ({"cpu_offload_gb": 4}, None),
        ({"config": {"hidden_act": "gelu"}}, None),
    ],
    ids=lambda value: str(value),
)
def test_weights_are_known_from_files_or_shapes_or_not_at_all(tmp_path, case, known):
    assert weights_of(tmp_path, **case) == known


def test_weights_that_are_not_known_refuse_nothing(tmp_path, seen, monkeypatch):
    seen(16380)
    monkeypatch.setattr(start, "known_weights", lambda args: None)
    resolved(tmp_path, "qwen3-8b", 16380, **ENOUGH)


def test_fields_of_a_config_that_are_zero_are_left_to_their_defaults(tmp_path):
    config = {"num_experts_per_tok": 0, "moe_intermediate_size": 0}
    _, view = resolved(tmp_path, "qwen3-8b", 143771, changes=config, **ENOUGH)
    assert deployment(VeriCacheConfig(), view).model.mlp == find_model("qwen3-8b").mlp


@pytest.mark.parametrize("compressor", ["snapkv", "recency"])
def test_the_estimate_of_graph_pools_is_sglangs(tmp_path, monkeypatch, compressor):
    config = VeriCacheConfig(compressor=compressor)
    monkeypatch.setattr(cuda_arguments, "active_config", lambda: config)
    args, view = resolved(tmp_path, "qwen3-8b", 143771, **ENOUGH)
    sizes = ledger(deployment(config, view, 1, 143771)).sizes
    (pools,) = (size for row, size in sizes.items() if row.name == "CUDA graph pools")
    assert pools == reserve_for_graph_mb(args) * MIB
