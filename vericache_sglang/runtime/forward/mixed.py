"""One forward that mixes drafting, verification and autoregressive decoding."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult

from vericache_kernels.token_commit import DRAFT, EMIT, DraftTokenRows
from vericache_sglang.device.upload import upload
from vericache_sglang.errors import InvariantError
from vericache_sglang.runtime.forward.codes import over_draft_kv, read_codes
from vericache_sglang.runtime.forward.extend import Extend, KnownTokens, unseen
from vericache_sglang.runtime.forward.graphs import present
from vericache_sglang.runtime.forward.rows import MixedRows, build_forward
from vericache_sglang.runtime.forward.spec_input import take_hidden
from vericache_sglang.runtime.in_flight import InFlightForward
from vericache_sglang.runtime.request_logprobs import told
from vericache_sglang.sampling.logprobs import LogprobTable
from vericache_sglang.sampling.query import Query, RowQueries
from vericache_sglang.sampling.sampler import RowSampler
from vericache_sglang.scheduling.plan import Draft, RowAction, Verify

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from vericache_sglang.attention.forward_row import ForwardRow
    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.runtime.forward.draft_tokens import DraftTokenBuffer
    from vericache_sglang.runtime.forward.proposals import InnerProposer
    from vericache_sglang.runtime.in_flight import InFlightQueue, PendingRow
    from vericache_sglang.runtime.placement import KVPlacement
    from vericache_sglang.runtime.result_recorder import ResultRecorder
    from vericache_sglang.scheduling.iteration_model import Work
    from vericache_sglang.scheduling.plan import Deliver


class MixedForward:
    """Executes row actions and keeps the results on the device if possible.

    Drafted and accepted tokens are read from and written to the draft token buffer; the
    host receives them when the in-flight forward is recorded. A batch with a request
    whose next step depends on tokens on the host (grammar, penalties,
    log-probabilities, rejection sampling) is recorded synchronously.

    Args:
        placement: Block table, staging buffer and counters.
        target_worker: SGLang's ``TpModelWorker``.
        draft_tokens: Tokens of all requests.
        in_flight: Queue of launched forwards.
        recorder: Records the rows' results.
        overlap: SGLang runs its overlap schedule.

    Attributes:
        extend: Computes the KV of a prompt's end again over the full KV; None: every
            prompt is prefilled.
    """

    def __init__(
        self,
        placement: KVPlacement,
        target_worker: Any,
        draft_tokens: DraftTokenBuffer,
        in_flight: InFlightQueue,
        recorder: ResultRecorder,
        *,
        overlap: bool,
    ) -> None:
        self._placement = placement
        self._worker = target_worker
        self._draft_tokens = draft_tokens
        self._in_flight = in_flight
        self._recorder = recorder
        self.extend: Extend | None = None
        self._sampler = RowSampler(target_worker.model_runner, overlap=overlap)
        self._device = target_worker.model_runner.device

    def run(
        self,
        batch: ScheduleBatch,
        requests: dict[int, RequestState],
        actions: dict[int, RowAction],
        ready: AbstractContextManager[None],
        proposer: InnerProposer | None = None,
    ) -> tuple[GenerationBatchResult, Work | None]:
        """Draft, verify and decode autoregressively in one ragged forward.

        Args:
            batch: The decode batch.
            requests: Batch index -> request, in order.
            actions: Batch index -> action of its request.
            ready: Entered around the forward (``TensorParallelSync.forward``).
            proposer: Asks the inner drafter; None without one.

        Returns:
            The result, whose ``accept_lens`` are exact on the device; and the work
            done, None if every request waited.
        """
        asynchronous = all(state.asynchronous for state in requests.values())
        rows = MixedRows(self._placement)
        for i, state in requests.items():
            rows.add(i, state, actions[i])
        if not rows.rows:
            return self.nothing(batch, rows.given), None
        for row in rows.rows:
            state = requests[row.batch_index]
            if row.drafts and state.behind:
                self._extend(batch, row, state, state.behind)
                state.behind = 0
            elif not row.drafts and state.inexact:
                self._extend(batch, row, state, state.inexact)
                state.inexact = state.behind = 0
        work = rows.work()
        inputs = rows.inputs(self._draft_tokens, proposer)
        features = proposer is not None and proposer.reads(requests.values())
        forward = build_forward(
            copy.copy(batch), inputs, self._worker.model_runner, features=features
        )
        read_codes(self._placement, forward, rows.rows)
        present(forward, self._worker.model_runner)
        with ready:
            run = self._worker.forward_batch_generation(
                batch=None, forward_batch=forward, is_verify=True
            )
        # The remaining rows belong to the padding of a graph.
        logits = run.logits_output.next_token_logits[: len(inputs.tokens)]
        if proposer is not None and features:
            hidden = take_hidden(run)[: len(inputs.tokens)]
            proposer.observe(inputs.owners, inputs.positions, hidden)
        asked = _queries(rows, requests, actions)
        if asynchronous:
            target = self._sampler.targets(batch, asked, logits, inputs.positions)
            result = self._leave_on_device(batch, rows, asked, target)
        else:
            chosen = self._sampler.choose(
                batch,
                asked,
                logits,
                inputs.positions,
                inputs.tokens,
                waited=self._in_flight.record_all,
            )
            result = self._settle(batch, rows, asked, *chosen)
        self._placement.counters.note_forward(actions.values())
        return result, work

    def _extend(
        self, batch: ScheduleBatch, row: ForwardRow, state: RequestState, count: int
    ) -> None:
        """Compute the KV of a row's last tokens: over its full KV, if it is verified.

        Those of a row that drafts have none yet; the others have that over draft KV.
        """
        if self.extend is None:
            raise InvariantError(f"{state.rid} started early, which is off")
        first, end = state.verified - count, state.row_length
        slots = self._placement.table[row.own, end - count : end].to(torch.int64)
        tokens = state.text(first, state.verified)
        prefix, show = (end - count, unseen) if row.drafts else (first, None)
        known = KnownTokens(row.own, tokens, first, row.table_row, prefix, slots)
        if row.drafts:
            known = over_draft_kv(self._placement, state, known)
        self.extend.run(batch, row.batch_index, known, show)

    def nothing(
        self, batch: ScheduleBatch, given: Mapping[int, Deliver] | None = None
    ) -> GenerationBatchResult:
        """Return the result of an iteration in which every request waited.

        Args:
            batch: The decode batch.
            given: Batch index -> what another server has decided.
        """
        result = self._result(batch, given or {})
        self._in_flight.launch(InFlightForward(result, self._draft_tokens.most))
        return result

    def _leave_on_device(
        self,
        batch: ScheduleBatch,
        rows: MixedRows,
        asked: Sequence[RowQueries[RequestState]],
        target: torch.Tensor,
    ) -> GenerationBatchResult:
        """Draft and accept in the draft token buffer; results are reported later."""
        at, pool_idx, kind, first = upload(
            self._device,
            [row.batch_index for row in rows.rows],
            [row.own for row in rows.rows],
            [EMIT if row.emits else DRAFT for row in asked],
            [*rows.starts(), len(target)],
        )
        emission = self._draft_tokens.commit(
            DraftTokenRows(pool_idx, first, kind), target
        )
        result = self._result(batch, rows.given)
        # A drafting request accepts no token; the host reads its drafts from here.
        result.next_token_ids.view(-1, self._draft_tokens.most)[at] = emission.tokens
        result.accept_lens[at] = emission.counts
        self._in_flight.launch(
            InFlightForward(
                result, self._draft_tokens.most, self._launch(rows.rows, asked)
            )
        )
        return result

    def _launch(
        self, rows: Sequence[ForwardRow], asked: Sequence[RowQueries[RequestState]]
    ) -> list[PendingRow]:
        return [
            self._recorder.launch(
                row.state,
                row.batch_index,
                queries=len(row.queries),
                verifies=row.verifies,
                emits=row.emits,
                proposals=built.proposals,
            )
            for built, row in zip(rows, asked, strict=True)
        ]

    def _settle(
        self,
        batch: ScheduleBatch,
        rows: MixedRows,
        asked: Sequence[RowQueries[RequestState]],
        chosen: Sequence[list[int]],
        table: LogprobTable,
    ) -> GenerationBatchResult:
        """Record every row synchronously, with tokens chosen on the host."""
        self._recorder.record(self._launch(rows.rows, asked), chosen)
        emitted = {
            row.batch_index: tokens
            for row, tokens in zip(asked, chosen, strict=True)
            if row.emits
        }
        self._draft_tokens.put([row.state for row in asked])
        result = self._result(batch, rows.given, emitted, table)
        self._in_flight.launch(InFlightForward(result, self._draft_tokens.most))
        return result

    def _result(
        self,
        batch: ScheduleBatch,
        given: Mapping[int, Deliver],
        emitted: Mapping[int, Sequence[int]] | None = None,
        table: LogprobTable | None = None,
    ) -> GenerationBatchResult:
        """Return a result with tokens that another server or this one has decided."""
        requests, stride = len(batch.reqs), self._draft_tokens.most
        logprobs = None
        if batch.return_logprob:  # SGLang reads it even if no request emits
            table = table or LogprobTable()
            table.rows |= {i: told(each.logprobs) for i, each in given.items()}
            logprobs = table.pack(requests)
        padded, counts = [0] * (requests * stride), [0] * requests
        every = {**(emitted or {}), **{i: each.tokens for i, each in given.items()}}
        for i, tokens in every.items():
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
    rows: MixedRows, requests: dict[int, RequestState], actions: dict[int, RowAction]
) -> list[RowQueries[RequestState]]:
    """Return the positions of the forward at which a token is sampled, by row."""
    asked = []
    for row, start in zip(rows.rows, rows.starts(), strict=True):
        batch_index = row.batch_index
        state, action = requests[batch_index], actions[batch_index]
        drafts = state.drafted if isinstance(action, Draft) else 0
        queries = tuple(
            Query(batch_index, state, start + j, drafts + j)
            for j in range(len(row.columns))
        )
        asked.append(
            RowQueries(
                queries,
                verifies=isinstance(action, Verify),
                emits=not isinstance(action, Draft),
            )
        )
    return asked
