"""The rows of one mixed forward, and the ``ForwardBatch`` made of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from vericache_sglang.engine.spec_input import VeriCacheSpecInput
from vericache_sglang.engine.state import Layout
from vericache_sglang.scheduling.iteration_model import Work
from vericache_sglang.scheduling.plan import Draft, RowAction, Verify, Wait

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from vericache_sglang.engine.residence import Residence
    from vericache_sglang.engine.state import RequestState


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """One request's share of a mixed forward.

    Attributes:
        batch_index: Position of the request in the schedule batch.
        table_row: Row of ``req_to_token`` the attention reads: own or shadow.
        prefix: Slots of that row before the first query, in slots.
        tokens: Query tokens; 1, or d + 1 in a verification.
        position: True position of ``tokens[0]`` in the text.
        slots: [len(tokens)] int64, where their KV is written.
        packed: The request, where the row begins with slots of codes.
    """

    batch_index: int
    table_row: int
    prefix: int
    tokens: list[int]
    position: int
    slots: torch.Tensor
    packed: RequestState | None = None


class MixedRows:
    """Collects the rows of one forward; lists shadow rows where two rows are needed.

    A request on the host drafts on its own row and is verified on a shadow row; on the
    device it is the other way round, or both are shadow rows.

    Args:
        residence: Owns the row table and its shadow rows.
    """

    def __init__(self, residence: Residence) -> None:
        self.rows: list[ForwardRow] = []
        self._residence = residence
        self._table = residence.table
        self._shadows = iter(residence.verify_rows)

    def add(self, batch_index: int, state: RequestState, action: RowAction) -> bool:
        """Add what ``action`` asks of a request; returns False where it is to wait."""
        if isinstance(action, Wait):
            return False
        own: int = state.req.kv.req_pool_idx
        at = state.row_length + len(state.drafts)
        tokens, position = [state.pending], state.verified
        if isinstance(action, Verify):
            at -= len(state.drafts)
            tokens = [state.pending, *state.drafts]
            row, prefix = self._whole_row(own, state), state.verified
        elif isinstance(action, Draft):
            if state.drafts:
                tokens = [state.drafts[-1]]
            position += len(state.drafts)
            row, prefix = self._draft_row(own, state)
        else:
            row, prefix = own, at
        slots = self._table[own, at : at + len(tokens)].to(torch.int64)
        coded = isinstance(action, Draft) and state.split.budget.coded
        packed = state if coded else None
        self.rows.append(
            ForwardRow(batch_index, row, prefix, tokens, position, slots, packed)
        )
        return True

    def starts(self) -> list[int]:
        """Return where each row's first token is among all tokens of the forward."""
        lengths = (len(row.tokens) for row in self.rows)
        return list(accumulate(lengths, initial=0))[:-1]

    def work(self) -> Work:
        """Return what this forward has to do."""
        tokens = reads = products = 0
        for row in self.rows:
            n = len(row.tokens)
            slots = row.prefix + n
            if row.packed is not None:
                budget = row.packed.split.budget
                slots += self._residence.draft_reads(budget) - budget.slots
            tokens += n
            reads += slots
            products += n * slots
        return Work(tokens, reads, products)

    def _draft_row(self, own: int, state: RequestState) -> tuple[int, int]:
        """Return the row that lists the draft part, and its length."""
        parts = state.split
        drafts = len(state.drafts)
        if parts.layout is Layout.KEPT:
            return own, state.row_length + drafts
        decoded = state.verified - parts.budget.offered + drafts
        shadow = self._table[parts.shadow]
        if decoded >= parts.listed:
            # Decode slots are listed once; two rounds ahead are allocated already.
            known = state.req.kv.kv_allocated_len - parts.head
            slots = parts.budget.slots
            shadow[slots + parts.listed : slots + known] = self._table[
                own, parts.head + parts.listed : parts.head + known
            ]
            parts.listed = known
        return parts.shadow, parts.budget.slots + decoded

    def _whole_row(self, own: int, state: RequestState) -> int:
        """Return the row that lists both parts, for a verification."""
        parts = state.split
        if parts.layout is Layout.PERMUTED:
            return own
        source = self._table[own]
        end = state.row_length + len(state.drafts) + 1
        shadow = next(self._shadows)
        row = self._table[shadow]
        offered = parts.budget.offered
        if parts.layout is Layout.BESIDE:
            row[:offered] = source[:offered]
        else:
            codes, at = parts.budget.code_slots, parts.budget.exact
            row[:at] = source[codes : codes + at]
            for span in self._residence.reloads.spans(state.rid):
                row[at : at + span.slots] = torch.arange(span.start, span.end)
                at += span.slots
        row[offered : offered + end - parts.head] = source[parts.head : end]
        return shadow


def build_forward(
    batch: ScheduleBatch, rows: list[ForwardRow], model_runner: Any
) -> ForwardBatch:
    """Present ragged rows of 1 and d + 1 tokens as one target-verify forward.

    TARGET_VERIFY makes SGLang's ``LogitsProcessor`` return every position; the extend
    lengths make it a ragged extend for the attention backend.

    Args:
        batch: A shallow copy of the decode batch, ours to alter.
        rows: At least one row.
        model_runner: The target's runner.

    Returns:
        A batch whose ``positions`` are true positions and whose ``seq_lens`` are row
        lengths with the query tokens included.
    """
    device = batch.device
    lengths = [len(row.tokens) for row in rows]
    prefixes = [row.prefix for row in rows]
    totals = [prefix + n for prefix, n in zip(prefixes, lengths, strict=True)]
    positions = [row.position + i for row in rows for i in range(len(row.tokens))]
    batch.reqs = [batch.reqs[row.batch_index] for row in rows]
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    batch.input_ids = torch.tensor(
        [token for row in rows for token in row.tokens],
        dtype=torch.int64,
        device=device,
    )
    batch.req_pool_indices = torch.tensor(
        [row.table_row for row in rows], dtype=torch.int64, device=device
    )
    batch.seq_lens_cpu = torch.tensor(totals, dtype=torch.int64)
    batch.seq_lens = batch.seq_lens_cpu.to(device)
    batch.seq_lens_sum = sum(totals)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.out_cache_loc = torch.cat([row.slots for row in rows])
    batch.return_logprob = False
    batch.has_grammar = False
    batch.spec_info = VeriCacheSpecInput(
        len(rows), torch.tensor(positions, dtype=torch.int64, device=device), lengths
    )
    forward = ForwardBatch.init_new(
        batch, model_runner, return_hidden_states_before_norm=False
    )
    forward.extend_seq_lens_cpu = lengths
    forward.extend_prefix_lens_cpu = prefixes
    forward.extend_seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    forward.extend_prefix_lens = torch.tensor(
        prefixes, dtype=torch.int32, device=device
    )
    forward.extend_num_tokens = sum(lengths)
    return forward
