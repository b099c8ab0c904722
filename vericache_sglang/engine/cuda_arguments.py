"""What SGLang's arguments become on a GPU: an attention backend, and which graphs."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.config.files import active_config
from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.engine.attention_layer import BACKEND_NAME
from vericache_sglang.engine.capture_sizes import batch_sizes
from vericache_sglang.engine.coded_rows import step_of
from vericache_sglang.errors import CompressionError, UnsupportedError

if TYPE_CHECKING:
    from vericache_sglang.compression.compressor import Compressor

logger = logging.getLogger(__name__)

STOCK_BACKENDS = ("fa3", "trtllm_mha")
"""SGLang's own backends that serve rows of mixed lengths, in graphs and without: those
for full attention that say so (0.5.21, ``supports_ragged_verify_graph``)."""

RAGGED_MODE = "SGLANG_RAGGED_VERIFY_MODE"
"""SGLang's variable; "compact" has it key graphs by tokens and not by rows."""

UNTRIED = (
    "VeriCache: nothing of this has run on a GPU yet; --vericache-shadow-rate 0.1 "
    "compares every tenth answer with plain decoding"
)

_BACKEND_FIELDS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
)


def settle(args: Any) -> None:
    """Choose what the user has left open; waits for SGLang to have chosen first.

    Args:
        args: What ``CustomSpecAlgo.handle_server_args`` gets, resolved so far; assigned
            fields are declared.

    Raises:
        UnsupportedError: The compressor's codes are read by no backend that may run.
        ConfigError: The compressor's line is refused.
    """
    logger.warning(UNTRIED)
    config = active_config() or VeriCacheConfig()
    compressor = create_compressor(config.compressor, config.seed)
    _choose_backend(args, compressor)
    _leave_out_graphs(args, compressor)
    _size_graphs(args, config)


def _choose_backend(args: Any, compressor: Compressor) -> None:
    """Keep SGLang's choice where it can serve us, else take our own backend."""
    given = [args._raw_input.get(field) for field in _BACKEND_FIELDS]
    asked = next((name for name in given if name is not None), None)
    codec = compressor.codec
    if codec is not None:
        _check_codec(codec, asked)
    if asked is None and (
        codec is not None or args.attention_backend not in STOCK_BACKENDS
    ):
        logger.info("VeriCache: attention backend %s", BACKEND_NAME)
        args.attention_backend = BACKEND_NAME
        args.prefill_attention_backend = args.decode_attention_backend = None


def _check_codec(codec: Any, backend: str | None) -> None:
    """Refuse codes that nothing on a GPU reads.

    Raises:
        UnsupportedError: See ``settle``.
    """
    if backend not in (None, BACKEND_NAME):
        raise UnsupportedError(
            f"--attention-backend {backend}: only {BACKEND_NAME} reads the codes of "
            f"--vericache-compressor {codec.name}; leave --attention-backend out, or "
            "use a compressor without a codec"
        )
    try:
        step_of(codec.without_tail())
    except CompressionError as error:
        raise UnsupportedError(
            f"--vericache-compressor: {error}; use another codec, or --device cpu"
        ) from error


def _leave_out_graphs(args: Any, compressor: Compressor) -> None:
    """Have run in Python what must: a replayed graph calls none of our hooks."""
    needs = compressor.selector.needs if compressor.selector is not None else None
    lora = args.enable_lora or bool(args.lora_paths)
    watched = needs and (needs.q_tail or needs.q_stream or needs.hidden or needs.probes)
    reasons = {
        # The hook on RadixAttention.forward is not called at a graph's break either.
        Phase.PREFILL: "the compressor looks at queries" if watched else "",
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


def _size_graphs(args: Any, config: VeriCacheConfig) -> None:
    """Have graphs captured by tokens, for the sizes of mixed batches.

    A list of the user's is kept; so is SGLang's limit, by memory, on the rows.
    """
    decode = args.cuda_graph_config.decode
    if decode.backend == Backend.DISABLED:
        return
    os.environ.setdefault(RAGGED_MODE, "compact")
    if (Phase.DECODE, "bs") in args._cuda_graph_config_locked:
        return
    rows = min(decode.max_bs, args.max_running_requests or decode.max_bs)
    sizes = batch_sizes(rows, config.draft_length, config.max_verifies)
    args.cuda_graph_config = with_phase(
        args.cuda_graph_config, Phase.DECODE, bs=list(sizes), max_bs=rows
    )
