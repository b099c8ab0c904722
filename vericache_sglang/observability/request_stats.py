"""Per-request speculation statistics, for ``meta_info``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vericache_sglang.former_names import with_former_names

KEY = "vericache"
"""Key of a request's options in ``custom_params`` and of its statistics in
``meta_info``."""


@dataclass(slots=True)
class RequestStats:
    """Totals of one request since its last prefill.

    SGLang's streamer slices a list of per-token values in ``Req.customized_info``. A
    slice of this object is a list of one entry, the totals so far. The hook on the
    tokenizer manager (patches: managers_tokenizer_manager) keeps the last entry.

    Attributes:
        enabled: Whether the request may speculate.
        draft_length: Most drafts per cycle, in tokens, without proposals.
        proposals: Most tokens that an inner drafter may propose per row.
        reported: Whether OpenAI's ``usage`` includes the statistics too.
        cycles: Draft-verify cycles.
        drafted: Drafts verified.
        accepted: Drafts accepted; bonus tokens are not counted.
        inner_proposed: Tokens that the inner drafter proposed in its rows.
        inner_accepted: Those that the model agreed with.
        histogram: Accepted drafts per cycle -> number of cycles.
        staged_bytes: Bytes of its prefetches; a shared one counts for the request that
            started it.
        moves: Kind of KV move -> count.
        path: Where a drafter has it decoded: "b1", "p1", "p2" or "local"; "" on others.
    """

    enabled: bool
    draft_length: int
    reported: bool = False
    proposals: int = 0
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    inner_proposed: int = 0
    inner_accepted: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    staged_bytes: int = 0
    moves: Counter[str] = field(default_factory=Counter)
    path: str = ""

    def note_cycle(self, drafted: int, accepted: int) -> None:
        """Count one draft-verify cycle."""
        self.cycles += 1
        self.drafted += drafted
        self.accepted += accepted
        self.histogram[accepted] += 1

    def note_proposals(self, proposed: int, accepted: int) -> None:
        """Count the proposals in one row."""
        self.inner_proposed += proposed
        self.inner_accepted += accepted

    def report(self) -> dict[str, Any]:
        """Return the totals as plain values, under former names too."""
        longest = max(self.histogram, default=-1)
        totals = {
            "enabled": self.enabled,
            "draft_length": self.draft_length,
            "cycles": self.cycles,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "inner_proposed": self.inner_proposed,
            "inner_accepted": self.inner_accepted,
            "accepted_histogram": [self.histogram[n] for n in range(longest + 1)],
            "staged_bytes": self.staged_bytes,
            "kv_moves": dict(self.moves),
            "reported": self.reported,
        }
        if self.path:
            totals["path"] = self.path
        return with_former_names("meta_info", totals)

    def __getitem__(self, tokens: slice) -> list[dict[str, Any]]:
        return [self.report()]


SUMMED = ("cycles", "drafted", "accepted", "staged_bytes")
"""Statistics that add up over the choices of a response."""


class TokenCount(int):
    """A count of completion tokens that carries statistics to ``usage``.

    SGLang makes ``usage`` of counts of tokens only. The sum of counts carries the sums
    of their statistics.
    """

    vericache: dict[str, int]

    @classmethod
    def of(cls, tokens: int, stats: dict[str, Any]) -> TokenCount:
        """Return the count of a request with such statistics (``report``)."""
        count = cls(tokens)
        count.vericache = {name: stats[name] for name in SUMMED}
        return count

    def __add__(self, other: int) -> TokenCount:
        if not isinstance(other, int):
            return NotImplemented
        more = getattr(other, KEY, {})
        total = TokenCount(int(self) + int(other))
        total.vericache = {k: n + more.get(k, 0) for k, n in self.vericache.items()}
        return total

    __radd__ = __add__
