"""The engine's counters, and totals that never decrease."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from vericache_sglang.observability.table import COUNTER_KEYS, ENGINE_KEYS, METRICS
from vericache_sglang.scheduling.plan import (
    Complete,
    Compress,
    Draft,
    Load,
    Move,
    Offload,
    Plain,
    Restore,
    SwapIn,
    SwapOut,
    Verify,
    Wait,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

MOVES = {
    Compress: "compress",
    Restore: "fall_back",
    Offload: "offload",
    Load: "load",
    SwapOut: "swap_out",
    SwapIn: "swap_in",
    Complete: "complete",
}
"""The public name of each kind of move: a label of ``vericache_kv_moves_total``."""

(MOVE_KEYS,) = (row.keys for row in METRICS if row.metric == "kv_moves")
"""Name of a move -> its counter."""


(PROPOSED_KEYS,) = (
    row.keys for row in METRICS if row.metric == "inner_proposed_tokens"
)
(AGREED_KEYS,) = (row.keys for row in METRICS if row.metric == "inner_accepted_tokens")
"""Kind of a row -> its counter."""


def move_name(move: Move) -> str:
    """Return the public name of a move; see ``MOVES``."""
    return MOVES[type(move)]


class Counters:
    """Totals since the start of the process, and the link's present throughput.

    The attributes are ``ENGINE_KEYS``; ``table.yaml`` describes them.
    """

    __slots__ = ENGINE_KEYS

    def __init__(self) -> None:
        for key in ENGINE_KEYS:
            setattr(self, key, 0)

    if TYPE_CHECKING:

        def __getattr__(self, key: str) -> Any: ...

        def __setattr__(self, key: str, value: float) -> None: ...

    def note_iteration(self, running: int) -> None:
        """Record one iteration and its number of requests."""
        self.iterations += 1
        self._note_peak("peak_running", running)

    def note_drafting(self, drafting: int) -> None:
        """Record the number of requests with a compressed prompt."""
        self._note_peak("peak_drafting", drafting)

    def _note_peak(self, key: str, value: int) -> None:
        setattr(self, key, max(getattr(self, key), value))

    def note_move(self, move: Move, made: bool) -> None:
        """Record a KV move, or that it failed for lack of memory."""
        name = MOVE_KEYS[move_name(move)] if made else "refused_moves"
        setattr(self, name, getattr(self, name) + 1)

    def note_forward(self, actions: Iterable[object]) -> None:
        """Record the rows of one mixed forward, given its plan."""
        kinds = Counter(type(action) for action in actions)
        self.draft_rows += kinds[Draft]
        self.verify_rows += kinds[Verify]
        self.plain_rows += kinds[Plain]
        self.waits += kinds[Wait]
        self.mixed_iterations += bool(kinds[Draft] and kinds[Verify])

    def note_cycle(self, drafted: int, accepted: int) -> None:
        """Record one draft-verify cycle and how many of its drafts were accepted."""
        self.cycles += 1
        self.drafted += drafted
        self.accepted += accepted

    def note_proposals(self, kind: str, proposed: int, accepted: int) -> None:
        """Record the proposals of an inner drafter in one row.

        Args:
            kind: "draft", "verify" or "plain".
            proposed: Tokens that the row ran.
            accepted: Those that the model agreed with.
        """
        for keys, tokens in ((PROPOSED_KEYS, proposed), (AGREED_KEYS, accepted)):
            name = keys[kind]
            setattr(self, name, getattr(self, name) + tokens)

    def report(self) -> dict[str, int | float]:
        """Return every counter, and the ratios derived from them."""
        counted = {key: getattr(self, key) for key in ENGINE_KEYS}
        mean = self.accepted / self.cycles if self.cycles else 0.0
        share = self.mixed_iterations / self.iterations if self.iterations else 0.0
        return {**counted, "mean_accepted": mean, "mixed_share": share}


class Totals:
    """Keeps counters monotonic when their source restarts at 0."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._before: dict[str, float] = {}

    def over(self, report: dict[str, Any]) -> dict[str, Any]:
        """Return ``report`` with every counter as a total since the first call.

        Counts between the last call and the restart are lost.
        """
        totals = dict(report)
        for key in COUNTER_KEYS:
            if key not in report:
                continue
            last, value = self._last.get(key, 0), report[key]
            if value < last:
                self._before[key] = self._before.get(key, 0) + last
            self._last[key] = value
            totals[key] = value + self._before.get(key, 0)
        return totals
