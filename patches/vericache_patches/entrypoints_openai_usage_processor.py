"""Hook on ``entrypoints/openai/usage_processor.py``: statistics in ``usage``."""

from __future__ import annotations

from functools import cache
from typing import Any

from vericache_patches.record import Hook, Patch
from vericache_sglang.former_names import with_former_names
from vericache_sglang.observability.request_stats import KEY


def usage_of(
    original: Hook, prompt_tokens: int, completion_tokens: int, *args: Any, **more: Any
) -> Any:
    """Add the statistics that come with the count of completion tokens, if any."""
    stats = getattr(completion_tokens, KEY, None)
    if stats is None:
        return original(prompt_tokens, completion_tokens, *args, **more)
    _open_usage()  # instances created earlier do not allow extra fields
    usage = original(prompt_tokens, int(completion_tokens), *args, **more)
    setattr(usage, KEY, with_former_names("meta_info", stats))
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


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.entrypoints.openai.usage_processor."
                "UsageProcessor.calculate_token_usage"
            ),
            kind="around",
            args=(
                *("prompt_tokens", "completion_tokens", "reasoning_tokens"),
                *("cached_tokens", "image_tokens", "audio_tokens", "video_tokens"),
            ),
            reason="Usage holds counts of tokens only, and is declared closed.",
            remove_when="SGLang takes per-request values from a spec worker.",
        ),
        usage_of,
    ),
)
