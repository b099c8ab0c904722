"""Hook on ``sglang/srt/arg_groups/lora_hook.py``: adapters with our algorithm."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch

ALGORITHM = "VERICACHE"


def check_lora_speculative_compatibility(original: Hook, server_args: Any) -> None:
    """Allow adapters with our algorithm; keep upstream's check for all others."""
    if str(server_args.speculative_algorithm or "").upper() != ALGORITHM:
        original(server_args)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.arg_groups.lora_hook.check_lora_speculative_compatibility"
            ),
            kind="around",
            args=("server_args",),
            reason="It names the algorithms that may serve adapters; ours drafts with "
            "the request's own adapter and says how long each row is. No resolution "
            "hook wraps the check.",
            remove_when="SGLang asks a registered algorithm whether it serves LoRA.",
        ),
        check_lora_speculative_compatibility,
    ),
)
