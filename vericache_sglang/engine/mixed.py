"""One forward in which some requests draft, some verify and some decode plainly."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult

from vericache_sglang.engine.accept import accepted_tokens
from vericache_sglang.engine.rows import MixedRows, build_forward
from vericache_sglang.engine.sampling import one_token_logprobs, sample_rows
from vericache_sglang.scheduling.plan import Draft, Plain, Plan, Verify

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.engine.residence import Residence
    from vericache_sglang.engine.state import RequestState


class MixedForward:
    """Executes the row actions of a plan; states advance, nothing else changes.

    Args:
        config: Frozen settings.
        residence: Row table, reloads and counters.
        target_worker: SGLang's ``TpModelWorker``.
    """

    def __init__(
        self, config: VeriCacheConfig, residence: Residence, target_worker: Any
    ) -> None:
        self._config = config
        self._residence = residence
        self._worker = target_worker
        self._device = target_worker.model_runner.device

    def run(
        self, batch: ScheduleBatch, seats: dict[int, RequestState], plan: Plan
    ) -> GenerationBatchResult:
        """Draft, verify and decode plainly in one ragged forward.

        Args:
            batch: The decode batch.
            seats: Position in the batch -> request, in order.
            plan: Its ``rows`` are those of ``seats``.
        """
        rows = MixedRows(self._residence)
        actions = dict(zip(seats, plan.rows, strict=True))
        for i, state in seats.items():
            state.waited = 0 if rows.add(i, state, actions[i]) else state.waited + 1
        emitted: list[list[int]] = [[] for _ in batch.reqs]
        output = None
        if rows.rows:
            forward = build_forward(
                copy.copy(batch), rows.rows, self._worker.model_runner
            )
            run = self._worker.forward_batch_generation(
                batch=None, forward_batch=forward, is_verify=True
            )
            logits = run.logits_output.next_token_logits
            predicted = torch.argmax(logits, dim=-1).tolist()
            sampled, output = self._sample(batch, seats, rows, forward, logits)
            starts = rows.starts()
            for row, start in zip(rows.rows, starts, strict=True):
                i = row.batch_index
                tokens = predicted[start : start + len(row.tokens)]
                if isinstance(actions[i], Plain) and sampled is not None:
                    tokens = [sampled[i]]
                emitted[i] = self._conclude(seats[i], actions[i], tokens)
            self._residence.counters.note_forward(plan.rows)
        return self._result(emitted, output)

    def _sample(
        self,
        batch: ScheduleBatch,
        seats: dict[int, RequestState],
        rows: MixedRows,
        forward: Any,
        logits: torch.Tensor,
    ) -> tuple[list[int] | None, Any]:
        """Let SGLang sample where some plain row is not greedy; else (None, None)."""
        if all(state.greedy for state in seats.values()):
            return None, None
        picked = torch.zeros(len(batch.reqs), dtype=torch.int64)
        positions = torch.zeros(len(batch.reqs), dtype=torch.int64)
        for row, start in zip(rows.rows, rows.starts(), strict=True):
            picked[row.batch_index] = start
            positions[row.batch_index] = row.position
        tokens, output = sample_rows(
            batch,
            forward,
            logits[picked.to(logits.device)].clone(),
            positions.to(self._device),
            self._worker.model_runner,
        )
        one_token_logprobs(output)
        return tokens.tolist(), output

    def _conclude(
        self, state: RequestState, action: object, tokens: list[int]
    ) -> list[int]:
        """Record what a row's forward said; returns the tokens to emit, maybe none."""
        if isinstance(action, Draft):
            state.draft(tokens[0])
            return []
        if isinstance(action, Verify):
            drafts = state.drafts
            accepted = accepted_tokens(drafts, tokens)
            self._residence.counters.note_round(len(drafts), len(accepted) - 1)
            self._residence.reloads.end(state)
            tokens = accepted
        state.accept(tokens, self._config.draft_length)
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
