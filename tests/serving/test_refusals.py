"""What VeriCache refuses to start with: one case per row, and what must pass."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.errors import ConfigError, UnsupportedError
from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops
from vericache_sglang.serving import refusals
from vericache_sglang.serving.launch import check_draft_path
from vericache_sglang.serving.refusals import (
    SGLANG_VERSION,
    check_decode_server,
    check_draft_first,
    check_drafter,
    check_model,
    check_role,
    check_server_args,
    check_sglang_version,
)
from vericache_sglang.serving.refused_flags import FLAG_RULES
from vericache_sglang.serving.refused_models import MODEL_RULES

pytestmark = pytest.mark.sglang

REFUSED_FLAGS = [
    {"speculative_algorithm": "EAGLE"},
    {"speculative_algorithm": "ngram"},
    {"speculative_token_map": "map.pt"},
    {"speculative_adaptive": True},
    {"enable_multi_layer_eagle": True},
    {"uno_lora_path": "some/lora"},
    {"speculative_ngram_external_corpus_path": "corpus.jsonl"},
    {"decoupled_spec_role": "drafter"},
    {"speculative_use_rejection_sampling": True},
    {"speculative_accept_threshold_single": 0.9},
    {"speculative_accept_threshold_acc": 0.9},
    {"pp_size": 2},
    {"dp_size": 2},
    {"enable_dp_attention": True},
    {"dcp_size": 2},
    {"attn_cp_size": 2},
    {"enable_prefill_cp": True},
    {"use_ray": True},
    {"device": "npu"},
    {"enable_mixed_chunk": True},
    {"enable_two_batch_overlap": True},
    {"enable_pdmux": True},
    {"dllm_algorithm": "LowConfidence"},
    {"is_embedding": True},
    {"disaggregation_mode": "prefill"},
    {"encoder_only": True},
    {"language_only": True},
    {"enable_streaming_session": True},
    {"enable_hierarchical_cache": True},
    {"enable_lmcache": True},
    {"hicache_storage_backend": "nixl"},
    {"hicache_storage_backend": "file", "disable_radix_cache": True},
    {"enable_flexkv": True},
    {"enable_unified_cache_external_linker": True},
    {"radix_cache_backend": "other"},
    {"enable_hisparse": True},
    {"enable_unified_memory": True},
    {"enable_page_major_kv_layout": True},
    {"prefill_only_disable_kv_cache": True},
    {"kv_canary": "log"},
    {"kv_cache_dtype": "fp8_e4m3"},
    {"kv_cache_dtype": "nvfp4"},
    {"kv_cache_dtype": "bf16", "dtype": "float32"},
    {"enable_return_hidden_states": True},
    {"return_hidden_states_mode": "last"},
    {"enable_return_routed_experts": True},
    {"enable_return_indexer_topk": True},
    {"attention_backend": "torch_native", "device": "cpu"},
    {"attention_backend": "flashinfer", "device": "cuda"},
    {"attention_backend": "trtllm_mha", "device": "cuda"},
    {"prefill_attention_backend": "torch_native", "device": "cpu"},
    {"decode_attention_backend": "torch_native", "device": "cpu"},
    {"prefill_attention_backend": "fa3", "device": "cuda"},
    {"decode_attention_backend": "fa3", "device": "cuda"},
    {"disable_cuda_graph_padding": True, "device": "cuda"},
    {"enable_torch_compile": True, "device": "cpu"},
    {"enable_torch_compile": True, "device": "cuda"},
]

ALLOWED_FLAGS = [
    {},
    {"speculative_algorithm": "VERICACHE"},
    {"speculative_algorithm": "vericache"},
    {"device": "cpu", "attention_backend": "vericache", "dtype": "float32"},
    {"device": "cuda"},
    {"device": "cuda:1", "attention_backend": "fa3"},
    {"device": "cuda", "attention_backend": "vericache", "page_size": 64},
    {"device": "cpu", "attention_backend": "vericache"},
    {"device": "cpu", "disable_cuda_graph_padding": True},
    {"kv_cache_dtype": "bf16", "dtype": "bfloat16"},
    {"enable_lora": True},
    {"disable_radix_cache": True},
    {"tp_size": 2},
    {"disaggregation_mode": "decode"},
    {"enable_deterministic_inference": True},
]

REFUSED_DECODING = [
    ({"compressor": "expected-attention"}, {}, "--vericache-compressor"),
    ({"compressor": "observed+kivi"}, {}, "--vericache-compressor"),
    ({"compressor": "kvzap"}, {}, "--vericache-compressor"),
    ({"inner": "model"}, {}, "--vericache-inner model"),
    ({"inner": "eagle3"}, {}, "--vericache-inner eagle3"),
    ({"consistency_check_rate": 0.1}, {}, "--vericache-consistency-check-rate"),
    *(
        ({}, {field: given}, f"--{field.replace('_', '-')}")
        for field, given in {
            "disaggregation_decode_enable_radix_cache": True,
            "disaggregation_decode_enable_offload_kvcache": True,
            "disaggregation_decode_host_receive_threshold": 0.5,
            "disaggregation_enable_kv_checksum": True,
            "disaggregation_transfer_backend": "fake",
            "enable_pd_role_switch": True,
            "enable_lora": True,
            "hicache_storage_backend": "file",
            "tp_size": 2,
        }.items()
    ),
]
"""Settings and fields of a decode server, and what the message names."""

DECODING = (
    *("snapkv", "keynorm", "recency", "random"),
    *("kvzip", "kvzip:plus=true", "keynorm+kivi"),
)
"""Compressors of decode servers."""

BY_MODEL = {"speculative_draft_model_path": "some/model"}

REFUSED_DRAFTING = [
    ("none", BY_MODEL, "--speculative-draft-model-path"),
    ("ngram", BY_MODEL, "--speculative-draft-model-path"),
    ("model", {}, "--vericache-inner model"),
    ("eagle3", {}, "--vericache-inner eagle3"),
    (
        "model",
        {**BY_MODEL, "speculative_draft_window_size": 128},
        "--speculative-draft-window-size",
    ),
    (
        "model",
        {**BY_MODEL, "speculative_draft_attention_backend": "fa3"},
        "--speculative-draft-attention-backend",
    ),
]
"""Inner drafter, fields of ``ServerArgs``, and what the message names."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Rules that look for a device see the same machine everywhere."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def variant(architecture, model_type, **fields):
    return {
        **LLAMA,
        "architectures": [architecture],
        "model_type": model_type,
        **fields,
    }


