"""Hooks on ``sglang/srt/disaggregation/decode.py``: slots for KV that arrives."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch

QUEUE = "sglang.srt.disaggregation.decode.DecodePreallocQueue"


def pre_alloc(original: Hook, queue: Any, req: Any, *rest: Any, **more: Any) -> Any:
    """Let the device finish with the slots before another machine writes to them."""
    import torch

    from vericache_sglang.runtime.algorithm import served_config

    if served_config() is not None:
        device = queue.token_to_kv_pool_allocator.device
        torch.get_device_module(device).synchronize()
    return original(queue, req, *rest, **more)


def allocatable_budget(original: Hook, queue: Any, *rest: Any, **more: Any) -> int:
    """Leave out the slots that swapped-out requests need to continue."""
    free: int = original(queue, *rest, **more)
    running = queue.scheduler.running_batch.reqs
    return free - sum(getattr(req, "vericache_swapped_slots", 0) for req in running)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=f"{QUEUE}._pre_alloc",
            kind="around",
            args=("self", "req", "prefix_indices", "prefix_len", "total_prefix_len"),
            reason="A compressed prompt's slots are freed once their copy to the host "
            "was launched: later forwards of this device wait for it, the network "
            "does not.",
            remove_when="SGLang orders transfers behind the stream that freed a slot.",
        ),
        pre_alloc,
    ),
    (
        Patch(
            target=f"{QUEUE}._allocatable_token_budgets",
            kind="around",
            args=(
                *("self", "retractable_tokens", "count_retracted"),
                *("extra_reserved_reqs", "reserved_tokens", "hicache_reserved_tokens"),
            ),
            reason="As in managers_schedule_policy: newcomers would starve a "
            "swapped-out request.",
            remove_when="SGLang asks its spec worker what running requests need.",
        ),
        allocatable_budget,
    ),
)
