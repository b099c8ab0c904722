"""The plugin SGLang loads in every process: registries, patches, the algorithm name."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vericache_sglang.config.schema import VeriCacheConfig

logger = logging.getLogger(__name__)


def register() -> None:
    """Install VeriCache in this process, or leave SGLang as it is when switched off.

    The algorithm's name is registered last: when anything before it fails, SGLang
    itself refuses ``--speculative-algorithm VERICACHE``, because its loader only logs
    what a plugin raises.

    Raises:
        UpstreamDriftError: A patch no longer fits the installed SGLang.
        ConfigError: The settings in the environment are wrong.
    """
    from vericache_sglang.attention import registry as attention_backends
    from vericache_sglang.config.files import active_config, is_disabled
    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.prefix_cache import tiered_cache

    _register_hooks()
    attention_backends.register()
    tiered_cache.register()
    config = active_config() or VeriCacheConfig()
    if not is_disabled():
        _check_requests(config)
    _register_algorithm(config)


def apply_hooks() -> None:
    """Apply all hooks, in a process that forks servers; ``register`` finds them there.

    Raises:
        UpstreamDriftError: As ``register`` does.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    _register_hooks()
    HookRegistry.apply_hooks()


def _register_hooks() -> None:
    from vericache_patches import apply
    from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

    define_missing_ops()
    apply.register(_hooks())


def _hooks() -> tuple[Any, ...]:
    """Return the records and hooks that this machine needs."""
    from vericache_patches import apply
    from vericache_sglang.platforms.cpu import hooks, platform

    return (*apply.hooks(), *(hooks.HOOKS if platform.needed() else ()))


def _check_requests(config: VeriCacheConfig) -> None:
    """Install the request checks (patches: io_struct, tokenizer_manager_checks)."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    from vericache_sglang.serving.refused_requests import (
        check_copies,
        check_request,
        limits,
    )

    def check(request: Any, input_ids: Any, vocabulary: int, labels: Any) -> None:
        names = None if labels is None else frozenset(labels)
        check_request(request, input_ids, limits(vocabulary, config, names))

    GenerateReqInput.vericache_check = staticmethod(check_copies)
    TokenizerManager.vericache_check = staticmethod(check)


def _register_algorithm(config: Any) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from vericache_sglang.runtime.algorithm import NAME, VeriCacheAlgorithm
    from vericache_sglang.serving.start import check_start

    VeriCacheAlgorithm.refuse = staticmethod(partial(check_start, config))
    VeriCacheAlgorithm.most_drafts = config.most_drafts

    @SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, spec_class=VeriCacheAlgorithm
    )
    def worker_class(server_args: Any) -> Any:
        from vericache_patches.apply import require_applied
        from vericache_sglang.runtime.worker import VeriCacheWorker

        require_applied(_hooks())
        return partial(VeriCacheWorker, config)
