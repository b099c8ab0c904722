"""Builds the rows of one mixed forward and its ``ForwardBatch``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from vericache_sglang.attention.forward_row import ForwardRow
from vericache_sglang.device.upload import upload
from vericache_sglang.errors import InvariantError
from vericache_sglang.runtime.forward.spec_input import VeriCacheSpecInput
from vericache_sglang.scheduling.iteration_model import Work
from vericache_sglang.scheduling.plan import (
    Deliver,
    Draft,
    Plain,
    Residency,
    RowAction,
    Verify,
    Wait,
)

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.runtime.forward.draft_tokens import DraftTokenBuffer
    from vericache_sglang.runtime.forward.proposals import InnerProposer
    from vericache_sglang.runtime.placement import KVPlacement


@dataclass(frozen=True, slots=True, eq=False)
class ForwardInputs:
    """Inputs of a ragged forward: T query tokens of R block-table rows.

    Attributes:
        batch_indices: R indices into the schedule batch.
        lengths: R query lengths.
        bounds: R upper bounds on the row lengths without queries.
        table_rows: [R] int64, rows of the block table.
        prefixes: [R] int64, exact row lengths without queries.
        tokens: [T] int64, token ids.
        slots: [T] int64, KV slots that the forward writes.
        positions: [T] int64, true positions in the text.
        owners: [T] int64, ``req_pool_idx`` of the tokens' requests.
    """

    batch_indices: list[int]
    lengths: list[int]
    bounds: list[int]
    table_rows: torch.Tensor
    prefixes: torch.Tensor
    tokens: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    owners: torch.Tensor


class MixedRows:
    """Collects the rows of one forward; fills draft block-table rows if needed.

    If the residual KV is on the host, a request drafts on its own block-table row and
    is verified on a second one. If it is on the device, the request drafts on a draft
    block-table row; it is verified on its own row if that lists no draft KV, else on a
    second one.

    Args:
        placement: Owns the block table, including the draft block-table rows.

    Attributes:
        rows: The rows of the forward.
        given: Batch index -> what another server has decided, without a row.
    """

    def __init__(self, placement: KVPlacement) -> None:
        self.rows: list[ForwardRow] = []
        self.given: dict[int, Deliver] = {}
        self._placement = placement
        self._table = placement.table
        self._verify_rows = iter(placement.verify_rows)

    def add(self, batch_index: int, state: RequestState, action: RowAction) -> bool:
        """Add the row of ``action``; return False if the request must wait."""
        if isinstance(action, Wait):
            if isinstance(action, Deliver):
                self.given[batch_index] = action
            return False
        own, first, pending_max = state.req_pool_idx, 0, state.pending_max
        queries = 1 + action.proposals
        drafts = isinstance(action, Draft)
        if isinstance(action, Verify):
            queries += state.drafted_max
            row, prefix = self._whole_row(own, state, queries), state.verified
        elif drafts:
            first = state.drafted
            pending_max += state.proposals_in_flight
            row, prefix = self._draft_row(own, state, queries)
        else:
            row, prefix = own, state.row_length
        self.rows.append(
            ForwardRow(
                batch_index,
                own,
                row,
                prefix,
                state.row_length + first,
                range(first, first + queries),
                state.verified + first,
                state.verified + state.drafted + 1,
                pending_max,
                drafts,
                not isinstance(action, Plain),
                action.proposals,
                action.proposals > 0 and state.shares_output,
                state if drafts and state.split.budget.coded else None,
            )
        )
        return True

    def starts(self) -> list[int]:
        """Return the index of each row's first token in the forward."""
        lengths = (len(row.columns) for row in self.rows)
        return list(accumulate(lengths, initial=0))[:-1]

    def work(self) -> Work:
        """Return the work of this forward, for the iteration model."""
        tokens = reads = products = 0
        for row in self.rows:
            n = len(row.columns)
            slots = row.prefix + n
            if row.packed is not None:
                budget = row.packed.split.budget
                slots += self._placement.draft_reads(budget) - budget.slots
            tokens += n
            reads += slots
            products += n * slots
        return Work(tokens, reads, products)

    def inputs(
        self, draft_tokens: DraftTokenBuffer, proposer: InnerProposer | None = None
    ) -> ForwardInputs:
        """Gather the inputs of the forward without waiting for the device.

        Args:
            draft_tokens: Tokens of all requests.
            proposer: Fills the rows' proposals; None leaves former tokens there.
        """
        rows = self.rows
        of_row, offset, own, drafts, speculates, table_row, behind, ahead = upload(
            draft_tokens.device,
            [i for i, row in enumerate(rows) for _ in row.columns],
            [j for row in rows for j in range(len(row.columns))],
            [row.own for row in rows],
            [row.drafts for row in rows],
            [row.speculates for row in rows],
            [row.table_row for row in rows],
            [row.prefix - row.position for row in rows],
            [row.at - row.position for row in rows],
        )
        verified = draft_tokens.verified(own)
        drafted = draft_tokens.drafted(own) * speculates
        if proposer is not None:
            proposer.propose(rows, own, drafted, verified + drafted)
        first = drafted * drafts
        position = verified + first
        requests, positions = own[of_row], position[of_row] + offset
        return ForwardInputs(
            batch_indices=[row.batch_index for row in rows],
            lengths=[len(row.columns) for row in rows],
            bounds=[row.prefix + row.pending_max for row in rows],
            table_rows=table_row,
            prefixes=position + behind,
            tokens=draft_tokens.tokens(requests, first[of_row] + offset),
            slots=self._table[requests, positions + ahead[of_row]].to(torch.int64),
            positions=positions,
            owners=requests,
        )

    def _draft_row(
        self, own: int, state: RequestState, queries: int
    ) -> tuple[int, int]:
        """Return the block-table row that lists the draft KV, and its length."""
        parts = state.split
        if parts.lists_draft:
            return own, state.row_length + state.drafted
        decoded = state.verified - parts.budget.offered + state.drafted
        draft_row = self._table[parts.draft_row]
        last = decoded + state.proposals_in_flight + state.pending_max + queries - 1
        if last >= parts.listed:
            # Decode slots are listed once; two cycles ahead are already allocated.
            known = state.req.kv.kv_allocated_len - parts.head
            slots = parts.budget.slots
            draft_row[slots + parts.listed : slots + known] = self._table[
                own, parts.head + parts.listed : parts.head + known
            ]
            parts.listed = known
        return parts.draft_row, parts.budget.slots + decoded

    def _whole_row(self, own: int, state: RequestState, queries: int) -> int:
        """Return the block-table row that lists the full KV, for a verification."""
        parts = state.parts
        if parts is None:  # another server has drafted
            return own
        if parts.residency is Residency.DEVICE and parts.shared_slots is not None:
            return own
        source = self._table[own]
        end = state.row_length + state.pending_max + queries
        verify_row = next(self._verify_rows)
        row = self._table[verify_row]
        offered = parts.budget.offered
        if parts.residency is Residency.DEVICE:
            row[:offered] = source[:offered]
        else:
            codes, at = parts.budget.code_slots, parts.budget.exact
            row[:at] = source[codes : codes + at]
            for span in self._placement.prefetches.spans(state.rid):
                row[at : at + span.slots] = torch.arange(
                    span.start, span.end, device=row.device
                )
                at += span.slots
        row[offered : offered + end - parts.head] = source[parts.head : end]
        return verify_row


