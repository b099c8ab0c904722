"""SGLang's registry of attention backends: ours, by the device that runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.attention.layer import BACKEND_NAME

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner


DETERMINISTIC_QUERIES = 64
"""As many queries as fill the kernel's largest block, whatever the model's heads."""


def register() -> None:
    """Make SGLang know the backend name; a second call changes nothing."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import (
        ATTENTION_BACKENDS,
        register_attention_backend,
    )

    if BACKEND_NAME not in ATTENTION_BACKENDS:
        register_attention_backend(BACKEND_NAME)(create_backend)
    if BACKEND_NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([BACKEND_NAME])
        # A row's attention never depends on the other rows of the batch.
        choices.add_deterministic_attention_backend_choices([BACKEND_NAME])
        choices.add_radix_supported_deterministic_attention_backend_choices(
            [BACKEND_NAME]
        )


def create_backend(model_runner: ModelRunner) -> AttentionBackend:
    """Build the backend of the runner's device.

    On a GPU prefill is left to SGLang's Triton backend, which reads the same rows.
    Under ``--enable-deterministic-inference`` every forward of every server, with
    speculation or without, is compiled for the same number of queries.

    Args:
        model_runner: SGLang's.

    Raises:
        ValueError: The pool keeps KV of sliding-window layers apart.
    """
    if str(model_runner.device).startswith("cpu"):
        from vericache_sglang.attention.cpu_backend import SlotRunAttnBackend

        return SlotRunAttnBackend(model_runner)
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.runtime_context import get_exec, get_spec

    from vericache_sglang.attention.cuda_backend import RaggedAttnBackend

    most, decode = get_spec().speculative_num_draft_tokens or 1, 1
    if get_exec().deterministic.enable_deterministic_inference:
        most = decode = DETERMINISTIC_QUERIES
    return RaggedAttnBackend(
        model_runner, TritonAttnBackend(model_runner), most, decode
    )