REFUSED_MODELS = {
    "recurrent:mamba": variant(
        "MambaForCausalLM", "mamba", state_size=16, num_hidden_layers=2
    ),
    "recurrent:jamba": variant(
        "JambaForCausalLM", "jamba", attn_layer_period=2, attn_layer_offset=1
    ),
    "recurrent:qwen3-next": variant("Qwen3NextForCausalLM", "qwen3_next"),
    "MLA:deepseek-v2": variant(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
    "sliding-window:gemma2": variant(
        "Gemma2ForCausalLM", "gemma2", sliding_window=512, head_dim=8
    ),
    "sliding-window:mistral": variant(
        "MistralForCausalLM", "mistral", sliding_window=1024
    ),
    "sliding-window:gpt-oss": variant(
        "GptOssForCausalLM", "gpt_oss", sliding_window=128, head_dim=8
    ),
    "sinks:gpt-oss": variant(
        "GptOssForCausalLM", "gpt_oss", sliding_window=128, head_dim=8
    ),
    "ALiBi:bloom": variant("BloomForCausalLM", "bloom"),
    "ALiBi:mpt": variant(
        "MPTForCausalLM", "mpt", d_model=32, n_heads=4, n_layers=2, max_seq_len=2048
    ),
    "ALiBi:falcon": variant("FalconForCausalLM", "falcon", alibi=True),
    "M-RoPE:qwen2-vl": variant(
        "Qwen2ForCausalLM",
        "qwen2",
        rope_scaling={"rope_type": "default", "mrope_section": [1, 1, 2]},
    ),
    "generat:reward": variant("Qwen2ForRewardModel", "qwen2"),
    "encoder-decoder:whisper": variant(
        "WhisperForConditionalGeneration",
        "whisper",
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        max_target_positions=448,
    ),
    "quantized KV:fp8": {
        **LLAMA,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {},
            "kv_cache_scheme": {"type": "float", "num_bits": 8},
        },
    },
    "n-gram:engram": {**LLAMA, "engram_layer_ids": [0]},
    "sparse:dual-chunk": {
        **LLAMA,
        "dual_chunk_attention_config": {"chunk_size": 512, "local_size": 64},
    },
}

