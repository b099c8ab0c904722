"""The flags of SGLang that VeriCache refuses, one row each.

"Row" below is a request's row of ``req_to_token``: under VeriCache it lists fewer slots
than the request has tokens, in an order of its own, so nothing may index it by token
position. "Draft iteration" is one that emits no token for a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vericache_sglang.serving.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Callable

ALGORITHM = "VERICACHE"
"""Value of SGLang's ``--speculative-algorithm`` that stands for us."""

BACKEND = "vericache"
"""Value of SGLang's ``--attention-backend`` that stands for ours."""

CUDA_BACKENDS = ("fa3", "trtllm_mha", BACKEND)
"""Values of ``--attention-backend`` that serve rows of mixed lengths on a GPU."""

_LEAVE_OUT = "leave it out"


def _row(
    field: str,
    reason: str,
    *,
    allowed: tuple[object, ...] = (None, False),
    remedy: str = _LEAVE_OUT,
    when: Callable[[Any], bool] = lambda args: True,
) -> Rule:
    """Refuse every value of ``field`` but ``allowed``, where ``when`` holds."""

    def broken(args: Any) -> bool:
        return getattr(args, field) not in allowed and when(args)

    return Rule(f"--{field.replace('_', '-')}", broken, reason, remedy)


def _on_cpu(args: Any) -> bool:
    return str(args.device or "").startswith("cpu")


def _on_cuda(args: Any) -> bool:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return str(device).startswith("cuda") and torch.version.hip is None


def _other_device(args: Any) -> bool:
    return not _on_cuda(args) and not _on_cpu(args) and args.device is not None


def _no_trtllm_gen(args: Any) -> bool:
    from sglang.srt.runtime_context import get_platform

    trtllm = _on_cuda(args) and args.attention_backend == "trtllm_mha"
    return trtllm and not get_platform().is_sm100


def _other_algorithm(args: Any) -> bool:
    return (args.speculative_algorithm or ALGORITHM).upper() != ALGORITHM


def _foreign_kv_dtype(args: Any) -> bool:
    model_is_bf16 = args.dtype in ("auto", "bfloat16")
    same = ("auto", "bf16", "bfloat16") if model_is_bf16 else ("auto",)
    return args.kv_cache_dtype not in same


_PARALLEL = (
    _row(
        "pp_size",
        "drafts and verifies of one request would sit in different pipeline stages",
        allowed=(1,),
        remedy="run one server per replica behind a router",
    ),
    _row(
        "dp_size",
        "data-parallel ranks share one plan, which is made per rank here",
        allowed=(1,),
        remedy="run one server per replica behind a router",
    ),
    _row(
        "enable_dp_attention",
        "idle ranks run forwards that the plan does not know",
        remedy="run one server per replica behind a router",
    ),
    _row(
        "dcp_size",
        "a slot's rank follows from its token position, and rows are permuted",
        allowed=(1,),
        remedy="run one server per replica behind a router",
    ),
    _row(
        "attn_cp_size",
        "context-parallel prefill places KV by token position",
        allowed=(1,),
        remedy="run one server per replica behind a router",
    ),
    _row("enable_prefill_cp", "context-parallel prefill places KV by token position"),
    _row(
        "use_ray",
        "Ray actors do not inherit the environment that carries our settings",
    ),
    Rule(
        "--device",
        _other_device,
        "no attention backend reads rows of mixed lengths there",
        "use --device cuda on an NVIDIA GPU, or --device cpu",
    ),
)

_SCHEDULING = (
    _row(
        "enable_mixed_chunk",
        "prefill chunks and draft rows would share one forward",
    ),
    _row("enable_two_batch_overlap", "it splits a batch by tokens per request"),
    _row("enable_pdmux", "prefill would run while rows are being rewritten"),
    _row("dllm_algorithm", "diffusion models do not decode token by token"),
    _row("is_embedding", "there is nothing to draft for embeddings"),
    _row(
        "disaggregation_mode",
        "KV is sent by token position, and no part of it may be missing",
        allowed=("null", None),
    ),
    _row("encoder_only", "an encoder server decodes nothing"),
    _row("language_only", "its KV arrives from an encoder server by token position"),
    _row(
        "enable_streaming_session",
        "a session takes over the finished row and reads it by token position",
        remedy="use plain sessions: the radix cache shares their prefix",
    ),
)


def _store_without_tree(args: Any) -> bool:
    alone = args.tp_size in (None, 1) and not args.disable_radix_cache
    return args.hicache_storage_backend is not None and not alone


