"""CUDA graphs of mixed batches, in addition to SGLang's decode graphs.

For a speculative algorithm SGLang 0.5.21 captures verification graphs only. In its
ragged mode (written for DSPARK, ``speculative/ragged_verify.py``) a graph has a fixed
number of tokens and rows of any length, which fits a mixed batch. SGLang sizes such
graphs for full verifications in every row; here the sizes are those that occur.
Decode-only batches use the graphs of a server without speculation.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.runner import (
    DecodeCudaGraphRunner,
    get_batch_sizes_to_capture,
)
from sglang.srt.runtime_context import get_exec, get_spec
from sglang.srt.speculative.ragged_verify import (
    RaggedVerifyLayout,
    build_capture_verify_lens,
    round_up_grid,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from vericache_sglang.planning.graph_sizes import graph_tokens
from vericache_sglang.runtime.algorithm import NAME, served_config
from vericache_sglang.runtime.forward.spec_input import VeriCacheSpecInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

SPECULATIVE = (
    *("speculative_algorithm", "speculative_num_steps"),
    *("speculative_num_draft_tokens", "speculative_eagle_topk"),
)
"""SGLang's arguments that are None on a server without speculation."""

CODES = "rows begin with codes"
TOO_LARGE = "more rows or tokens than the largest graph"
NO_SPARE_ROW = "no row takes the padding within the context"
NOT_RAGGED = "the attention backend has no ragged graphs"
NOT_CAPTURED = "SGLang captured no graph for them"


class MixedGraphRunner(DecodeCudaGraphRunner):
    """SGLang's graph runner for batches that draft, verify and decode.

    Attributes:
        decodes: SGLang's runner of a server without speculation. It has its own
            attention backend, because a backend has one set of static buffers.
        replayed: Number of forwards that ran in a graph.
        eager: Reason -> number of forwards that ran without a graph.
        features: An inner drafter reads what forwards compute.
    """

    captured_req_width: int
    capture_bs: list[int]
    compile_bs: list[int]
    features = False

    def __init__(self, model_runner: ModelRunner, **options: Any) -> None:
        self.replayed = 0
        self.eager: Counter[str] = Counter()
        config = served_config()
        self.features = config is not None and config.inner_head
        super().__init__(model_runner, **options)
        hidden = get_exec().features.override(enable_return_hidden_states=self.features)
        with hidden, _without_speculation(model_runner):
            backend = model_runner._get_attention_backend()
            model_runner.kv_index_translator.bind_and_verify_backends([backend])
            self.decodes = DecodeCudaGraphRunner(model_runner, attn_backend=backend)
        logger.info(
            "VeriCache: CUDA graphs of %s tokens, and of decodes of %s rows",
            self.capture_num_tokens,
            self.decodes.capture_bs,
        )

    # -- capture ------------------------------------------------------------------

    def _build_ragged_verify_token_buckets(self) -> list[int]:
        """Return the token count of every graph; ``max_bs`` bounds a batch's rows."""
        self.capture_bs = list(_sizes(self.max_bs, self.captured_req_width))
        self.compile_bs = []
        return self.capture_bs

    def capture_one_shape(self, size: int, *args: Any, **kwargs: Any) -> None:
        """Capture a graph of ``size`` tokens, which SGLang passes as rows."""
        width, self.captured_req_width = self.captured_req_width, 1
        try:
            with _longest_row(self.attn_backend, size):
                super().capture_one_shape(size, *args, **kwargs)
        finally:
            self.captured_req_width = width

    def get_spec_info(self, num_tokens: int) -> VeriCacheSpecInput:
        """Return the spec input a graph is captured with."""
        rows = self._ragged_capture_slots(num_tokens)
        layout = RaggedVerifyLayout.from_verify_lens(
            verify_lens_cpu=build_capture_verify_lens(
                num_tokens=num_tokens,
                num_slots=rows,
                num_draft_tokens=self.speculative_num_draft_tokens,
            ),
            device=self.device,
            grid=self.capture_num_tokens,
        )
        self._captured_ragged_layouts[num_tokens] = layout
        spec_info = VeriCacheSpecInput(features=self.features)
        spec_info.ragged_verify_layout = layout
        return spec_info

    # -- replay -------------------------------------------------------------------

    def tokens_of(self, forward: ForwardBatch) -> int | str:
        """Return the tokens of the smallest graph that fits a mixed forward.

        Rows with packed draft KV need kernels that no graph contains. If a graph has no
        spare row, SGLang's backends add the padding tokens to the last row, which must
        not exceed the longest row they support.

        Args:
            forward: Before ``present``: ``seq_lens_cpu`` are lengths of rows with their
                queries, or upper bounds.

        Returns:
            The tokens, or the reason why no graph fits.
        """
        lengths = forward.extend_seq_lens_cpu
        tokens, grid = sum(lengths), self.capture_num_tokens
        if forward.spec_info.coded is not None or forward.spec_info.packed:
            return CODES
        if not self.attn_backend.supports_ragged_verify_graph:
            return NOT_RAGGED
        if tokens > grid[-1] or len(lengths) > self.max_bs:
            return TOO_LARGE
        graph: int = round_up_grid(tokens, grid)
        spare = graph - tokens
        if spare and len(lengths) == self._ragged_capture_slots(graph):
            longest = self.model_runner.model_config.context_len
            if int(forward.seq_lens_cpu[-1]) + spare > longest:
                return NO_SPARE_ROW
        return graph

    def can_run_graph(self, forward_batch: ForwardBatch) -> bool:
        """Return whether a graph fits a forward; counts forwards without one."""
        reason: str | None = None
        if forward_batch.forward_mode.is_decode():
            fits = self.decodes.can_run_graph(forward_batch)
        else:
            # SGLang compares the number of tokens, which may match a graph by chance.
            reason = getattr(forward_batch.spec_info, "eager", None)
            fits = reason is None and super().can_run_graph(forward_batch)
        if fits:
            self.replayed += 1
        else:
            self._count_eager(reason or NOT_CAPTURED)
        return bool(fits)

    def execute(self, forward_batch: ForwardBatch, *args: Any, **kwargs: Any) -> Any:
        """Run a forward in its graph."""
        if forward_batch.forward_mode.is_decode():
            return self.decodes.execute(forward_batch, *args, **kwargs)
        return super().execute(forward_batch, *args, **kwargs)

    def _count_eager(self, reason: str) -> None:
        if reason not in self.eager:
            logger.warning("VeriCache: forwards run without CUDA graphs: %s", reason)
        self.eager[reason] += 1


