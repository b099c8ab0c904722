"""Hooks on ``model_runner.py``: graphs of mixed batches, and room for their logits."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch

RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


def decode_cuda_graph_runner_cls(original: Hook, model_runner: Any) -> Any:
    """Return our subclass of SGLang's graph runner."""
    from vericache_sglang.runtime.forward.graphs import runner_class

    return runner_class(original, model_runner)


def max_shared_logits_buffer_rows(original: Hook, model_runner: Any) -> int:
    """Size the shared logits buffer for the largest graph."""
    from vericache_sglang.runtime.forward.graphs import logits_rows

    return logits_rows(original, model_runner)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=f"{RUNNER}._decode_cuda_graph_runner_cls",
            kind="around",
            args=("self",),
            reason="Only subclasses of ModelRunner and other platforms may choose the "
            "runner.",
            remove_when="SGLang asks a registered algorithm for its graph runner.",
        ),
        decode_cuda_graph_runner_cls,
    ),
    (
        Patch(
            target=f"{RUNNER}.max_shared_logits_buffer_rows",
            kind="around",
            args=("self",),
            reason="It counts as many tokens for every row as a verification has.",
            remove_when="SGLang asks the graph runner for its rows.",
        ),
        max_shared_logits_buffer_rows,
    ),
)
