"""Hooks on ``entrypoints/openai/usage_processor.py``: statistics in ``usage``."""

from __future__ import annotations

from functools import cache
from typing import Any

from vericache_patches.managers_tokenizer_manager import KEY
from vericache_patches.record import Hook, Patch

SUMMED = ("rounds", "drafted", "accepted", "staged_bytes")


def usage_of(original: Hook, *args: Any, **kwargs: Any) -> Any:
    """Add statistics summed over a response's choices, or over a stream's counts."""
    if isinstance(args[0], dict):  # a stream: its counts carry the statistics
        found = [getattr(count, KEY, None) for count in args[2].values()]
    else:
        found = [each["meta_info"].get(KEY) for each in args[0]]
    known = [each for each in found if each and each["reported"]]
    if known:
        _open_usage()  # instances created earlier do not allow extra fields
    usage = original(*args, **kwargs)
    if known:
        sums = {name: sum(each[name] for each in known) for name in SUMMED}
        setattr(usage, KEY, sums)
    return usage


@cache
def _open_usage() -> None:
    """Allow undeclared fields in ``UsageInfo`` and the models that contain it."""
    from sglang.srt.entrypoints.openai import protocol as p

    p.UsageInfo.model_config["extra"] = "allow"
    p.UsageInfo.model_rebuild(force=True)
    for response in (p.CompletionResponse, p.ChatCompletionResponse):
        response.model_rebuild(force=True)
    for chunk in (p.CompletionStreamResponse, p.ChatCompletionStreamResponse):
        chunk.model_rebuild(force=True)


_TARGET = "sglang.srt.entrypoints.openai.usage_processor.UsageProcessor.calculate_"
_MORE = ("enable_cache_report", "image_tokens", "audio_tokens", "video_tokens")
_COUNTS = ("prompt_tokens", "reasoning_tokens", "completion_tokens", "cached_tokens")

HOOKS: tuple[tuple[Patch, Hook], ...] = tuple(
    (
        Patch(
            target=_TARGET + name,
            kind="around",
            args=(*args, "n_choices", *_MORE),
            reason="Usage holds counts of tokens only, and is declared closed.",
            remove_when="SGLang takes per-request values from a spec worker.",
        ),
        usage_of,
    )
    for name, args in (("response_usage", ("responses",)), ("streaming_usage", _COUNTS))
)
