"""The rows of one mixed forward, and the ``ForwardBatch`` made of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from vericache_sglang.engine.spec_input import VeriCacheSpecInput
from vericache_sglang.errors import InvariantError
from vericache_sglang.scheduling.plan import Draft, Plain, Verify, Wait

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
    """

    batch_index: int
    table_row: int
    prefix: int
    tokens: list[int]
    position: int
    slots: torch.Tensor


class MixedRows:
    """Collects the rows of one forward; lists shadow rows for verifications.

    Args:
        residence: Owns the row table and its shadow rows.
    """

    def __init__(self, residence: Residence) -> None:
        self.rows: list[ForwardRow] = []
        self._table = residence.table
        self._shadows = iter(residence.shadow_rows)

    def add(
        self,
        batch_index: int,
        state: RequestState,
        action: Plain | Draft | Verify | Wait,
    ) -> bool:
        """Add what ``action`` asks of a request; returns False where it is to wait."""
        if isinstance(action, Wait):
            return False
        table_row: int = state.req.kv.req_pool_idx
        own = self._table[table_row]
        at = state.row_length
        drafts = len(state.drafts)
        if isinstance(action, Verify):
            slots = own[at : at + drafts + 1]
            table_row = self._list_verify_row(own, state)
            tokens, position = [state.pending, *state.drafts], state.verified
            prefix = state.verified
        else:
            prefix, position = at + drafts, state.verified + drafts
            slots = own[prefix : prefix + 1]
            tokens = [state.drafts[-1] if drafts else state.pending]
        self.rows.append(
            ForwardRow(
                batch_index, table_row, prefix, tokens, position, slots.to(torch.int64)
            )
        )
        return True

    def starts(self) -> list[int]:
        """Return where each row's first token is among all tokens of the forward."""
        lengths = (len(row.tokens) for row in self.rows)
        return list(accumulate(lengths, initial=0))[:-1]

    def _list_verify_row(self, own: torch.Tensor, state: RequestState) -> int:
        """Write kept | staged complement | decode slots into a shadow row."""
        if state.parts is None or state.parts.span is None:
            raise InvariantError(f"{state.req.rid} is verified without its complement")
        kept, dropped = state.parts.budget.kept, state.parts.budget.dropped
        start = state.parts.span.start
        end = state.row_length + len(state.drafts) + 1
        shadow = next(self._shadows)
        row = self._table[shadow]
        row[:kept] = own[:kept]
        torch.arange(start, start + dropped, out=row[kept : kept + dropped])
        row[kept + dropped : end + dropped] = own[kept:end]
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
        len(rows), torch.tensor(positions, dtype=torch.int64, device=device)
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