_CACHE = (
    _row(
        "enable_hierarchical_cache",
        "two host tiers would own the same tokens",
        remedy="leave it out: --vericache-host-gb is the host memory",
    ),
    _row(
        "hicache_storage_backend",
        "it reads and writes pages of HiCache's host pool, not segments",
        remedy="use file, mooncake or dynamic",
        allowed=(None, "file", "mooncake", "dynamic"),
    ),
    Rule(
        "--hicache-storage-backend",
        _store_without_tree,
        "what is stored are prefixes of the radix cache, on one rank",
        "leave out --disable-radix-cache and --tp-size",
    ),
    _row("enable_lmcache", "it stores rows by token position"),
    _row("enable_flexkv", "it stores rows by token position"),
    _row("enable_unified_cache_external_linker", "it stores rows by token position"),
    _row(
        "radix_cache_backend",
        "it may store finished rows by token position",
        allowed=(None, BACKEND),
    ),
    _row("enable_hisparse", "it owns the row of a decoding request, as we do"),
    _row("enable_unified_memory", "the KV pool has no fixed place for staging slots"),
    _row("enable_page_major_kv_layout", "splitting needs one buffer per layer"),
    _row("prefill_only_disable_kv_cache", "there would be no KV to compress"),
    _row(
        "kv_canary",
        "it checks every slot against the token at its position in the row",
        allowed=("none", None),
    ),
    Rule(
        "--kv-cache-dtype",
        _foreign_kv_dtype,
        "the drafts of a KV stored in another type than the model's are untested",
        "use --kv-cache-dtype auto",
    ),
)

_SPECULATION = (
    Rule(
        "--speculative-algorithm",
        _other_algorithm,
        "VeriCache is itself the speculative algorithm",
        "leave it out",
    ),
    _row("speculative_draft_model_path", "the model drafts for itself"),
    _row("speculative_token_map", "drafts use the whole vocabulary"),
    _row("speculative_adaptive", "VeriCache sets the draft length itself"),
    _row("enable_multi_layer_eagle", "the model drafts for itself"),
    _row("uno_lora_path", "the model drafts for itself"),
    _row("speculative_ngram_external_corpus_path", "the model drafts for itself"),
    _row(
        "decoupled_spec_role",
        "drafts and verifies share one server",
        allowed=("null", None),
    ),
    _row(
        "speculative_use_rejection_sampling",
        "drafts are accepted only where they equal the full KV's own token",
    ),
    *(
        _row(
            f"speculative_accept_threshold_{kind}",
            "accepting other tokens than the full KV's breaks the promise",
            allowed=(1.0, None),
        )
        for kind in ("single", "acc")
    ),
)

_OUTPUT = (
    _row(
        "enable_return_hidden_states",
        "a verify keeps hidden states of drafts that were rejected",
    ),
    _row(
        "return_hidden_states_mode",
        "a verify keeps hidden states of drafts that were rejected",
    ),
    _row(
        "enable_return_routed_experts",
        "experts are collected by row position, drafts overwrite them",
    ),
    _row(
        "enable_return_indexer_topk",
        "choices are collected by row position, drafts overwrite them",
    ),
)

_ATTENTION = (
    _row(
        "attention_backend",
        "on a CPU only our backend reads rows of mixed lengths",
        allowed=(None, BACKEND),
        remedy=f"leave it out, or use {BACKEND}",
        when=_on_cpu,
    ),
    _row(
        "attention_backend",
        "it serves no rows of mixed lengths, or not in CUDA graphs",
        allowed=(None, *CUDA_BACKENDS),
        remedy=f"leave it out, or use {', '.join(CUDA_BACKENDS)}",
        when=_on_cuda,
    ),
    Rule(
        "--attention-backend",
        _no_trtllm_gen,
        "on this GPU it has no kernel for rows of mixed lengths (an SM100 has)",
        f"leave it out, or use {BACKEND}",
    ),
    *(
        _row(
            f"{phase}_attention_backend",
            "verifications would run on another backend than decodes",
            allowed=(None, BACKEND),
            remedy="use --attention-backend",
        )
        for phase in ("prefill", "decode")
    ),
    _row(
        "disable_cuda_graph_padding",
        "a mixed batch is filled up to the next captured size",
        when=_on_cuda,
    ),
    _row(
        "enable_torch_compile",
        "SGLang's CPU graphs run no speculative algorithm, and on a GPU compiled "
        "layers are untested",
    ),
)

FLAG_RULES: tuple[Rule, ...] = (
    *_SPECULATION,
    *_PARALLEL,
    *_SCHEDULING,
    *_CACHE,
    *_OUTPUT,
    *_ATTENTION,
)
