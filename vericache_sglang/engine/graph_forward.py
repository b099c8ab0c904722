"""Our forwards as SGLang's ragged verification, so that its CUDA graphs serve them.

SGLang 0.5.21 captures graphs of a speculative algorithm for verifications only, by the
number of tokens ("tiers"); rows in them may have any lengths (written for DSPARK,
``speculative/ragged_verify.py``). A mixed batch is one. So is a plain decode: rows of
one token. SGLang would replay it with as many tokens a row as were captured, and read
past its end, so here every decode is presented first.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, round_up_grid

from vericache_sglang.engine.algorithm import NAME
from vericache_sglang.engine.spec_input import VeriCacheSpecInput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner import DecodeCudaGraphRunner

EAGER_COUNTER = "eager_forwards"
"""Counter of decodes and verifications that ran eagerly although there are graphs."""


def present(forward: ForwardBatch, model_runner: ModelRunner) -> None:
    """Prepare a mixed forward for the backends of a GPU, in place; waits for nothing.

    Its rows' lengths go to the spec input, ``seq_lens`` become what is in front of the
    queries (``seq_lens_cpu`` stay whole rows), and where a graph serves the forward its
    tokens are filled up to the graph's with ones of no row, whose KV goes to SGLang's
    dummy slot 0. Their logits are cut off again by ``replay``. As SGLang's DSPARK
    worker does (``dspark_verify.py``, ``_run_ragged``). On a CPU nothing is changed.

    Args:
        forward: A TARGET_VERIFY whose ``extend_seq_lens`` and ``extend_prefix_lens``
            are exact on the device; of the host's lists only the first is.
        model_runner: The target's runner.
    """
    if str(model_runner.device).startswith("cpu"):
        return
    lengths = forward.extend_seq_lens_cpu
    runner = model_runner.decode_cuda_graph_runner
    tier = None if runner is None else _tier(runner, forward, lengths)
    _attach(
        forward,
        forward.extend_seq_lens,
        forward.extend_prefix_lens.to(torch.int64),
        sum(lengths) if tier is None else tier,
    )


def graph_figures(model_runner: Any) -> dict[str, int]:
    """Return the counters of a model runner's graphs, for the worker's report."""
    return {EAGER_COUNTER: getattr(model_runner, "vericache_eager_forwards", 0)}


# -- called by the hooks on SGLang's runner (patches: decode_cuda_graph_runner) -------


def capture_input(
    original: Callable[..., Any], runner: DecodeCudaGraphRunner, num_tokens: int
) -> Any:
    """Return the spec input a graph is captured with; for ``get_spec_info``."""
    if not (_ours(runner) and runner.ragged_verify_mode):
        return original(runner, num_tokens)
    layout = runner._capture_ragged_verify_layout(num_tokens)
    if layout is None:
        return None
    spec_info = VeriCacheSpecInput(layout.bs)
    spec_info.ragged_verify_layout = layout
    return spec_info


def admits(
    original: Callable[..., Any], runner: DecodeCudaGraphRunner, forward: ForwardBatch
) -> bool:
    """Say whether a graph serves a forward; for ``can_run_graph``. Counts where not."""
    mode = forward.forward_mode
    if not _ours(runner) or mode.is_idle():
        return bool(original(runner, forward))
    if mode.is_decode():
        fits = (
            forward.replace_embeds is None
            and forward.capture_hidden_mode <= runner.capture_hidden_mode
            and _tier(runner, forward, _lengths(forward)) is not None
        )
    else:
        # SGLang looks at the number of tokens only, which another tier may have too.
        lengths = _lengths(forward)
        fits = bool(
            lengths
            and _tier(runner, forward, lengths) is not None
            and original(runner, forward)
        )
    if not fits:
        target: Any = runner.model_runner
        counted = getattr(target, "vericache_eager_forwards", 0)
        target.vericache_eager_forwards = counted + 1
    return fits


def replay(
    original: Callable[..., Any],
    runner: DecodeCudaGraphRunner,
    forward: ForwardBatch,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a forward in its graph; for ``execute``.

    Returns:
        Logits of the live tokens only: [rows, V] of a decode, else [T, V].
    """
    if not _ours(runner) or forward.forward_mode.is_idle():
        return original(runner, forward, *args, **kwargs)
    lengths = _lengths(forward)
    if forward.forward_mode.is_decode():
        forward = _as_verification(runner, forward)
    output = original(runner, forward, *args, **kwargs)
    return _live(output, sum(lengths))


