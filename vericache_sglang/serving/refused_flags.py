"""The flags of SGLang that VeriCache refuses, and why.

VeriCache's block-table row (``req_to_token``) of a request lists fewer slots than the
request has tokens, not in the order of positions, so it must not be indexed by token
position. A request emits no token in the iterations in which it drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vericache_sglang.serving.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ALGORITHM = "VERICACHE"
"""VeriCache's value of SGLang's ``--speculative-algorithm``."""

BACKEND = "vericache"
"""VeriCache's value of SGLang's ``--attention-backend``."""

CUDA_BACKENDS = ("fa3", "trtllm_mha", BACKEND)
"""GPU values of ``--attention-backend`` that support mixed query lengths."""

_REPLICAS = "run one server per replica behind a router"
_BY_POSITION = "it stores block-table rows by token position"
_SELF_DRAFTING = "the target model drafts for itself"
_HIDDEN = "a verification keeps the hidden states of rejected drafts"
_COLLECTED = "it is collected by row position, which drafts overwrite"
_UNTESTED_DTYPE = "KV stored in another type than the model's is untested"

SWITCHES: Mapping[str, str] = {
    "speculative_token_map": "drafts use the whole vocabulary",
    "speculative_adaptive": "VeriCache sets the draft length itself",
    "enable_multi_layer_eagle": _SELF_DRAFTING,
    "uno_lora_path": _SELF_DRAFTING,
    "speculative_ngram_external_corpus_path": _SELF_DRAFTING,
    "speculative_use_rejection_sampling": (
        "drafts are accepted only where they equal the full KV's own token"
    ),
    "enable_prefill_cp": "context-parallel prefill places KV by token position",
    "use_ray": "Ray actors do not inherit the environment that carries our settings",
    "enable_mixed_chunk": "prefill chunks and drafts would share one forward",
    "enable_two_batch_overlap": "it divides a batch by tokens per request",
    "enable_pdmux": "prefill would run while block-table rows are rewritten",
    "dllm_algorithm": "diffusion models do not decode token by token",
    "is_embedding": "there is nothing to draft for embeddings",
    "encoder_only": "an encoder server decodes nothing",
    "language_only": "its KV arrives from an encoder server by token position",
    "enable_lmcache": _BY_POSITION,
    "enable_flexkv": _BY_POSITION,
    "enable_unified_cache_external_linker": _BY_POSITION,
    "enable_hisparse": "it owns the block-table row of a decoding request, as we do",
    "enable_unified_memory": "the KV pool has no fixed place for the staging buffer",
    "enable_page_major_kv_layout": "compression needs one buffer per layer",
    "prefill_only_disable_kv_cache": "there would be no KV to compress",
    "enable_return_hidden_states": _HIDDEN,
    "return_hidden_states_mode": _HIDDEN,
    "enable_return_routed_experts": _COLLECTED,
    "enable_return_indexer_topk": _COLLECTED,
    "enable_torch_compile": (
        "SGLang's CPU graphs run no speculative algorithm, and on a GPU compiled "
        "layers are untested"
    ),
}
"""Flag that must not be given -> reason."""

PARALLEL: Mapping[str, str] = {
    "pp_size": "draft and verification of a request would be in two pipeline stages",
    "dp_size": "data-parallel ranks share one plan, which is made per rank here",
    "dcp_size": "a slot's rank follows from its token position",
    "attn_cp_size": "context-parallel prefill places KV by token position",
}
"""Number of ranks that must be 1 -> reason."""


def _cpu(args: Any) -> bool:
    return str(args.device or "").startswith("cpu")


def _cuda(args: Any) -> bool:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return str(device).startswith("cuda") and torch.version.hip is None


def _trtllm_without_kernels(args: Any) -> bool:
    from sglang.srt.runtime_context import get_platform

    trtllm = _cuda(args) and args.attention_backend == "trtllm_mha"
    return trtllm and not get_platform().is_sm100


def _other_kv_dtype(args: Any) -> bool:
    model_is_bf16 = args.dtype in ("auto", "bfloat16")
    same = ("auto", "bf16", "bfloat16") if model_is_bf16 else ("auto",)
    return args.kv_cache_dtype not in same


def _store_without_tree(args: Any) -> bool:
    return args.hicache_storage_backend is not None and args.disable_radix_cache


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _other_than(
    field: str,
    *allowed: object,
    reason: str,
    remedy: str = "leave it out",
    when: Callable[[Any], bool] = lambda args: True,
) -> Rule:
    """Refuse values of ``field`` other than None and ``allowed``, if ``when`` holds."""

    def broken(args: Any) -> bool:
        return getattr(args, field) not in (None, *allowed) and when(args)

    return Rule(_flag(field), broken, reason, remedy)


_VALUES = (
    Rule(
        "--speculative-algorithm",
        lambda args: (args.speculative_algorithm or ALGORITHM).upper() != ALGORITHM,
        "VeriCache is itself the speculative algorithm",
        "leave it out",
    ),
    _other_than(
        "decoupled_spec_role", "null", reason="drafter and verifier share one server"
    ),
    *(
        _other_than(
            f"speculative_accept_threshold_{kind}",
            1.0,
            reason="accepting other tokens than the full KV's breaks the promise",
        )
        for kind in ("single", "acc")
    ),
    Rule(
        "--device",
        lambda args: args.device is not None and not _cuda(args) and not _cpu(args),
        "no attention backend reads rows of mixed lengths there",
        "use --device cuda on an NVIDIA GPU, or --device cpu",
    ),
    _other_than(
        "enable_dp_attention",
        False,
        reason="idle ranks run forwards that the plan does not know",
        remedy=_REPLICAS,
    ),
    _other_than(
        "disaggregation_mode",
        *("null", "decode"),
        reason="a prefill server has nothing to draft",
        remedy="start it without VeriCache: --disable-vericache",
    ),
    _other_than(
        "enable_streaming_session",
        False,
        reason="a session takes over the finished row and reads it by token position",
        remedy="use plain sessions: the radix cache shares their prefix",
    ),
    _other_than(
        "enable_hierarchical_cache",
        False,
        reason="two host tiers would own the same tokens",
        remedy="leave it out: --vericache-host-gb is the host memory",
    ),
    _other_than(
        "hicache_storage_backend",
        *("file", "mooncake", "dynamic"),
        reason="it reads and writes pages of HiCache's host pool, not segments",
        remedy="use file, mooncake or dynamic",
    ),
    Rule(
        "--hicache-storage-backend",
        _store_without_tree,
        "what is stored are prefixes of the radix cache",
        "leave out --disable-radix-cache",
    ),
    _other_than(
        "radix_cache_backend", BACKEND, reason="it may store rows by token position"
    ),
    _other_than(
        "kv_canary",
        "none",
        reason="it compares every slot with the token at its position in the row",
    ),
    Rule(
        "--kv-cache-dtype",
        _other_kv_dtype,
        _UNTESTED_DTYPE,
        "use --kv-cache-dtype auto",
    ),
    _other_than(
        "attention_backend",
        BACKEND,
        reason="on a CPU only our backend reads rows of mixed lengths",
        remedy=f"leave it out, or use {BACKEND}",
        when=_cpu,
    ),
    _other_than(
        "attention_backend",
        *CUDA_BACKENDS,
        reason="it serves no rows of mixed lengths, or not in CUDA graphs",
        remedy=f"leave it out, or use {', '.join(CUDA_BACKENDS)}",
        when=_cuda,
    ),
    Rule(
        "--attention-backend",
        _trtllm_without_kernels,
        "on this GPU it has no kernel for rows of mixed lengths (an SM100 has)",
        f"leave it out, or use {BACKEND}",
    ),
    *(
        _other_than(
            f"{phase}_attention_backend",
            BACKEND,
            reason="verifications would run on another backend than decodes",
            remedy="use --attention-backend",
        )
        for phase in ("prefill", "decode")
    ),
    _other_than(
        "disable_cuda_graph_padding",
        False,
        reason="a mixed batch is padded to the next captured size",
        when=_cuda,
    ),
)

FLAG_RULES: tuple[Rule, ...] = (
    *_VALUES,
    *(
        _other_than(field, 1, reason=why, remedy=_REPLICAS)
        for field, why in PARALLEL.items()
    ),
    *(_other_than(field, False, reason=why) for field, why in SWITCHES.items()),
)
