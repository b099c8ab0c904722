"""What the engine counts; read through ``GET /get_server_info``."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from vericache_sglang.scheduling.plan import (
    Draft,
    Move,
    Offload,
    Park,
    Pin,
    Plain,
    Resume,
    Split,
    Unsplit,
    Verify,
    Wait,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

MOVES = {
    Split: "splits",
    Unsplit: "unsplits",
    Offload: "offloads",
    Pin: "pins",
    Park: "parks",
    Resume: "resumes",
}
"""The counter of each kind of move."""


@dataclass(slots=True)
class Counters:
    """Totals since the start of the process, and what the link does now.

    Attributes:
        iterations: Decode forwards and all-waiting iterations.
        mixed_iterations: Forwards with at least one draft and one verify row.
        draft_rows: Draft rows over all forwards.
        verify_rows: Verify rows over all forwards.
        plain_rows: Rows decoded on the full KV over all forwards.
        waits: Rows left out because their reload was late or no verify slot was free.
        drafted: Tokens drafted and then verified.
        accepted: Of these, tokens accepted; corrections and bonus tokens not counted.
        rounds: Verifications completed.
        splits: Prompts split in two parts.
        unsplits: Requests given back to plain decoding, as drafting did not pay.
        offloads: Complements moved from the device to the host.
        pins: Complements moved from the host back to the device.
        parks: Requests whose device part was moved to the host.
        resumes: Parked requests brought back.
        refused_moves: Moves put off for lack of device or host memory.
        shared_reloads: Reloads saved: another request had staged the complement.
        failed_reloads: Copies into the staging region that failed.
        early_verifications: Verifications launched while their complement arrived.
        thrown_verifications: Of these, thrown away: the rest of it never did.
        stood_still_seconds: Time forwards waited for layers that were arriving.
        reprefills: Requests sent back to prefill because their complement was lost.
        joins: Finished rows made whole again for the prefix tree.
        staged_bytes: Bytes copied into the staging region.
        offloaded_bytes: Bytes copied to the host.
        stage_seconds: Time the reloads took on the link.
        link_in_bytes_per_s: What the last reloads achieved on the link, in bytes/s.
        link_out_bytes_per_s: What the last copies to the host achieved, in bytes/s.
        peak_staged_bytes: Most bytes of the staging region taken at once.
        peak_host_bytes: Most host memory held at once.
        peak_running: Most requests in one decode iteration.
        peak_drafting: Most split requests in one decode iteration.
    """

    iterations: int = 0
    mixed_iterations: int = 0
    draft_rows: int = 0
    verify_rows: int = 0
    plain_rows: int = 0
    waits: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    splits: int = 0
    unsplits: int = 0
    offloads: int = 0
    pins: int = 0
    parks: int = 0
    resumes: int = 0
    refused_moves: int = 0
    shared_reloads: int = 0
    failed_reloads: int = 0
    early_verifications: int = 0
    thrown_verifications: int = 0
    stood_still_seconds: float = 0.0
    reprefills: int = 0
    joins: int = 0
    staged_bytes: int = 0
    offloaded_bytes: int = 0
    stage_seconds: float = 0.0
    link_in_bytes_per_s: float = 0.0
    link_out_bytes_per_s: float = 0.0
    peak_staged_bytes: int = 0
    peak_host_bytes: int = 0
    peak_running: int = 0
    peak_drafting: int = 0

    def note_iteration(self, running: int) -> None:
        """Record one iteration and how many requests it has."""
        self.iterations += 1
        self.peak_running = max(self.peak_running, running)

    def note_drafting(self, drafting: int) -> None:
        """Record how many requests are split."""
        self.peak_drafting = max(self.peak_drafting, drafting)

    def note_move(self, move: Move, made: bool) -> None:
        """Record a move, or that there was no room for it."""
        name = MOVES[type(move)] if made else "refused_moves"
        setattr(self, name, getattr(self, name) + 1)

    def note_forward(self, actions: Iterable[object]) -> None:
        """Record the rows of one mixed forward, given its plan."""
        kinds = Counter(type(action) for action in actions)
        self.draft_rows += kinds[Draft]
        self.verify_rows += kinds[Verify]
        self.plain_rows += kinds[Plain]
        self.waits += kinds[Wait]
        self.mixed_iterations += bool(kinds[Draft] and kinds[Verify])

    def note_round(self, drafted: int, accepted: int) -> None:
        """Record one verification and how many of its drafts were accepted."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted

    def report(self) -> dict[str, int | float]:
        """Return every counter, and the ratios people ask for."""
        mean = self.accepted / self.rounds if self.rounds else 0.0
        share = self.mixed_iterations / self.iterations if self.iterations else 0.0
        return {**asdict(self), "mean_accepted": mean, "mixed_share": share}
