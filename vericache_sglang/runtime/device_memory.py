"""Describes a running server to the memory ledger, from SGLang's resolved arguments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import get_server_args

from vericache_sglang.errors import ConfigError, UnsupportedError
from vericache_sglang.planning.memory import (
    DEFAULT_RUNNING,
    GIB,
    Deployment,
    subtracted_bytes,
)
from vericache_sglang.planning.models import (
    ModelShape,
    predictor_of,
    shape_of,
    stored_bytes,
)
from vericache_sglang.runtime.algorithm import served_config
from vericache_sglang.runtime.draft_model import draft_model_config
from vericache_sglang.runtime.planned_memory import compression
from vericache_sglang.runtime.staging_size import staging_slots

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vericache_sglang.config.schema import VeriCacheConfig


def deployment(
    config: VeriCacheConfig,
    args: Any,
    weight_bytes: int | None = 0,
    gpu_mib: float = 0,
) -> Deployment:
    """Describe a server to the memory ledger.

    Args:
        config: Settings of VeriCache.
        args: SGLang's resolved arguments, with the backend and graph sizes chosen.
        weight_bytes: Bytes of the weights on all ranks; 0 if they are already loaded,
            None to estimate them.
        gpu_mib: Memory of one GPU in MiB; 0 if its free bytes are known.

    Raises:
        UnsupportedError: The weights of this kind of model cannot be estimated.
    """
    model = model_config_of(args)
    running = args.max_running_requests or DEFAULT_RUNNING
    if args.disaggregation_mode == "decode":  # requests whose KV is arriving
        running += args.disaggregation_decode_extra_slots or 0
    graphs = args.cuda_graph_config
    rows = 0
    if graphs.decode.backend != Backend.DISABLED:
        # As in get_batch_sizes_to_capture, which is bounded by the block table's rows.
        rows = min(max(graphs.decode.bs), running)
    prefill = graphs.prefill.backend != Backend.DISABLED
    chunk = args.chunked_prefill_size
    return Deployment(
        model=_shape(model, weight_bytes),
        config=config,
        gpu_mib=gpu_mib,
        fraction=args.mem_fraction_static or 0.0,
        context=model.context_len,
        running=running,
        chunk=chunk if chunk > 0 else args.max_prefill_tokens,
        backend=args.attention_backend,
        graph_rows=rows,
        prefill_graphs=len(graphs.prefill.bs) if prefill else 0,
        ranks=args.tp_size,
        page=args.page_size,
        most_slots=args.max_total_tokens,
        draft=_draft_shape(config, args, weight_bytes),
        **compression(config),
    )


def _draft_shape(
    config: VeriCacheConfig, args: Any, weight_bytes: int | None
) -> ModelShape | None:
    """Return the shape of the small model or head, if any; see ``deployment``."""
    if not config.inner_weights:
        return None
    if config.inner == "mtp":
        return predictor_of(_shape(model_config_of(args), weight_bytes))
    draft = draft_model_config(args)
    # As the served model's weights, they may be loaded already.
    if weight_bytes != 0:
        folder = model_folder(draft.model_path, args.speculative_draft_model_revision)
        weight_bytes = stored_bytes(folder)
    return _shape(draft, weight_bytes)


def reserved_bytes(budget: int) -> int:
    """Return the bytes on this rank that must not be used for SGLang's own KV slots.

    0 if VeriCache is off.

    Args:
        budget: Bytes that SGLang would use for its KV slots.

    Raises:
        ConfigError: No bytes would be left for KV slots.
    """
    config = served_config()
    if config is None:
        return 0
    server = deployment(config, resolving_view(get_server_args()))
    tables = subtracted_bytes(server, budget)
    slots = staging_slots(max(0, budget - tables) // server.slot_bytes)
    staging = slots * server.slot_bytes
    if tables + staging >= budget:
        raise ConfigError(
            f"--vericache-staging-tokens: a staging buffer of {slots} slots takes "
            f"{staging / GIB:.1f} GiB, block tables, logits and scratch "
            f"{tables / GIB:.1f} GiB, and {budget / GIB:.1f} GiB are left for all KV; "
            "set it or --max-running-requests lower, or raise --mem-fraction-static"
        )
    return tables + staging


def known_weights(args: Any) -> int | None:
    """Return the total bytes of the weights on all ranks, before they are loaded.

    Args:
        args: SGLang's resolved arguments.

    Returns:
        The size of the files if they are on this machine, else computed from the
        shapes; None if the weights are quantized, offloaded or of unknown layout.
    """
    model = model_config_of(args)
    packed = bool(getattr(model.hf_config, "quantization_config", None))
    if (args.quantization and not packed) or args.cpu_offload_gb:
        return None
    stored = stored_bytes(model_folder(model.model_path, args.revision))
    if packed:
        return stored
    if stored is not None:
        kind = getattr(model.hf_text_config, "dtype", None) or model.dtype
        size: int = stored * model.dtype.itemsize // kind.itemsize
        return size
    try:
        gated = getattr(model.hf_text_config, "hidden_act", "") in ("silu", "swish")
        return _shape(model, None).weight_bytes if gated else None
    except UnsupportedError:
        return None


def model_folder(name: str, revision: str | None) -> Path:
    """Return a model's folder, or its snapshot in the Hugging Face cache."""
    if Path(name).is_dir():
        return Path(name)
    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # a path that is no folder
        cached = None
    return Path(cached).parent if isinstance(cached, str) else Path(name)


def _shape(model: Any, weight_bytes: int | None) -> ModelShape:
    """Return the shape of a model from SGLang's model config."""
    text: Mapping[str, object] = model.hf_text_config.to_dict()
    fields: dict[str, object] = {
        name: value
        for name, value in text.items()
        if isinstance(value, int) and value > 0
    }
    fields |= {
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.get_total_num_kv_heads(),
        "head_dim": model.head_dim,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
        "eagle_config": text.get("eagle_config"),
    }
    return shape_of(fields, model.model_path, weight_bytes)
