"""Every check between parsed arguments and an allocated server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.model_override_base import model_config_of

from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.serving.refusals import (
    check_model,
    check_server_args,
    check_sglang_version,
)

if TYPE_CHECKING:
    from vericache_sglang.config.schema import VeriCacheConfig


def check_start(config: VeriCacheConfig, server_args: Any) -> None:
    """Refuse what cannot be served exactly; runs wherever SGLang resolves arguments.

    Args:
        config: The settings of this process.
        server_args: SGLang's ``ServerArgs``; read only.

    Raises:
        UnsupportedError: The SGLang version, a flag or the model is refused.
        ConfigError: The compressor's line is refused.
    """
    check_sglang_version()
    create_compressor(config.compressor, config.seed)
    check_server_args(server_args)
    check_model(model_config_of(server_args))
