"""Runs every startup check, after argument parsing and before allocation."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.utils.common import get_device_memory_capacity

from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.memory import GIB, ledger, shortage
from vericache_sglang.runtime.device_memory import deployment, known_weights
from vericache_sglang.serving.refusals import (
    check_decode_server,
    check_draft_first,
    check_drafter,
    check_model,
    check_role,
    check_server_args,
    check_sglang_version,
)

if TYPE_CHECKING:
    from vericache_sglang.config.schema import VeriCacheConfig


logger = logging.getLogger(__name__)


def check_start(config: VeriCacheConfig, server_args: Any) -> None:
    """Refuse unsupported configurations; runs wherever SGLang resolves arguments.

    Args:
        config: The settings of this process.
        server_args: SGLang's ``ServerArgs``; read only.

    Raises:
        UnsupportedError: The SGLang version, a flag, the model or the inner drafter
            is refused.
        ConfigError: The compressor's line is refused, or the GPU is too small.
    """
    check_sglang_version()
    create_compressor(config.compressor, config.seed)
    check_server_args(server_args)
    check_decode_server(config, server_args)
    check_role(config, server_args)
    check_draft_first(config, server_args)
    model = model_config_of(server_args)
    check_model(model)
    check_drafter(config, server_args, model)
    if str(server_args.device).startswith("cuda") and torch.cuda.is_available():
        check_memory(config, server_args, get_device_memory_capacity("cuda"))


def check_memory(
    config: VeriCacheConfig, server_args: Any, gpu_mib: float | None
) -> None:
    """Confirm, before the model is loaded, that the memory the flags need fits a GPU.

    Nothing is refused if the size of the weights is unknown.

    Args:
        config: The settings of this process.
        server_args: SGLang's resolved arguments, with the graph sizes chosen.
        gpu_mib: Memory of one GPU, in MiB, as nvidia-smi reports it; None: unknown.

    Raises:
        ConfigError: It does not fit; the message names the largest tensors and flags.
    """
    weights = known_weights(server_args)
    if weights is None or gpu_mib is None or not server_args.mem_fraction_static:
        return
    found = ledger(deployment(config, server_args, weights, gpu_mib))
    missing = shortage(found)
    if missing:
        raise ConfigError(missing)
    logger.info(
        "VeriCache: expected KV pool of %d tokens and a staging buffer of %d; %.1f GiB "
        "left with everything at once (python -m vericache_sglang.plan --memory)",
        found.slots,
        found.staging,
        found.free_bytes / GIB,
    )
