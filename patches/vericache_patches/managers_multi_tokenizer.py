"""Hook on ``sglang/srt/managers/multi_tokenizer_mixin.py``: plugins of HTTP workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vericache_patches.record import Hook, Patch

if TYPE_CHECKING:
    from collections.abc import Callable


class LoadingInfo(dict[str, Any]):
    """A dictionary that loads SGLang's plugins in the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[dict[str, Any]]]:
        """Return how ``pickle`` makes a plain dictionary of it."""
        return load, (dict(self),)


def load(info: dict[str, Any]) -> dict[str, Any]:
    """Load SGLang's plugins; return ``info``."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    return info


def write_data_for_multi_tokenizer(
    original: Callable[..., Any],
    port_args: Any,
    server_args: Any,
    scheduler_info: dict[str, Any],
) -> Any:
    """Have every HTTP worker load the plugins as it reads its arguments."""
    return original(port_args, server_args, LoadingInfo(scheduler_info))


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.managers.multi_tokenizer_mixin."
                "write_data_for_multi_tokenizer"
            ),
            kind="around",
            args=("port_args", "server_args", "scheduler_info"),
            reason="HTTP workers of --tokenizer-worker-num load no plugins, so they do "
            "not know the algorithm; they unpickle what this function writes.",
            remove_when="SGLang's init_multi_tokenizer calls load_plugins.",
        ),
        write_data_for_multi_tokenizer,
    ),
)
