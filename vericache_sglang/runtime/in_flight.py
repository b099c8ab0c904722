"""Forwards that were launched and whose tokens the host has not received yet."""

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
    """One request's row of a launched forward.

    Attributes:
        at: Its index in the schedule batch.
        drafts: ``RequestState.drafts`` at the launch: those that a row verifies, once
            all earlier forwards are recorded.
        queries: Query tokens, the most it emits or drafts.
        emits: The row emits; else it drafts.
        verifies: The row is a verification; autoregressive rows emit too.
        proposals: Query tokens that an inner drafter proposed for this row.
    """

    state: RequestState
    at: int
    drafts: list[int]
    queries: int = 1
    emits: bool = True
    verifies: bool = False
    proposals: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class InFlightForward:
    """One launched forward.

    Attributes:
        result: SGLang's result: ``next_token_ids`` [B * stride] and ``accept_lens``
            [B], on the device until SGLang has copied them to the host (its event
            ``copy_done``). Drafted tokens are included, with accept length 0 and
            padded with -1.
        stride: Entries per request in ``next_token_ids``.
        pending_rows: Rows whose results are not recorded; empty if the forward was
            recorded synchronously.
        decode: SGLang reports its completion (``on_verify_complete_cpu``).
    """

    result: Any
    stride: int
    pending_rows: Sequence[PendingRow] = ()
    decode: bool = True

    def outcome(self) -> tuple[list[list[int]], list[int]]:
        """Return the tokens of every pending row and the accept length per request.

        Synchronises with the forward unless the result is on the host already.
        """
        told = [self.result.accept_lens, self.result.next_token_ids]
        if self.result.copy_done is None:
            told = download(*told)
        else:
            # The tensors are host tensors by now, but the copy may still be running.
            self.result.copy_done.synchronize()
        counts, flat = (numbers.tolist() for numbers in told)
        runs = []
        for pending_row in self.pending_rows:
            start = pending_row.at * self.stride
            if pending_row.emits:
                runs.append(flat[start : start + counts[pending_row.at]])
                continue
            drafted = flat[start : start + pending_row.queries]
            runs.append([token for token in drafted if token >= 0])
        return runs, counts


class InFlightQueue:
    """Records in-flight forwards in launch order; at most one stays in flight.

    The order depends only on the numbers of launched and reported forwards, not on
    their completion times, so all tensor-parallel ranks record the same results.

    Args:
        record: Takes a forward's pending rows and their tokens; returns the batch
            indices whose requests had ended and whose results are discarded.
        recorded: Takes a function that returns the accept lengths of a decode batch,
            and the batch indices whose results were discarded.

    Attributes:
        launched: Number of forwards launched so far.
    """

    def __init__(
        self,
        record: Callable[[Sequence[PendingRow], Sequence[list[int]]], frozenset[int]],
        recorded: Callable[[Callable[[], list[int]], frozenset[int]], None],
    ) -> None:
        self._record = record
        self._recorded = recorded
        self._forwards: deque[tuple[int, InFlightForward]] = deque()
        self._decodes = 0
        self._reported = 0
        self.launched = 0

    def __len__(self) -> int:
        return len(self._forwards)

    @property
    def unrecorded(self) -> bool:
        """Whether there are rows whose results are not recorded."""
        return any(each.pending_rows for _, each in self._forwards)

    def launch(self, entry: InFlightForward) -> None:
        """Append a forward that was just launched."""
        self.launched += 1
        # A prefill is recorded with the next decode: by then SGLang has its result.
        self._forwards.append((self._decodes + 1, entry))
        self._decodes += entry.decode

    def drop(self, launched: int) -> None:
        """Drop the decode that was launched after the first ``launched``, if any.

        Its results are not recorded, and SGLang will report another one in its place.
        """
        if self.launched > launched:
            self.launched -= 1
            self._decodes -= 1
            if self._forwards:  # not recorded yet
                self._forwards.pop()

    def record_reported(self) -> None:
        """Record the next decode, which SGLang has reported, and all before it."""
        self._reported += 1
        while self._forwards and self._forwards[0][0] <= self._reported:
            self._record_oldest()

    def record_all_but_newest(self) -> None:
        """Record every forward but the newest, whether it was reported or not."""
        while len(self._forwards) > 1:
            self._record_oldest()

    def record_all(self) -> None:
        """Record all forwards; waits for the newest, which ends last."""
        forwards = [each for _, each in self._forwards]
        self._forwards.clear()
        outcomes = [
            each.outcome() if each.pending_rows else None for each in forwards[::-1]
        ]
        for each, outcome in zip(forwards, outcomes[::-1], strict=True):
            self._record_results(each, outcome)

    def settle(self) -> None:
        """Record all forwards and expect no report of any of them.

        A report that an error prevented would delay all later ones, on this rank only.
        """
        self.record_all()
        self._reported = self._decodes

    def _record_oldest(self) -> None:
        _, oldest = self._forwards.popleft()
        self._record_results(oldest, oldest.outcome() if oldest.pending_rows else None)

    def _record_results(
        self, ended: InFlightForward, outcome: tuple[list[list[int]], list[int]] | None
    ) -> None:
        """Record the results of a forward; ``outcome`` is None without pending rows."""
        if outcome is not None:
            runs, counts = outcome
            discarded = self._record(ended.pending_rows, runs)
            if ended.decode:
                self._recorded(lambda: counts, discarded)
        elif ended.decode:
            self._recorded(lambda: ended.outcome()[1], frozenset())
