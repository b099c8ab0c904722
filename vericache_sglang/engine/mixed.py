"""One forward in which some requests draft, some verify and some decode plainly."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult

from vericache_sglang.engine.rows import ForwardRow, MixedRows, build_forward
from vericache_sglang.engine.sampling.logprobs import LogprobTable
from vericache_sglang.engine.sampling.query import Query, RowQueries
from vericache_sglang.engine.sampling.sampler import RowSampler
from vericache_sglang.scheduling.plan import Draft, RowAction, Verify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.engine.residence import Residence
    from vericache_sglang.engine.state import RequestState
    from vericache_sglang.scheduling.iteration_model import Work
    from vericache_sglang.scheduling.runtime import Runtime


class MixedForward:
    """Executes row actions; states advance, and the runtime hears of it.

    Args:
        config: Frozen settings.
        residence: Row table, reloads and counters.
        runtime: Is told of verifications and of drafted stops.
        target_worker: SGLang's ``TpModelWorker``.
        overlap: SGLang runs its overlap schedule.
    """

    def __init__(
        self,
        config: VeriCacheConfig,
        residence: Residence,
        runtime: Runtime,
        target_worker: Any,
        *,
        overlap: bool,
    ) -> None:
        self._config = config
        self._residence = residence
        self._runtime = runtime
        self._worker = target_worker
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
            The result, and the work done; None where every request waited.
        """
        rows = MixedRows(self._residence)
        for i, state in seats.items():
            rows.add(i, state, actions[i])
        emitted: list[list[int]] = [[] for _ in batch.reqs]
        table, work = LogprobTable(), None
        if rows.rows:
            work = rows.work()
            forward = build_forward(
                copy.copy(batch), rows.rows, self._worker.model_runner
            )
            forward.spec_info.packed = self._packed(rows.rows)
            run = self._worker.forward_batch_generation(
                batch=None, forward_batch=forward, is_verify=True
            )
            asked = _queries(rows, seats, actions)
            logits = run.logits_output.next_token_logits
            chosen, table = self._sampler.choose(batch, asked, logits)
            for row, tokens in zip(asked, chosen, strict=True):
                emitted[row.seat] = self._conclude(row.state, actions[row.seat], tokens)
            self._residence.counters.note_forward(actions.values())
        output = table.pack(len(batch.reqs)) if batch.return_logprob else None
        return self._result(emitted, output), work

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

    def _conclude(
        self, state: RequestState, action: RowAction, tokens: list[int]
    ) -> list[int]:
        """Record what a row's forward said; returns the tokens to emit, maybe none."""
        if isinstance(action, Draft):
            if state.draft(tokens[0]):
                self._runtime.stop_drafted(state.rid)
            return []
        if isinstance(action, Verify):
            drafted, accepted = len(state.drafts), len(tokens) - 1
            self._residence.counters.note_round(drafted, accepted)
            state.figures.note_round(drafted, accepted)
            self._residence.reloads.end(state.rid)
            self._runtime.verified(state.rid, drafted, len(tokens))
        state.accept(tokens)
        return tokens

    def _result(self, emitted: list[list[int]], output: Any) -> GenerationBatchResult:
        stride = self._config.draft_length + 1
        padded = torch.zeros(len(emitted), stride, dtype=torch.int64)
        for i, tokens in enumerate(emitted):
            padded[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=padded.flatten().to(self._device),
            accept_lens=torch.tensor(
                [len(tokens) for tokens in emitted],
                dtype=torch.int32,
                device=self._device,
            ),
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
        drafts = len(state.drafts) if isinstance(action, Draft) else 0
        queries = tuple(
            Query(seat, state, start + j, drafts + j, row.position + j)
            for j in range(len(row.tokens))
        )
        asked.append(
            RowQueries(
                queries,
                verifies=isinstance(action, Verify),
                emits=not isinstance(action, Draft),
            )
        )
    return asked