REFUSED_SMALL_MODELS = {
    "vocabulary": {"vocab_size": 65},
    "--vericache-inner-window": {"max_position_embeddings": 600},
    "what its target computes": {"architectures": ["Qwen3MoeForCausalLMMTP"]},
    "does not serve": {"architectures": ["NobodysForCausalLM"]},
    "sliding-window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 1024,
    },
}
"""Word of the message -> what differs from a small model that is served."""

HEAD = {
    **LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0]},
}

REFUSED_HEADS = {
    "EAGLE-2": {"architectures": ["LlamaForCausalLMEagle"]},
    "other libraries": {"architectures": ["Eagle3Speculator"]},
    "of 64 numbers": {"target_hidden_size": 64},
    "hidden size is 64": {"hidden_size": 64, "target_hidden_size": 32},
    "reads 3 hidden states": {"num_aux_hidden_states": 3},
    r"of layers \[1\]": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}},
    r"of layers \[1, 0, -2\]": {"eagle_config": None},
    "bfloat16": {"torch_dtype": "bfloat16"},
    "vocabulary has 65": {"vocab_size": 65},
    "--vericache-inner-window": {"max_position_embeddings": 600},
}
"""Word of the message -> what differs from a head that is served."""

ALLOWED_MODELS = {
    "llama": LLAMA,
    "qwen3": variant("Qwen3ForCausalLM", "qwen3", head_dim=8),
    "wide-window": variant("MistralForCausalLM", "mistral", sliding_window=4096),
    "qwen2-window-unused": variant(
        "Qwen2ForCausalLM", "qwen2", sliding_window=512, use_sliding_window=False
    ),
}


@pytest.fixture(scope="module")
def server_args():
    define_missing_ops()
    from sglang.srt.server_args import ServerArgs

    return lambda **fields: ServerArgs(model_path="dummy", **fields)


@pytest.fixture
def model(tmp_path):
    define_missing_ops()
    from sglang.srt.configs.model_config import ModelConfig

    def build(config, **fields):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return ModelConfig(str(tmp_path), **fields)

    return build


def spell(field):
    return f"--{field.replace('_', '-')}"


@pytest.mark.parametrize("fields", REFUSED_FLAGS, ids=str)
def test_a_refused_flag_is_named(server_args, fields):
    with pytest.raises(UnsupportedError) as caught:
        check_server_args(server_args(**fields))
    message = str(caught.value)
    assert spell(next(iter(fields))) in message
    assert "--disable-vericache" in message


def test_every_flag_row_has_a_case():
    covered = {spell(next(iter(fields))) for fields in REFUSED_FLAGS}
    assert covered == {rule.what for rule in FLAG_RULES}


@pytest.mark.parametrize("fields", ALLOWED_FLAGS, ids=str)
def test_other_flags_pass(server_args, fields):
    check_server_args(server_args(**fields))