# -- rows and tokens ------------------------------------------------------------------


def _ours(runner: DecodeCudaGraphRunner) -> bool:
    """Say whether a runner decodes for VeriCache."""
    return getattr(runner.model_runner.spec_algorithm, "name", "") == NAME


def _lengths(forward: ForwardBatch) -> list[int]:
    """Return the query tokens of every row."""
    if forward.forward_mode.is_decode():
        return [1] * forward.batch_size
    return list(forward.extend_seq_lens_cpu or ())


def _tier(
    runner: DecodeCudaGraphRunner, forward: ForwardBatch, lengths: Sequence[int]
) -> int | None:
    """Return the tokens of the smallest graph that serves rows; None: there is none.

    Rows that begin with codes (``spec_info.coded``) are read by kernels that no graph
    has, and a forward over copies under way (``spec_info.gate``, ``layer_gate.py``)
    asks for its layers in Python. Where a graph has no row to spare, SGLang's backends
    count the tokens of no row to the last one, which must not grow past the longest row
    they can list.
    """
    if not getattr(runner, "ragged_verify_mode", False):
        return None
    if any(getattr(forward.spec_info, name, None) for name in ("coded", "gate")):
        return None
    tokens, grid = sum(lengths), runner.capture_num_tokens
    if tokens > grid[-1] or not runner.attn_backend.supports_ragged_verify_graph:
        return None
    tier: int = round_up_grid(tokens, grid)
    spare, rows = tier - tokens, runner._ragged_capture_slots(tier)
    if len(lengths) > rows:
        return None
    if spare and len(lengths) == rows:
        longest = runner.model_runner.model_config.context_len
        totals = forward.seq_lens_cpu
        if totals is None or int(totals[-1]) + spare > longest:
            return None
    return tier


def _attach(
    forward: ForwardBatch, queries: torch.Tensor, prefixes: torch.Tensor, tokens: int
) -> None:
    """Make a forward a ragged verification of ``tokens`` tokens, in place.

    Args:
        forward: With a spec input of its own.
        queries: [R] integers on the device, query tokens of every row.
        prefixes: [R] int64 on the device, row lengths in front of them.
        tokens: At least as many as the forward has.
    """
    forward.forward_mode = ForwardMode.TARGET_VERIFY
    # Built on the device: from a list it would wait for the forward that runs.
    forward.spec_info.ragged_verify_layout = RaggedVerifyLayout.from_verify_lens_device(
        verify_lens=queries, graph_num_tokens=tokens
    )
    forward.seq_lens = prefixes
    for name in ("input_ids", "positions", "out_cache_loc"):
        own = getattr(forward, name)
        setattr(forward, name, _filled(own, tokens))


def _filled(own: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return ``tokens`` entries, those behind the given ones zero."""
    spare = tokens - len(own)
    return torch.nn.functional.pad(own, (0, spare)) if spare else own


def _as_verification(
    runner: DecodeCudaGraphRunner, forward: ForwardBatch
) -> ForwardBatch:
    """Present a decode as a verification of rows of one token; it stays as it is."""
    rows = forward.batch_size
    tier = _tier(runner, forward, [1] * rows)
    view = copy.copy(forward)
    view.spec_info = VeriCacheSpecInput(rows)
    ones = torch.ones(rows, dtype=torch.int32, device=forward.seq_lens.device)
    _attach(view, ones, forward.seq_lens - 1, rows if tier is None else tier)
    return view


def _live(output: LogitsProcessorOutput, tokens: int) -> LogitsProcessorOutput:
    """Return the outputs of the first ``tokens`` tokens."""
    cut = {
        name: None if value is None else value[:tokens]
        for name in ("next_token_logits", "hidden_states")
        for value in (getattr(output, name),)
    }
    return dataclasses.replace(output, **cut)
