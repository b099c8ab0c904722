"""Forwards that were launched and whose tokens the host has not seen yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vericache_sglang.device.upload import download

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vericache_sglang.kv.request import RequestState


@dataclass(frozen=True, slots=True, eq=False)
class PendingRow:
    """One request's share of a forward.

    Attributes:
        state: The request.
        at: Its position in the schedule batch.
        drafts: Drafts the forward verifies; -1 where it drafts, so nothing is emitted.
        round: ``RequestState.round`` at the launch.
        verifies: It was a verification; plain decoding has no drafts either.
    """

    state: RequestState
    at: int
    drafts: int
    round: int
    verifies: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class InFlightForward:
    """One launched forward.

    Attributes:
        result: What SGLang was given: ``next_token_ids`` [B * stride] and
            ``accept_lens`` [B], on the device until SGLang copies them to the host,
            whose end is its ``copy_done``. A drafted token is there too, though no
            token of its request is accepted.
        stride: Places of one request in ``next_token_ids``.
        pending_rows: Whose outcome is not known; none where all was settled at once.
        decode: SGLang reports it complete (``on_verify_complete_cpu``).
    """

    result: Any
    stride: int
    pending_rows: Sequence[PendingRow] = ()
    decode: bool = True

    def outcome(self) -> tuple[list[list[int]], list[int]]:
        """Return the tokens of every passenger, and every request's accepted count.

        Waits once for the forward, unless SGLang has copied the result to the host.
        """
        told = [self.result.accept_lens, self.result.next_token_ids]
        if self.result.copy_done is None:
            told = download(*told)
        else:
            # SGLang's tensors are on the host by now, but maybe not their numbers.
            self.result.copy_done.synchronize()
        counts, flat = (numbers.tolist() for numbers in told)
        runs = []
        for pending_row in self.pending_rows:
            start = pending_row.at * self.stride
            length = 1 if pending_row.drafts < 0 else counts[pending_row.at]
            runs.append(flat[start : start + length])
        return runs, counts


class InFlightQueue:
    """Lands flights in the order of their launch; at most one stays in the air.

    What lands when depends on how many were launched and reported, not on which have
    ended, so ranks that launch the same learn the same.

    Args:
        conclude: Takes a passenger and its tokens; returns False where its request had
            ended and the results are discarded.
        landed: Takes the accepted count of every request of a decoding forward's batch,
            and the positions whose results were discarded.

    Attributes:
        launched: Forwards so far.
        last: The newest of them.
    """

    def __init__(
        self,
        conclude: Callable[[PendingRow, list[int]], bool],
        landed: Callable[[Callable[[], list[int]], frozenset[int]], None],
    ) -> None:
        self._conclude = conclude
        self._landed = landed
        self._air: deque[tuple[int, InFlightForward]] = deque()
        self._decodes = 0
        self._reported = 0
        self.launched = 0
        self.last: InFlightForward | None = None

    def __len__(self) -> int:
        return len(self._air)

    def launch(self, entry: InFlightForward) -> None:
        """Note a forward that was just launched."""
        self.launched += 1
        self.last = entry
        # A prefill lands with the decode after it: by then SGLang has its result.
        self._air.append((self._decodes + 1, entry))
        self._decodes += entry.decode

    def land_reported(self) -> None:
        """Land what SGLang has processed: its next decode, and all before it."""
        self._reported += 1
        while self._air and self._air[0][0] <= self._reported:
            self._land()

    def land_all_but_last(self) -> None:
        """Land every flight but the newest, whether it was reported or not."""
        while len(self._air) > 1:
            self._land()

    def land_all(self) -> None:
        """Land them all; waits for the newest, with which the others have ended."""
        air = [each for _, each in self._air]
        self._air.clear()
        outcomes = [each.outcome() if each.pending_rows else None for each in air[::-1]]
        for each, outcome in zip(air, outcomes[::-1], strict=True):
            self._conclude_all(each, outcome)

    def _land(self) -> None:
        _, oldest = self._air.popleft()
        self._conclude_all(oldest, oldest.outcome() if oldest.pending_rows else None)

    def _conclude_all(
        self, ended: InFlightForward, outcome: tuple[list[list[int]], list[int]] | None
    ) -> None:
        """Tell what a forward came to; ``outcome`` is None where nobody is told."""
        if outcome is not None:
            runs, counts = outcome
            discarded = frozenset(
                pending_row.at
                for pending_row, tokens in zip(ended.pending_rows, runs, strict=True)
                if not self._conclude(pending_row, tokens)
            )
            if ended.decode:
                self._landed(lambda: counts, discarded)
        elif ended.decode:
            self._landed(lambda: ended.outcome()[1], frozenset())
