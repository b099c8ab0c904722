"""Registers our attention backends with SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.attention.layer import BACKEND_NAME

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner


DETERMINISTIC_QUERIES = 64
"""Query count that fills the kernel's largest block for any number of heads."""


def register() -> None:
    """Register the backend name with SGLang; idempotent."""
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

    On a GPU SGLang's Triton backend serves prefill. Under
    ``--enable-deterministic-inference`` all forwards, with or without speculation, are
    compiled for the same number of queries.

    Args:
        model_runner: SGLang's runner.

    Raises:
        ValueError: The pool stores the KV of sliding-window layers separately.
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
