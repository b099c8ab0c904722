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
from vericache_sglang.engine.upload import upload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
        self,
        batch: ScheduleBatch,
        rows: Sequence[RowQueries],
        logits: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[list[list[int]], LogprobTable]:
        """Choose the tokens of every row.

        Args:
            batch: The decode batch.
            rows: The rows of the forward.
            logits: [T, V]; not modified.
            positions: [T] int64, true positions in the text.

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
            chosen = [rows[i] for i in dressed]
            sampled = self._sample(batch, chosen, logits, positions, table)
            for i, run in zip(dressed, sampled, strict=True):
                runs[i] = run
        return runs, table

    def targets(
        self,
        batch: ScheduleBatch,
        rows: Sequence[RowQueries],
        logits: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Choose the token at every position without waiting for the device.

        Args:
            batch: The decode batch.
            rows: The rows of the forward; of late requests only.
            logits: [T, V]; not modified.
            positions: [T] int64, true positions in the text.

        Returns:
            [T] int64, each what the request's next token would be there.
        """
        target = torch.argmax(logits, dim=-1)
        drawn = [row for row in rows if not row.state.profile.bare]
        parts = self._grouped(batch, drawn, logits, positions) if drawn else ()
        for group in parts:
            tokens, _ = self._tokens(group)
            (at,) = upload(
                logits.device, [query.at for row in group.rows for query in row.queries]
            )
            target[at] = tokens.to(target.dtype)
        return target

    def _grouped(
        self,
        batch: ScheduleBatch,
        rows: Sequence[RowQueries],
        logits: torch.Tensor,
        positions: torch.Tensor,
    ) -> Iterator[Group]:
        """Part rows that are more than an argmax; their logits are ready to sample."""
        queries = (query for row in rows for query in row.queries)
        (at,) = upload(logits.device, [query.at for query in queries])
        picked = logits[at]  # a copy
        # With a grammar in the batch SGLang samples after the last result is known.
        late = self._overlap and not batch.has_grammar
        info, usable = expand(batch.sampling_info, rows, late=late)
        info.apply_logits_bias(picked)
        if info.has_custom_logit_processor:
            apply_custom_logit_processor(picked, info)
        yield from groups(batch, rows, usable, info, picked, positions[at])

    def _sample(
        self,
        batch: ScheduleBatch,
        rows: Sequence[RowQueries],
        logits: torch.Tensor,
        positions: torch.Tensor,
        table: LogprobTable,
    ) -> list[list[int]]:
        """Choose for rows that are more than an argmax; fills ``table``."""
        runs: list[list[int]] = [[]] * len(rows)
        for group in self._grouped(batch, rows, logits, positions):
            if group.rule is Rule.REJECTION:
                found, output = self._rejected(group)
            else:
                tokens, output = self._tokens(group)
                found = _runs(group, tokens.tolist())
            for i, run in zip(group.members, found, strict=True):
                runs[i] = run
            if group.logprobs:
                entries = read(output)
                for (start, row), run in zip(group.spans(), found, strict=True):
                    if row.emits and row.state.req.return_logprob:
                        table.rows[row.seat] = entries[start : start + len(run)]
        return runs

    def _tokens(self, group: Group) -> tuple[torch.Tensor, LogitsProcessorOutput]:
        """Choose [n] tokens, one at every position, each for itself."""
        if group.rule is not Rule.COUPLED:
            output = LogitsProcessorOutput(next_token_logits=group.logits)
            tokens = self._sampler(
                output,
                group.info,
                group.logprobs,
                group.top_logprobs_nums,
                group.token_ids_logprobs,
                group.positions,
            )
            return tokens, output
        probs, cut = _distributions(group)
        tokens = multinomial_with_seed(
            torch.log(cut), group.info.sampling_seed, group.positions
        ).view(-1)
        return tokens, self._logprobs(group, probs, tokens)

    def _rejected(self, group: Group) -> tuple[list[list[int]], LogitsProcessorOutput]:
        """Draw by rejection sampling, row by row."""
        probs, cut = _distributions(group)
        runs, tokens = reject(group, cut)
        return runs, self._logprobs(group, probs, tokens)

    def _logprobs(
        self, group: Group, probs: torch.Tensor, tokens: torch.Tensor
    ) -> LogitsProcessorOutput:
        """Return log-probabilities of drawn tokens, as far as they are asked for."""
        output = LogitsProcessorOutput(next_token_logits=None)
        if group.logprobs:
            # As SGLang's: of the whole distribution, not of the cut one.
            self._sampler.output_logprob_processor.compute_logprobs(
                torch.log(probs),
                group.top_logprobs_nums,
                group.token_ids_logprobs,
                tokens,
            ).write_output_to(output)
        return output


def _distributions(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [n, V] probabilities after temperature, and after cutting."""
    info = group.info
    probs = torch.softmax(group.logits / info.temperatures, dim=-1)
    if not group.filtered:
        return probs, probs
    return probs, filtered_probs(probs, info.top_ks, info.top_ps, info.min_ps)


def _runs(group: Group, tokens: list[int]) -> list[list[int]]:
    return [
        _run(row, tokens[start : start + usable])
        for (start, row), usable in zip(group.spans(), group.usable, strict=True)
    ]


def _run(row: RowQueries, tokens: list[int]) -> list[int]:
    return accepted_tokens(row.state.drafts, tokens) if row.verifies else tokens
