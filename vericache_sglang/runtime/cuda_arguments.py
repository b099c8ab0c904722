"""Chooses the attention backend and the CUDA graphs of a GPU server."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.cuda_graph_hook import generate_decode_cuda_graph_batch_sizes
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

from vericache_sglang.attention.layer import BACKEND_NAME
from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.config.files import active_config
from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.errors import UnsupportedError
from vericache_sglang.planning.memory import DEFAULT_RUNNING

if TYPE_CHECKING:
    from vericache_sglang.compression.compressor import Compressor

logger = logging.getLogger(__name__)

STOCK_BACKENDS = ("fa3", "trtllm_mha")
"""SGLang's full-attention backends that serve ragged rows with and without CUDA graphs
(0.5.21, ``supports_ragged_verify_graph``)."""

RAGGED_MODE = "SGLANG_RAGGED_VERIFY_MODE"
"""SGLang's environment variable; "compact" keys graphs by tokens instead of rows."""

UNTRIED = (
    "VeriCache: of GPUs only H200s have run this, for half an hour in all "
    "(docs/gpu.md); --vericache-consistency-check-rate 0.1 compares every tenth answer "
    "with plain decoding"
)

REORDERED = (
    "VeriCache: --vericache-residency host brings KV back in another order than plain "
    "decoding reads it in, so under --enable-deterministic-inference tokens that are "
    "nearly as likely may differ from plain SGLang's; auto and device keep the order"
)

_BACKEND_FIELDS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
)


def settle(args: Any) -> None:
    """Set the arguments the user left open, after SGLang has resolved its own.

    Args:
        args: Argument of ``CustomSpecAlgo.handle_server_args``, resolved so far; only
            declared fields are assigned.

    Raises:
        UnsupportedError: The requested backend does not read codes.
        ConfigError: The compressor line is invalid.
    """
    logger.warning(UNTRIED)
    config = active_config() or VeriCacheConfig()
    if args.enable_deterministic_inference and config.residency == "host":
        logger.warning(REORDERED)
    compressor = create_compressor(config.compressor, config.seed)
    _choose_backend(args, compressor)
    _leave_out_graphs(args, compressor, config)
    if args.max_running_requests is None:
        args.max_running_requests = DEFAULT_RUNNING
    _size_graphs(args)


def _choose_backend(args: Any, compressor: Compressor) -> None:
    """Keep SGLang's backend if it supports ragged rows and codes, else use ours.

    Raises:
        UnsupportedError: See ``settle``.
    """
    given = [args._raw_input.get(field) for field in _BACKEND_FIELDS]
    asked = next((name for name in given if name is not None), None)
    codec = compressor.codec
    if codec is not None and asked not in (None, BACKEND_NAME):
        raise UnsupportedError(
            f"--attention-backend {asked}: only {BACKEND_NAME} reads the codes of "
            f"--vericache-compressor {codec.name}; leave --attention-backend out, or "
            "use a compressor without a codec"
        )
    if asked is None and (
        codec is not None or args.attention_backend not in STOCK_BACKENDS
    ):
        logger.info("VeriCache: attention backend %s", BACKEND_NAME)
        args.attention_backend = BACKEND_NAME
        args.prefill_attention_backend = args.decode_attention_backend = None


def _leave_out_graphs(
    args: Any, compressor: Compressor, config: VeriCacheConfig
) -> None:
    """Disable the graphs of phases that need our Python hooks in each forward."""
    needs = compressor.selector.needs if compressor.selector is not None else None
    lora = args.enable_lora or bool(args.lora_paths)
    seen = needs and (needs.q_tail or needs.q_stream or needs.hidden or needs.probes)
    ours = BACKEND_NAME in (getattr(args, field) for field in _BACKEND_FIELDS)
    reasons = {
        # Piecewise graphs do not call the hook on RadixAttention.forward either.
        Phase.PREFILL: "the compressor looks at queries"
        if seen
        else "the inner drafter reads hidden states"
        if config.inner_head
        else f"they are untried with attention backend {BACKEND_NAME}"
        if ours
        else "",
        Phase.DECODE: "LoRA's batches have rows of one length"
        if lora
        else "the compressor scores tokens while they are decoded"
        if needs and needs.hidden
        else "",
    }
    for phase, reason in reasons.items():
        if reason and args.cuda_graph_config[phase].backend != Backend.DISABLED:
            logger.warning("VeriCache: no CUDA graphs of %s: %s", phase, reason)
            args.cuda_graph_config = with_phase(
                args.cuda_graph_config, phase, backend=Backend.DISABLED
            )


def _size_graphs(args: Any) -> None:
    """Capture decode graphs in the sizes of a server without speculation.

    Their largest batch size also bounds mixed batches, whose graph sizes follow from it
    (``graph_runner.py``). A list given by the user is kept, and so is SGLang's
    memory-based limit on rows.

    Raises:
        UnsupportedError: ``RAGGED_MODE`` is set to another mode.
    """
    decode = args.cuda_graph_config.decode
    if decode.backend == Backend.DISABLED:
        return
    mode = os.environ.setdefault(RAGGED_MODE, "compact")
    if mode != "compact":
        raise UnsupportedError(
            f"{RAGGED_MODE}={mode}: mixed batches have graphs in mode compact only; "
            "unset it, or use --disable-cuda-graph"
        )
    if (Phase.DECODE, "bs") in args._cuda_graph_config_locked:
        return
    rows = min(decode.max_bs, args.max_running_requests)
    alone = SimpleNamespace(
        disable_cuda_graph_padding=args.disable_cuda_graph_padding,
        speculative_algorithm=None,
    )
    args.cuda_graph_config = with_phase(
        args.cuda_graph_config,
        Phase.DECODE,
        bs=generate_decode_cuda_graph_batch_sizes(alone, rows),
        max_bs=rows,
    )
