"""Greedy acceptance of drafted tokens (paper section 4.1, step 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def accepted_tokens(drafts: Sequence[int], target: Sequence[int]) -> list[int]:
    """Return the longest matching prefix of drafts and the target's next token.

    Args:
        drafts: d drafted tokens, d >= 0.
        target: 1 to d + 1 tokens of the full-KV model: ``target[i]`` follows the
            verified text and ``drafts[:i]``. Fewer than d + 1 if a grammar allows
            nothing after ``drafts[len(target) - 1]``.

    Returns:
        1 to ``len(target)`` tokens, equal to autoregressive decoding with full KV.

    Raises:
        ValueError: ``target`` is empty, or longer than a verification can be.
    """
    if not 1 <= len(target) <= len(drafts) + 1:
        raise ValueError(f"{len(drafts)} drafts with {len(target)} target tokens")
    for agreed, (draft, token) in enumerate(zip(drafts, target, strict=False)):
        if draft != token:
            return list(target[: agreed + 1])
    return list(target)
