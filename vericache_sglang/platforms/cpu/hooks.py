"""Hooks on SGLang that only a machine without a GPU needs, with their records."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch
from vericache_sglang.platforms.cpu.allocation import (
    assign_req_to_token_pool_func,
    get_last_loc,
)
from vericache_sglang.platforms.cpu.murmur_hash import murmur_hash32
from vericache_sglang.platforms.cpu.unpinned import Unpinned

LORA = "sglang.srt.lora.lora_manager.LoRAManager"


def support_triton(backend: str) -> bool:
    """Return False whatever the backend: there is no Triton without a GPU."""
    return False


def unpinned(original: Hook, *args: Any, **kwargs: Any) -> Any:
    """Run the original without pinning."""
    with Unpinned():
        return original(*args, **kwargs)


def maybe_enable_batch_invariant_mode(runner: Any) -> None:
    """Do not replace torch's CPU kernels.

    ``--enable-deterministic-inference`` still gives every request its own noise, but
    the last bits of a logit may depend on the batch, as without the flag.
    """


def choose_experts(original: Hook, experts: Any, *args: Any, **kwargs: Any) -> Any:
    """Choose experts with a bias [1, E] as with one [E]."""
    config = experts.topk_config
    if config.correction_bias is not None:
        config.correction_bias = config.correction_bias.squeeze(0)
    return original(experts, *args, **kwargs)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target="sglang.srt.utils.common.support_triton",
            kind="replace",
            args=("backend",),
            reason="It lists by name the attention backends that run without Triton.",
            remove_when="SGLang asks the backend object (support_triton()) instead.",
            body="44339c125b42",
        ),
        support_triton,
    ),
    (
        Patch(
            target="sglang.srt.mem_cache.allocation.get_last_loc",
            kind="replace",
            args=("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
            reason="It takes Triton for every backend it does not know by name.",
            remove_when="SGLang dispatches it by device, not by backend name.",
            body="e7dc387e0c17",
        ),
        get_last_loc,
    ),
    (
        Patch(
            target="sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
            kind="replace",
            args=(
                *("req_pool_indices", "req_to_token", "start_offset", "end_offset"),
                *("out_cache_loc", "batch_size"),
            ),
            reason="It is a Triton kernel, or one of sgl_kernel's AMX build.",
            remove_when="SGLang dispatches it by device, not by backend name.",
            body="ac224765635e",
        ),
        assign_req_to_token_pool_func,
    ),
    (
        Patch(
            target="sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
            kind="replace",
            args=("seed", "positions", "col_indices"),
            reason="On CPU tensors it needs sgl_kernel, which has no plain CPU build.",
            remove_when="SGLang hashes CPU tensors without sgl_kernel.",
            body="8628280e4f5f",
        ),
        murmur_hash32,
    ),
    (
        Patch(
            target=(
                "sglang.srt.model_executor.model_runner."
                "ModelRunner.maybe_enable_batch_invariant_mode"
            ),
            kind="replace",
            args=("self",),
            reason="The mode replaces CUDA kernels and raises where there is no "
            "accelerator, so seeds could not be used on a CPU.",
            remove_when="SGLang enables deterministic inference on a CPU.",
            body="6a0658f4daec",
        ),
        maybe_enable_batch_invariant_mode,
    ),
    (
        Patch(
            target="sglang.srt.layers.moe.topk.TopK.forward_native",
            kind="around",
            args=(
                *("self", "hidden_states", "router_logits", "num_token_non_padded"),
                *("expert_location_dispatch_info", "dynamic_expert_bias"),
            ),
            reason="It takes a bias [E]; ERNIE 4.5's is [1, E] but on SGLang's own "
            "CPU platform.",
            remove_when="SGLang's Ernie4Moe makes a bias [E] on every platform.",
        ),
        choose_experts,
    ),
    *(
        (
            Patch(
                target=f"{LORA}.{name}",
                kind="around",
                args=args,
                reason="Adapters and their batch information are pinned without asking "
                "whether there is an accelerator to pin for, so a CPU server with an "
                "adapter does not start.",
                remove_when="SGLang asks is_pin_memory_available before it pins.",
            ),
            unpinned,
        )
        for name, args in (
            ("init_state", ("self", "max_lora_rank", "target_modules", "lora_paths")),
            ("load_lora_adapter", ("self", "lora_ref")),
            ("prepare_lora_batch", ("self", "forward_batch")),
        )
    ),
)