def build_forward(
    batch: ScheduleBatch,
    inputs: ForwardInputs,
    model_runner: Any,
    *,
    features: bool = False,
) -> ForwardBatch:
    """Present ragged rows of 1 and d + 1 tokens as one target-verify forward.

    TARGET_VERIFY makes SGLang's ``LogitsProcessor`` return every position; the extend
    lengths make it a ragged extend for the attention backend.

    Args:
        batch: A shallow copy of the decode batch; modified.
        inputs: Inputs of at least one row.
        model_runner: The target's runner.
        features: See ``VeriCacheSpecInput``.

    Returns:
        A batch whose ``positions`` are true positions and whose ``seq_lens`` are row
        lengths with the query tokens included. Device tensors are exact. Host lists
        are exact on a CPU and upper bounds on a GPU.

    Raises:
        InvariantError: A row is longer than the model's context. SGLang's page tables
            have that many columns per row and are written by row length
            (``build_trtllm_mha_page_table``), so the next row would be overwritten.
    """
    device, lengths, prefixes = batch.device, inputs.lengths, inputs.bounds
    if inputs.prefixes.device.type == "cpu":
        prefixes = inputs.prefixes.tolist()
    totals = [prefix + n for prefix, n in zip(prefixes, lengths, strict=True)]
    if max(totals) > model_runner.model_config.context_len:
        raise InvariantError(
            f"a block-table row of {max(totals)} KV slots, the context holds "
            f"{model_runner.model_config.context_len}"
        )
    (queries,) = upload(device, lengths)
    batch.reqs = [batch.reqs[i] for i in inputs.batch_indices]
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    batch.input_ids = inputs.tokens
    batch.req_pool_indices = inputs.table_rows
    batch.seq_lens_cpu = torch.tensor(totals, dtype=torch.int64)
    batch.seq_lens = inputs.prefixes + queries
    batch.seq_lens_sum = sum(totals)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.out_cache_loc = inputs.slots
    batch.return_logprob = False
    batch.has_grammar = False
    batch.spec_info = VeriCacheSpecInput(inputs.positions, lengths, features=features)
    forward = ForwardBatch.init_new(
        batch, model_runner, return_hidden_states_before_norm=False
    )
    forward.extend_seq_lens_cpu = lengths
    forward.extend_prefix_lens_cpu = prefixes
    forward.extend_seq_lens = queries.to(torch.int32)
    forward.extend_prefix_lens = inputs.prefixes.to(torch.int32)
    forward.extend_num_tokens = sum(lengths)
    return forward