def test_trtllm_needs_a_gpu_that_has_its_kernels(server_args, monkeypatch):
    from sglang.srt import runtime_context

    args = server_args(device="cuda", attention_backend="trtllm_mha", page_size=64)
    for has, word in ((True, None), (False, "SM100")):
        platform = SimpleNamespace(is_sm100=has)
        monkeypatch.setattr(runtime_context, "get_platform", lambda p=platform: p)
        if word is None:
            check_server_args(args)
        else:
            with pytest.raises(UnsupportedError, match=word):
                check_server_args(args)


def test_the_message_lists_every_refused_flag(server_args):
    with pytest.raises(UnsupportedError, match=r"(?s)--pp-size.*--enable-lmcache"):
        check_server_args(server_args(pp_size=2, enable_lmcache=True))


def test_every_flag_is_one_of_sglangs(server_args):
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = set(parser._option_string_actions)
    assert {rule.what for rule in FLAG_RULES} <= known


@pytest.mark.parametrize(("inner", "fields", "named"), REFUSED_DRAFTING)
def test_flags_of_a_refused_inner_drafter_are_named(server_args, inner, fields, named):
    config = VeriCacheConfig(inner=inner)
    with pytest.raises(UnsupportedError, match=rf"inner drafter:\s+{named}"):
        check_drafter(config, server_args(**fields), None)


@pytest.mark.parametrize(("settings", "fields", "named"), REFUSED_DECODING)
def test_what_a_decode_server_refuses_is_named(server_args, settings, fields, named):
    config = VeriCacheConfig(**{"compressor": "keynorm", **settings})
    check_decode_server(config, server_args(**fields))
    decoding = server_args(disaggregation_mode="decode", **fields)
    with pytest.raises(UnsupportedError, match=rf"decode server:\s+{named}: "):
        check_decode_server(config, decoding)


@pytest.mark.parametrize("compressor", DECODING)
def test_compressors_of_a_decode_server(server_args, compressor):
    config = VeriCacheConfig(compressor=compressor)
    check_decode_server(config, server_args(disaggregation_mode="decode"))


def test_a_server_without_a_small_model_looks_for_none(server_args):
    for inner in ("none", "ngram"):
        check_drafter(VeriCacheConfig(inner=inner), server_args(tp_size=2), None)


@pytest.mark.parametrize("word", [None, *REFUSED_SMALL_MODELS])
def test_a_refused_small_model_says_why(server_args, model, tmp_path, word):
    served = model(LLAMA)
    folder = tmp_path / "small"
    folder.mkdir()
    small = {**LLAMA, **REFUSED_SMALL_MODELS.get(word, {})}
    (folder / "config.json").write_text(json.dumps(small))
    args = server_args(speculative_draft_model_path=str(folder))
    config = VeriCacheConfig(inner="model")
    if word is None:
        check_drafter(config, args, served)
        return
    with pytest.raises(UnsupportedError, match=word) as caught:
        check_drafter(config, args, served)
    flag = word if word.startswith("--") else "--speculative-draft-model-path"
    assert flag in str(caught.value)


@pytest.mark.parametrize("word", [None, *REFUSED_HEADS])
def test_a_refused_head_says_why(server_args, model, tmp_path, word):
    served = model(LLAMA)
    folder = tmp_path / "head"
    folder.mkdir()
    head = {**HEAD, **REFUSED_HEADS.get(word, {})}
    (folder / "config.json").write_text(json.dumps(head))
    args = server_args(speculative_draft_model_path=str(folder))
    config = VeriCacheConfig(inner="eagle3")
    if word is None:
        check_drafter(config, args, served)
        return
    with pytest.raises(UnsupportedError, match=word):
        check_drafter(config, args, served)


MIMO = {
    **variant("MiMoForCausalLM", "qwen2"),
    "num_nextn_predict_layers": 1,
}

