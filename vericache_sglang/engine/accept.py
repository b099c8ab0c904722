"""Which drafted tokens a verification keeps (paper section 4.1, step 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def accepted_tokens(drafts: Sequence[int], target: Sequence[int]) -> list[int]:
    """Return the longest agreeing run of drafts and the target's next token.

    Args:
        drafts: d drafted tokens, d >= 0.
        target: d + 1 tokens of the full-KV model: ``target[i]`` follows the verified
            text and ``drafts[:i]``.

    Returns:
        Between 1 and d + 1 tokens, equal to what one-token full-KV decoding emits.

    Raises:
        ValueError: ``target`` is not one longer than ``drafts``.
    """
    if len(target) != len(drafts) + 1:
        raise ValueError(f"{len(drafts)} drafts need {len(drafts) + 1} target tokens")
    agreed = 0
    while agreed < len(drafts) and drafts[agreed] == target[agreed]:
        agreed += 1
    return list(target[: agreed + 1])
