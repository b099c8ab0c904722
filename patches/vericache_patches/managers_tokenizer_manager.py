"""Hook on ``sglang/srt/managers/tokenizer_manager.py``: per-request statistics."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch
from vericache_sglang.observability.request_stats import KEY, TokenCount


def update_request_meta_info(
    original: Hook,
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, Any],
    *rest: Any,
    **more: Any,
) -> None:
    """Put the latest statistics into ``meta_info``; upstream handles the rest."""
    (index, *_) = rest or (more["index"],)
    stats = customized_info.get(KEY)
    others = {key: each for key, each in customized_info.items() if key != KEY}
    original(manager, meta_info, state, others, *rest, **more)
    if stats is not None and stats[index] and stats[index][-1] is not None:
        meta_info[KEY] = stats[index][-1]
        if meta_info[KEY]["reported"]:
            tokens = meta_info.get("completion_tokens", 0)
            meta_info["completion_tokens"] = TokenCount.of(tokens, meta_info[KEY])
    finished = getattr(manager, "vericache_finished", None)
    if finished is not None:  # the consistency check's
        finished(state, meta_info)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.managers.tokenizer_manager."
                "TokenizerManager.update_request_meta_info"
            ),
            kind="around",
            args=(
                *("self", "meta_info", "state", "customized_info", "index"),
                "finish_reason",
            ),
            reason="Upstream makes a list with an entry per token of everything a "
            "worker adds to meta_info (customized_info).",
            remove_when="SGLang takes per-request values from a spec worker.",
        ),
        update_request_meta_info,
    ),
)