REFUSED_PREDICTORS = {
    "LlamaForCausalLM has no prediction head": (LLAMA, "mtp.0.weight"),
    "has 2 prediction layers": (
        {**MIMO, "num_nextn_predict_layers": 2},
        "mtp.0.weight",
    ),
    "no weights of a prediction head": (MIMO, "model.norm.weight"),
}
"""Words of the message -> config and a weight of the served checkpoint."""


@pytest.mark.parametrize("word", [None, *REFUSED_PREDICTORS])
def test_a_refused_prediction_head_says_why(server_args, model, tmp_path, word):
    config, weight = REFUSED_PREDICTORS.get(word, (MIMO, "model.mtp_layers.0.weight"))
    served = model(config)
    save_file({weight: torch.zeros(1)}, tmp_path / "model.safetensors")
    args = server_args(speculative_draft_model_path=str(tmp_path))
    settings = VeriCacheConfig(inner="mtp")
    if word is None:
        check_drafter(settings, args, served)
        assert served.hf_config.architectures == ["MiMoForCausalLM"]
        return
    with pytest.raises(UnsupportedError, match=word):
        check_drafter(settings, args, served)


def test_a_model_that_returns_no_hidden_states_has_no_head(
    server_args, model, tmp_path
):
    served = model(variant("OlmoForCausalLM", "olmo"))
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HEAD))
    args = server_args(speculative_draft_model_path=str(folder))
    with pytest.raises(UnsupportedError, match="OlmoForCausalLM does not return"):
        check_drafter(VeriCacheConfig(inner="eagle3"), args, served)


def test_a_small_model_that_is_not_there_is_named(tmp_path):
    missing = str(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"--speculative-draft-model-path .*nothing"):
        check_draft_path({"speculative_draft_model_path": missing})
    check_draft_path({})


VERIFIER = {"role": "verifier", "peer_bind": "tcp://127.0.0.1:31900"}
DRAFTER = {"role": "drafter", "verifiers": "tcp://[::1]:31900, tcp://localhost:31901"}
REFUSED_ROLES = [
    ({"role": "verifier"}, {}, "give --vericache-peer-bind"),
    ({"role": "drafter"}, {}, "give --vericache-verifiers"),
    ({"peer_bind": "tcp://127.0.0.1:1"}, {}, "a standalone server is bound"),
    ({**DRAFTER, "peer_bind": "tcp://127.0.0.1:1"}, {}, "a drafter server is bound"),
    ({**VERIFIER, "verifiers": "tcp://127.0.0.1:1"}, {}, "a verifier server has no"),
    ({**VERIFIER, "peer_bind": "127.0.0.1:31900"}, {}, "is not tcp://HOST:PORT"),
    ({**DRAFTER, "verifiers": "tcp://a:99999"}, {}, "tcp://a:99999 is not tcp"),
    ({**VERIFIER, "peer_bind": "tcp://0.0.0.0:1"}, {}, "--vericache-peer-key off"),
    ({**VERIFIER, "peer_bind": "tcp://*:1"}, {}, "--vericache-peer-key off"),
    ({**DRAFTER, "verifiers": "tcp://127.0.0.1:1,tcp://10.0.0.1:1"}, {}, "10.0.0.1:1"),
    (VERIFIER, {"tp_size": 2}, "--tp-size 2 with --vericache-role"),
    (DRAFTER, {"disaggregation_mode": "decode"}, "--disaggregation-mode with"),
]


@pytest.mark.parametrize(("settings", "fields", "named"), REFUSED_ROLES)
def test_a_refused_role_says_why(settings, fields, named):
    args = SimpleNamespace(**{"tp_size": 1, "disaggregation_mode": "null", **fields})
    with pytest.raises(UnsupportedError) as caught:
        check_role(VeriCacheConfig(**settings), args)
    assert named in str(caught.value)
    assert str(caught.value).count("\n") == 2, "one reason, and the way out"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        VERIFIER,
        DRAFTER,
        {**VERIFIER, "peer_bind": "tcp://0.0.0.0:1", "peer_key": "peer.key"},
    ],
)
def test_roles_on_loopback_or_with_a_key_start(settings):
    args = SimpleNamespace(tp_size=1, disaggregation_mode="null")
    check_role(VeriCacheConfig(**settings), args)
    args.tp_size = 2
    if not settings:
        check_role(VeriCacheConfig(), args)


