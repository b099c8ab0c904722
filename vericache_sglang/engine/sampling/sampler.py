"""The tokens of a mixed forward: drafted, verified or plain, one rule for all.

The next token at a position is SGLang's own sampler applied to the logits with the
request's noise for that position (none for greedy requests). Drafts are made with the
same noise, so a draft is right exactly if it equals the full KV's token: output with a
seed is plain SGLang's, output without one is distributed as plain SGLang's. Requests
that ask for classic rejection sampling are the exception (``rejection.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import (
    apply_custom_logit_processor,
    multinomial_with_seed,
)

from vericache_sglang.engine.accept import accepted_tokens
from vericache_sglang.engine.sampling.expand import expand
from vericache_sglang.engine.sampling.group import Group, groups
from vericache_sglang.engine.sampling.logprobs import LogprobTable, read
from vericache_sglang.engine.sampling.profile import Rule
from vericache_sglang.engine.sampling.rejection import filtered_probs, reject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from vericache_sglang.engine.sampling.query import RowQueries


class RowSampler:
    """Chooses tokens for rows of different lengths and of different requests.

    Args:
        model_runner: The target's runner; its sampler is used.
        overlap: SGLang runs its overlap schedule.
    """

    def __init__(self, model_runner: Any, *, overlap: bool) -> None:
        self._sampler = model_runner.sampler
        self._overlap = overlap

    def choose(
        self, batch: ScheduleBatch, rows: Sequence[RowQueries], logits: torch.Tensor
    ) -> tuple[list[list[int]], LogprobTable]:
        """Choose the tokens of every row.

        Args:
            batch: The decode batch.
            rows: The rows of the forward.
            logits: [positions, V]; not modified.

        Returns:
            For each row the token it drafts, the token it decodes, or the 1 to d + 1
            tokens its verification emits; and log-probabilities of what is emitted.
        """
        table = LogprobTable()
        runs: list[list[int]] = [[]] * len(rows)
        dressed = [i for i, row in enumerate(rows) if not row.state.profile.bare]
        if len(dressed) < len(rows):
            predicted = torch.argmax(logits, dim=-1).tolist()
            for i, row in enumerate(rows):
                if row.state.profile.bare:
                    runs[i] = _run(row, [predicted[query.at] for query in row.queries])
        if dressed:
            sampled = self._sample(batch, [rows[i] for i in dressed], logits, table)
            for i, run in zip(dressed, sampled, strict=True):
                runs[i] = run
        return runs, table

    def _sample(
        self,
        batch: ScheduleBatch,
        rows: Sequence[RowQueries],
        logits: torch.Tensor,
        table: LogprobTable,
    ) -> list[list[int]]:
        """Choose for rows that are more than an argmax; fills ``table``."""
        picked = logits[[query.at for row in rows for query in row.queries]]  # a copy
        # With a grammar in the batch SGLang samples after the last result is known.
        late = self._overlap and not batch.has_grammar
        info, usable = expand(batch.sampling_info, rows, late=late)
        info.apply_logits_bias(picked)
        if info.has_custom_logit_processor:
            apply_custom_logit_processor(picked, info)
        runs: list[list[int]] = [[]] * len(rows)
        for group in groups(batch, rows, usable, info, picked):
            if group.rule in (Rule.GREEDY, Rule.SEEDED):
                found, output = self._as_sglang(group)
            else:
                found, output = self._by_ourselves(group)
            for i, run in zip(group.members, found, strict=True):
                runs[i] = run
            if group.logprobs:
                entries = read(output)
                for (start, row), run in zip(group.spans(), found, strict=True):
                    if row.emits and row.state.req.return_logprob:
                        table.rows[row.seat] = entries[start : start + len(run)]
        return runs

    def _as_sglang(self, group: Group) -> tuple[list[list[int]], LogitsProcessorOutput]:
        """Apply SGLang's sampler to every position."""
        output = LogitsProcessorOutput(next_token_logits=group.logits)
        tokens = self._sampler(
            output,
            group.info,
            group.logprobs,
            group.top_logprobs_nums,
            group.token_ids_logprobs,
            group.positions,
        )
        return _runs(group, tokens.tolist()), output

    def _by_ourselves(
        self, group: Group
    ) -> tuple[list[list[int]], LogitsProcessorOutput]:
        """Draw where SGLang would draw without a seed."""
        info = group.info
        probs = torch.softmax(group.logits / info.temperatures, dim=-1)
        cut = probs
        if group.filtered:
            cut = filtered_probs(probs, info.top_ks, info.top_ps, info.min_ps)
        if group.rule is Rule.COUPLED:
            tokens = multinomial_with_seed(
                torch.log(cut), info.sampling_seed, group.positions
            ).view(-1)
            runs = _runs(group, tokens.tolist())
        else:
            runs, tokens = reject(group, cut)
        output = LogitsProcessorOutput(next_token_logits=None)
        if group.logprobs:
            # As SGLang's: of the whole distribution, not of the cut one.
            self._sampler.output_logprob_processor.compute_logprobs(
                torch.log(probs),
                group.top_logprobs_nums,
                group.token_ids_logprobs,
                tokens,
            ).write_output_to(output)
        return runs, output


def _runs(group: Group, tokens: list[int]) -> list[list[int]]:
    return [
        _run(row, tokens[start : start + usable])
        for (start, row), usable in zip(group.spans(), group.usable, strict=True)
    ]


def _run(row: RowQueries, tokens: list[int]) -> list[int]:
    return accepted_tokens(row.state.drafts, tokens) if row.verifies else tokens
