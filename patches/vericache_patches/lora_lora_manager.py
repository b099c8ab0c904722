"""Hooks on ``sglang/srt/lora/lora_manager.py``: adapters on a CPU."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

from vericache_patches.record import Hook, Patch

MODULE = "sglang.srt.lora.lora_manager.LoRAManager"


class Unpinned(TorchFunctionMode):
    """Inside the context no tensor is allocated in pinned memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call ``func`` without ``pin_memory``."""
        if getattr(func, "__name__", "") == "pin_memory":
            return args[0]
        wishes = dict(kwargs or {})
        wishes.pop("pin_memory", None)
        return func(*args, **wishes)


def unpinned(original: Hook, *args: Any, **kwargs: Any) -> Any:
    """Run the original without pinning."""
    with Unpinned():
        return original(*args, **kwargs)


REASON = "Adapters and their batch information are pinned without asking whether there "
REASON += (
    "is an accelerator to pin for, so a CPU server with an adapter does not start."
)
REMOVE_WHEN = "SGLang asks is_pin_memory_available before it pins for LoRA."

HOOKS: tuple[tuple[Patch, Hook], ...] = tuple(
    (
        Patch(
            target=f"{MODULE}.{name}",
            kind="around",
            args=args,
            reason=REASON,
            remove_when=REMOVE_WHEN,
            where="cpu",
        ),
        unpinned,
    )
    for name, args in (
        ("init_state", ("self", "max_lora_rank", "target_modules", "lora_paths")),
        ("load_lora_adapter", ("self", "lora_ref")),
        ("prepare_lora_batch", ("self", "forward_batch")),
    )
)