P1 = {**DRAFTER, "remote_path": "p1", "draft_first": "off"}
REFUSED_DRAFT_FIRST = [
    ({}, {"hicache_storage_backend": None}, "no store"),
    ({}, {"disable_radix_cache": True}, "--disable-radix-cache"),
    ({"compressor": "snapkv"}, {}, "--vericache-compressor snapkv"),
    ({"compressor": "snapkv+kivi:bits=4"}, {}, "is not stored"),
    ({"inner": "model"}, {}, "--vericache-inner ngram"),
    ({}, {"tp_size": 2}, "--tp-size 2"),
    (VERIFIER, {}, "--vericache-role verifier"),
    (P1, {"hicache_storage_backend": None}, "--vericache-remote-path p1: there is no"),
    ({**P1, "remote_path": "auto"}, {"hicache_storage_backend": None}, "path auto: "),
    ({**P1, "draft_first": "on"}, {}, "drop --vericache-draft-first"),
    *(
        ({**P1, "remote_path": path, "acceptance": "rejection"}, {}, "e coupled")
        for path in ("p1", "p2", "auto")
    ),
    ({**P1, "draft_length": 1}, {}, "--vericache-draft-length 1 with --vericache-rem"),
    ({"draft_length": 1}, {}, None),
    ({**P1, "draft_length": 2}, {}, None),
    (P1, {}, None),
    ({**P1, "remote_path": "b1"}, {"hicache_storage_backend": None}, None),
    ({}, {}, None),
    ({"compressor": "kvzip", "inner": "ngram"}, {}, None),
    ({"draft_first": "off", "compressor": "snapkv"}, {"tp_size": 2}, None),
]


@pytest.mark.parametrize(("settings", "fields", "named"), REFUSED_DRAFT_FIRST)
def test_what_draft_first_needs_is_named(settings, fields, named):
    given = {"draft_first": "on", "compressor": "keynorm", **settings}
    usual = {"disable_radix_cache": False, "hicache_storage_backend": "file"}
    args = SimpleNamespace(**{"tp_size": 1, **usual, **fields})
    if named is None:
        check_draft_first(VeriCacheConfig(**given), args)
        return
    with pytest.raises(UnsupportedError) as caught:
        check_draft_first(VeriCacheConfig(**given), args)
    assert named in str(caught.value)
    assert str(caught.value).count("\n") == 2, "one reason, and the way out"


@pytest.mark.parametrize("case", REFUSED_MODELS)
def test_a_refused_model_says_why(model, case):
    wanted = case.partition(":")[0]
    with pytest.raises(UnsupportedError) as caught:
        check_model(model(REFUSED_MODELS[case]))
    assert wanted in str(caught.value)
    assert REFUSED_MODELS[case]["architectures"][0] in str(caught.value)


@pytest.mark.parametrize("case", ALLOWED_MODELS)
def test_full_attention_models_pass(model, case):
    check_model(model(ALLOWED_MODELS[case]))


def test_a_context_inside_the_window_passes(model):
    config = REFUSED_MODELS["sliding-window:mistral"]
    check_model(model(config, context_length=512))


def test_every_model_row_has_a_case():
    wanted = {case.partition(":")[0] for case in REFUSED_MODELS}
    bare = [r.what for r in MODEL_RULES if not any(w in r.what for w in wanted)]
    assert bare == []


def test_another_sglang_is_refused(monkeypatch):
    monkeypatch.setattr(refusals, "version", lambda name: "0.5.23")
    with pytest.raises(UnsupportedError, match=rf"0\.5\.23 .*{SGLANG_VERSION}"):
        check_sglang_version()
