"""One forward in which some requests draft, some verify and some decode plainly."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult

from vericache_kernels.board_commit import DRAFT, EMIT, BoardRows
from vericache_sglang.engine.flights import Flight
from vericache_sglang.engine.graph_runner import present
from vericache_sglang.engine.rows import ForwardRow, MixedRows, build_forward
from vericache_sglang.engine.sampling.logprobs import LogprobTable
from vericache_sglang.engine.sampling.query import Query, RowQueries
from vericache_sglang.engine.sampling.sampler import RowSampler
from vericache_sglang.engine.upload import upload
from vericache_sglang.scheduling.plan import Draft, RowAction, Verify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from vericache_sglang.engine.conclusion import Conclusion
    from vericache_sglang.engine.flights import Flights
    from vericache_sglang.engine.residence import Residence
    from vericache_sglang.engine.state import RequestState
    from vericache_sglang.engine.token_board import TokenBoard
    from vericache_sglang.scheduling.iteration_model import Work


class MixedForward:
    """Executes row actions. What they came to stays on the device where it can.

    Drafted and accepted tokens are read and written on the token board; the host hears
    of them when the flight lands. A batch in which what comes next depends on tokens
    in other ways (a grammar, penalties, log-probabilities, rejection sampling) is
    concluded on the host, at once.

    Args:
        residence: Row table, reloads and counters.
        target_worker: SGLang's ``TpModelWorker``.
        board: Tokens of all requests.
        flights: Is told of every forward.
        conclusion: Is told what the rows came to, where that is known at once.
        overlap: SGLang runs its overlap schedule.
    """

    def __init__(
        self,
        residence: Residence,
        target_worker: Any,
        board: TokenBoard,
        flights: Flights,
        conclusion: Conclusion,
        *,
        overlap: bool,
    ) -> None:
        self._residence = residence
        self._worker = target_worker
        self._board = board
        self._flights = flights
        self._conclusion = conclusion
        self._sampler = RowSampler(target_worker.model_runner, overlap=overlap)
        self._device = target_worker.model_runner.device

    def run(
        self,
        batch: ScheduleBatch,
        seats: dict[int, RequestState],
        actions: dict[int, RowAction],
    ) -> tuple[GenerationBatchResult, Work | None]:
        """Draft, verify and decode plainly in one ragged forward.

        Args:
            batch: The decode batch.
            seats: Position in the batch -> request, in order.
            actions: Position in the batch -> what its request does.

        Returns:
            The result, whose ``accept_lens`` are right on the device; and the work
            done, None where every request waited.
        """
        late = all(state.late for state in seats.values())
        rows = MixedRows(self._residence)
        for i, state in seats.items():
            rows.add(i, state, actions[i])
        if not rows.rows:
            return self.nothing(batch), None
        work = rows.work()
        inputs = rows.inputs(self._board)
        forward = build_forward(copy.copy(batch), inputs, self._worker.model_runner)
        draft_codes = self._residence.draft_codes
        if draft_codes is None:
            forward.spec_info.packed = self._packed(rows.rows)
        else:
            forward.spec_info.coded = draft_codes.of(rows.rows)
        present(forward, self._worker.model_runner)
        run = self._worker.forward_batch_generation(
            batch=None, forward_batch=forward, is_verify=True
        )
        # Behind them are those of the tokens that fill up a graph.
        logits = run.logits_output.next_token_logits[: len(inputs.tokens)]
        asked = _queries(rows, seats, actions)
        if late:
            target = self._sampler.targets(batch, asked, logits, inputs.positions)
            result = self._leave_on_device(batch, rows, asked, target)
        else:
            chosen = self._sampler.choose(
                batch, asked, logits, inputs.positions, waited=self._flights.land_all
            )
            result = self._settle(batch, asked, *chosen)
        self._residence.counters.note_forward(actions.values())
        return result, work

    def nothing(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Return the result of an iteration in which every request waited."""
        result = self._result(batch)
        self._flights.launch(Flight(result, self._board.most))
        return result

    def _leave_on_device(
        self,
        batch: ScheduleBatch,
        rows: MixedRows,
        asked: Sequence[RowQueries],
        target: torch.Tensor,
    ) -> GenerationBatchResult:
        """Draft and accept on the board; the host hears of it later."""
        at, seat, kind, drafts, first = upload(
            self._device,
            [row.batch_index for row in rows.rows],
            [row.own for row in rows.rows],
            [EMIT if row.emits else DRAFT for row in asked],
            [row.columns.start for row in rows.rows],
            [*rows.starts(), len(target)],
        )
        emission = self._board.commit(BoardRows(seat, first, kind, drafts), target)
        result = self._result(batch)
        places = result.next_token_ids.view(-1, self._board.most)
        places[at] = emission.tokens
        # No token of a drafting request is accepted; the host reads its draft here.
        places[at, 0] = torch.where(
            kind == EMIT, emission.tokens[:, 0], target[first[:-1]]
        )
        result.accept_lens[at] = emission.counts
        passengers = [
            self._conclusion.launch(
                row.state, row.seat, verifies=row.verifies, emits=row.emits
            )
            for row in asked
        ]
        self._flights.launch(Flight(result, self._board.most, passengers))
        return result

    def _settle(
        self,
        batch: ScheduleBatch,
        asked: Sequence[RowQueries],
        chosen: Sequence[list[int]],
        table: LogprobTable,
    ) -> GenerationBatchResult:
        """Conclude every row at once, with tokens chosen on the host."""
        emitted: dict[int, list[int]] = {}
        for row, tokens in zip(asked, chosen, strict=True):
            passenger = self._conclusion.launch(
                row.state, row.seat, verifies=row.verifies, emits=row.emits
            )
            self._conclusion.land(passenger, tokens)
            if row.emits:
                emitted[row.seat] = tokens
        self._board.put([row.state for row in asked])
        result = self._result(batch, emitted, table)
        self._flights.launch(Flight(result, self._board.most))
        return result

    def _packed(self, rows: Sequence[ForwardRow]) -> dict[int, Any]:
        """Return, by row, its code slots and what decodes them; for the attention."""
        codes = self._residence.codes
        if codes is None:
            return {}
        return {
            i: (row.packed.split.budget.code_slots, codes.segments(row.packed))
            for i, row in enumerate(rows)
            if row.packed is not None
        }

    def _result(
        self,
        batch: ScheduleBatch,
        emitted: dict[int, list[int]] | None = None,
        table: LogprobTable | None = None,
    ) -> GenerationBatchResult:
        """Return a result in which requests emit what is given, nothing without."""
        requests, stride = len(batch.reqs), self._board.most
        logprobs = None
        if batch.return_logprob:  # SGLang reads it also where nobody emits
            logprobs = (table or LogprobTable()).pack(requests)
        padded, counts = [0] * (requests * stride), [0] * requests
        for i, tokens in (emitted or {}).items():
            padded[i * stride : i * stride + len(tokens)] = tokens
            counts[i] = len(tokens)
        ids, lengths = upload(self._device, padded, counts)
        return GenerationBatchResult(
            logits_output=logprobs,
            next_token_ids=ids,
            accept_lens=lengths.to(torch.int32),
            speculative_num_draft_tokens=stride,
            num_non_draft_tokens_per_req=0,
        )


def _queries(
    rows: MixedRows, seats: dict[int, RequestState], actions: dict[int, RowAction]
) -> list[RowQueries]:
    """Say which positions of the forward ask for a token."""
    asked = []
    for row, start in zip(rows.rows, rows.starts(), strict=True):
        seat = row.batch_index
        state, action = seats[seat], actions[seat]
        drafts = state.drafted if isinstance(action, Draft) else 0
        queries = tuple(
            Query(seat, state, start + j, drafts + j) for j in range(len(row.columns))
        )
        asked.append(
            RowQueries(
                queries,
                verifies=isinstance(action, Verify),
                emits=not isinstance(action, Draft),
            )
        )
    return asked
