"""Per-request speculation statistics, for ``meta_info``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

KEY = "vericache"
"""Name of a request's options in ``custom_params``, of its statistics in
``meta_info``."""


@dataclass(slots=True)
class RequestStats:
    """Totals of one request since its last prefill.

    SGLang's streamer cuts a list of per-token values from ``Req.customized_info``; any
    slice of this is a list of one entry, the totals so far. The hook on the tokenizer
    manager (patches: managers_tokenizer_manager) keeps the last of them.

    Attributes:
        enabled: Speculation may be used for it.
        draft_length: Longest draft it may have.
        reported: OpenAI's ``usage`` is to hold the statistics too.
        rounds: Draft-verify cycles.
        drafted: Drafts verified.
        accepted: Drafts accepted; bonus tokens are not counted.
        histogram: Accepted drafts of a cycle -> cycles.
        staged_bytes: Bytes its prefetches put on the link; shared ones count for the
            request that started them.
        moves: Kind of change of residency -> how often.
    """

    enabled: bool
    draft_length: int
    reported: bool = False
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    staged_bytes: int = 0
    moves: Counter[str] = field(default_factory=Counter)

    def note_round(self, drafted: int, accepted: int) -> None:
        """Count one draft-verify cycle."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.histogram[accepted] += 1

    def report(self) -> dict[str, Any]:
        """Return the totals as plain values."""
        longest = max(self.histogram, default=-1)
        return {
            "enabled": self.enabled,
            "draft_length": self.draft_length,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_histogram": [self.histogram[n] for n in range(longest + 1)],
            "staged_bytes": self.staged_bytes,
            "residency_changes": dict(self.moves),
            "reported": self.reported,
        }

    def __getitem__(self, tokens: slice) -> list[dict[str, Any]]:
        return [self.report()]
