"""Hooks on ``decode_cuda_graph_runner.py``: mixed batches and decodes in its graphs."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch

RUNNER = (
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
)


def get_spec_info(original: Hook, runner: Any, num_tokens: int) -> Any:
    """Capture with ragged rows of our own kind."""
    from vericache_sglang.engine.graph_forward import capture_input

    return capture_input(original, runner, num_tokens)


def can_run_graph(original: Hook, runner: Any, forward_batch: Any) -> Any:
    """Take what a captured size holds; count what none does."""
    from vericache_sglang.engine.graph_forward import admits

    return admits(original, runner, forward_batch)


def execute(original: Hook, runner: Any, batch: Any, *args: Any, **kw: Any) -> Any:
    """Fill a decode up to its graph, and cut off what was filled up."""
    from vericache_sglang.engine.graph_forward import replay

    return replay(original, runner, batch, *args, **kw)


def _around(name: str, args: tuple[str, ...], reason: str) -> Patch:
    return Patch(
        target=f"{RUNNER}.{name}",
        kind="around",
        args=("self", *args),
        reason=reason,
        remove_when="SGLang asks a registered algorithm for its verify input, and "
        "keys decodes by tokens too.",
    )


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        _around("get_spec_info", ("num_tokens",), "It knows SGLang's algorithms only."),
        get_spec_info,
    ),
    (
        _around("can_run_graph", ("forward_batch",), "It takes decodes for verifies."),
        can_run_graph,
    ),
    (
        _around("execute", ("forward_batch", "pp_proxy_tensors"), "As can_run_graph."),
        execute,
    ),
)