def present(forward: ForwardBatch, model_runner: ModelRunner) -> None:
    """Prepare a mixed forward for a GPU backend, in place, without synchronising.

    The rows' query lengths go to the spec input and ``seq_lens`` become the lengths
    before the queries (``seq_lens_cpu`` keep the full lengths). If a graph fits, the
    tokens are padded to the graph's size; padding belongs to no row and writes its KV
    to SGLang's dummy slot 0. Follows SGLang's DSPARK worker (``dspark_verify.py``,
    ``_run_ragged``). On a CPU nothing changes.

    Args:
        forward: A TARGET_VERIFY whose ``extend_seq_lens`` and ``extend_prefix_lens``
            are exact on the device; on the host only ``extend_seq_lens_cpu`` is.
        model_runner: The target's runner.
    """
    runner = model_runner.decode_cuda_graph_runner
    if runner is None and str(model_runner.device).startswith("cpu"):
        return
    spec_info, own = forward.spec_info, sum(forward.extend_seq_lens_cpu)
    graph = own if runner is None else runner.tokens_of(forward)
    if isinstance(graph, str):
        spec_info.eager, graph = graph, own
    # Built on the device: building from a list would wait for the running forward.
    spec_info.ragged_verify_layout = RaggedVerifyLayout.from_verify_lens_device(
        verify_lens=forward.extend_seq_lens, graph_num_tokens=graph
    )
    forward.seq_lens = forward.extend_prefix_lens.to(torch.int64)
    for name in ("input_ids", "positions", "out_cache_loc"):
        padded = torch.nn.functional.pad(getattr(forward, name), (0, graph - own))
        setattr(forward, name, padded)


def graph_figures(model_runner: ModelRunner) -> dict[str, int]:
    """Return the number of forwards that ran with and without graphs."""
    runner = getattr(model_runner, "decode_cuda_graph_runner", None)
    if runner is None:  # none were captured, or not yet
        return {"graph_forwards": 0, "eager_forwards": 0}
    return {
        "graph_forwards": runner.replayed,
        "eager_forwards": sum(runner.eager.values()),
    }


def eager_reasons(model_runner: ModelRunner) -> dict[str, int]:
    """Return reason -> number of forwards that ran without a graph."""
    runner = getattr(model_runner, "decode_cuda_graph_runner", None)
    return {} if runner is None else dict(runner.eager)


# -- called by the hooks on SGLang's model runner (patches: decode_cuda_graph) ---------


def runner_class(original: Callable[..., Any], model_runner: ModelRunner) -> Any:
    """Return the class of the decode graphs' runner."""
    return MixedGraphRunner if _ours(model_runner) else original(model_runner)


def logits_rows(original: Callable[..., int], model_runner: ModelRunner) -> int:
    """Return the rows of the logits buffer that all graphs share."""
    if not _ours(model_runner):
        return original(model_runner)
    width = model_runner.decode_num_tokens_per_req()
    sizes, _ = get_batch_sizes_to_capture(model_runner, width)
    return _sizes(max(sizes), width)[-1]


def _ours(model_runner: ModelRunner) -> bool:
    return bool(model_runner.spec_algorithm.name == NAME)


def _sizes(rows: int, width: int) -> tuple[int, ...]:
    """Return the token counts of graphs for ``rows`` rows of at most ``width`` each."""
    config = served_config()
    if config is None:
        return graph_tokens(rows, width - 1, 1)
    proposals = config.proposals
    return graph_tokens(rows, width - 1 - proposals, config.max_verifies, proposals)


@contextmanager
def _longest_row(backend: Any, tokens: int) -> Iterator[None]:
    """Tell FlashAttention that no row of a graph has more queries than the graph.

    It takes the longest draft for the bound, and by the bound its tile: one of 128
    query heads computes twice what one of 64, which decoding has, does.
    """
    if not hasattr(backend, "fa_impl_ver"):
        yield
        return
    bound = backend.speculative_num_draft_tokens
    backend.speculative_num_draft_tokens = min(bound, tokens)
    try:
        yield
    finally:
        backend.speculative_num_draft_tokens = bound


@contextmanager
def _without_speculation(model_runner: ModelRunner) -> Iterator[None]:
    """Hide the speculative settings from SGLang inside the context.

    An attention backend built there has no verification buffers either.
    """
    algorithm = model_runner.spec_algorithm
    model_runner.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        with get_spec().override(**dict.fromkeys(SPECULATIVE)):
            yield
    finally:
        model_runner.spec_algorithm = algorithm
