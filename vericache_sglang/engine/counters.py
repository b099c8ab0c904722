"""What the engine counts; read through ``GET /get_server_info``."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from vericache_sglang.scheduling.plan import Draft, Plain, Verify, Wait

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class Counters:
    """Totals since the start of the process.

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
        split_refusals: Splits put off for lack of device or host memory.
        joins: Finished rows made whole again for the prefix tree.
        staged_bytes: Bytes copied into the staging region.
        offloaded_bytes: Bytes copied to the host.
        stage_seconds: Time those copies took.
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
    split_refusals: int = 0
    joins: int = 0
    staged_bytes: int = 0
    offloaded_bytes: int = 0
    stage_seconds: float = 0.0
    peak_running: int = 0
    peak_drafting: int = 0

    def note_iteration(self, running: int) -> None:
        """Record one iteration and how many requests it has."""
        self.iterations += 1
        self.peak_running = max(self.peak_running, running)

    def note_forward(self, actions: Sequence[object]) -> None:
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
