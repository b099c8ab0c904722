"""Registers hooks with SGLang and verifies that all were applied."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from vericache_patches.ledger import RELIED
from vericache_patches.record import UpstreamDriftError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

    from vericache_patches.record import Hook, Patch, Symbol

HOOKED = (
    "layers_sampler",
    "arg_groups_lora_hook",
    "lora_utils",
    "model_executor_decode_cuda_graph",
    "mem_cache_block_table",
    "mem_cache_kv_cache_budget",
    "mem_cache_kv_cache_configurator",
    "managers_schedule_batch",
    "managers_batch_result",
    "managers_batch_result_grammar",
    "managers_output_streamer",
    "managers_schedule_policy",
    "managers_scheduler",
    "managers_scheduler_abort",
    "managers_scheduler_queue",
    "managers_scheduler_idle",
    "managers_scheduler_isolation",
    "managers_io_struct",
    "managers_multi_tokenizer",
    "managers_tokenizer_manager",
    "managers_tokenizer_manager_checks",
    "entrypoints_openai_usage_processor",
    "managers_scheduler_retraction",
    "managers_schedule_batch_release",
    "disaggregation_decode",
    "disaggregation_decode_slots",
    "speculative_eagle_utils",
)
"""Names of the sibling modules that define ``HOOKS``, in order of use."""


def hooked_modules() -> tuple[ModuleType, ...]:
    """Import and return the patch modules; importing them patches nothing."""
    return tuple(import_module(f"vericache_patches.{name}") for name in HOOKED)


def hooks() -> tuple[tuple[Patch, Hook], ...]:
    """Return the (record, hook) pairs that every machine needs."""
    return tuple(pair for module in hooked_modules() for pair in module.HOOKS)


def register(pairs: Iterable[tuple[Patch, Hook]]) -> None:
    """Register hooks with SGLang's HookRegistry; idempotent.

    Args:
        pairs: Records and hooks, in order of use.

    Raises:
        UpstreamDriftError: A target, or a function of ``RELIED``, is missing, takes
            other arguments or has another body than its record says; nothing was
            registered.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    pairs = tuple(pairs)
    site = sglang_site()
    needed = (*RELIED, *(patch for patch, _ in pairs))
    for symbol in sorted(needed, key=lambda symbol: symbol.target):
        _check(symbol, site)
    for patch, hook in pairs:
        known = HookRegistry._hooks.get(patch.target, ())  # no public view in 0.5.21
        if all(other is not hook for _, other, _ in known):
            HookRegistry.register(patch.target, hook, HookType(patch.kind))


@cache  # a process that was forked knows what its parent has found
def _check(symbol: Symbol, site: Path) -> None:
    symbol.check(site)


def require_applied(pairs: Iterable[tuple[Patch, Hook]]) -> None:
    """Verify that SGLang applied every hook that was registered.

    SGLang logs a failed hook and continues (0.5.21, ``HookRegistry.apply_hooks``), so
    the speculative-worker factory calls this before it builds anything.

    Args:
        pairs: As given to ``register``.

    Raises:
        UpstreamDriftError: A target is not hooked; the message lists all such targets.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    targets = {patch.target for patch, _ in pairs}
    missing = sorted(targets - HookRegistry._patched)  # no public view in 0.5.21
    if missing:
        raise UpstreamDriftError(f"not hooked: {', '.join(missing)}")


def sglang_site() -> Path:
    """Return the folder that holds the installed ``sglang`` package.

    Raises:
        UpstreamDriftError: SGLang is not installed.
    """
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise UpstreamDriftError("sglang is not installed")
    return Path(spec.submodule_search_locations[0]).parent
