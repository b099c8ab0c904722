"""Torch without pinned memory, for code that pins without asking."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


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
