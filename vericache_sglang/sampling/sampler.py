"""Samples the tokens of a mixed forward: drafted, verified and autoregressive.

The next token at a position is sampled by SGLang's sampler from the logits with the
request's noise for that position (none for greedy requests). Drafts use the same noise,
so a draft is accepted if and only if it equals the token under full KV: output with a
seed equals plain SGLang's, output without a seed has the same distribution. Requests
with classic rejection sampling are the exception (``rejection.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import (
    apply_custom_logit_processor,
    multinomial_with_seed,
)

from vericache_sglang.device.upload import download, upload
from vericache_sglang.sampling.accept import accepted_tokens
from vericache_sglang.sampling.expand import expand
from vericache_sglang.sampling.group import groups
from vericache_sglang.sampling.logprobs import LogprobTable, read
from vericache_sglang.sampling.profile import SamplingRule, depends_on_tokens
from vericache_sglang.sampling.rejection import filtered_probs, reject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from vericache_sglang.sampling.group import Group
    from vericache_sglang.sampling.query import RowQueries, SampledRequest


@dataclass(frozen=True, slots=True, eq=False)
class _Sampled:
    """A sampled group.

    Attributes:
        output: Requested log-probabilities.
        counts: [rows] int64, number of tokens that each row emits under rejection
            sampling; else None.
    """

    group: Group
    output: LogitsProcessorOutput
    counts: torch.Tensor | None = None


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
        rows: Sequence[RowQueries[SampledRequest]],
        logits: torch.Tensor,
        positions: torch.Tensor,
        inputs: torch.Tensor,
        waited: Callable[[], None],
    ) -> tuple[list[list[int]], LogprobTable]:
        """Sample the tokens of every row; synchronises once.

        It does so twice if what may follow a proposal depends on it.

        Args:
            batch: The decode batch.
            rows: The rows of the forward.
            logits: [T, V]; not modified.
            positions: [T] int64, true positions in the text.
            inputs: [T] int64, token ids of the forward: behind a row's first query its
                drafts and proposals.
            waited: Called after the synchronisation, when all earlier tokens are known.

        Returns:
            For each row the 1 to d + 1 tokens that it drafts or emits, of which d are
            drafts or proposals behind its first query; and the log-probabilities of
            emitted tokens.
        """
        rows = _with_proposals(rows, inputs)
        target, sampled = self._sample(batch, rows, logits, positions)
        told = [each for each in sampled if each.group.logprobs]
        drawn = [(s.group, s.counts) for s in sampled if s.counts is not None]
        # The only synchronisation: one copy of all results that the host needs.
        numbers, guesses, *more = download(
            target,
            inputs,
            *(each.output.next_token_logprobs for each in told),
            *(count for _, count in drawn),
        )
        waited()
        values, counts = more[: len(told)], more[len(told) :]
        predicted, guessed = numbers.tolist(), guesses.tolist()
        usable = {row.batch_index: len(row.queries) for row in rows}
        for each in sampled:
            group = each.group
            for row, count in zip(group.rows, group.usable, strict=True):
                usable[row.batch_index] = count
        runs = {}
        for row in rows:
            at = [query.at for query in row.queries[: usable[row.batch_index]]]
            runs[row.batch_index] = accepted_tokens(
                [guessed[i] for i in at[1:]], [predicted[i] for i in at]
            )
        for (group, _), emitted in zip(drawn, counts, strict=True):
            for row, count in zip(group.rows, emitted.tolist(), strict=True):
                runs[row.batch_index] = [predicted[q.at] for q in row.queries[:count]]
        table = LogprobTable()
        for each, own in zip(told, values, strict=True):
            each.output.next_token_logprobs = own
            entries = read(each.output)
            for start, row in each.group.spans():
                if row.emits and row.state.req.return_logprob:
                    table.rows[row.batch_index] = entries[
                        start : start + len(runs[row.batch_index])
                    ]
        return [runs[row.batch_index] for row in rows], table

    def targets(
        self,
        batch: ScheduleBatch,
        rows: Sequence[RowQueries[SampledRequest]],
        logits: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Sample the token at every position without waiting for the device.

        Args:
            batch: The decode batch.
            rows: The rows of the forward; of asynchronous requests only.
            logits: [T, V]; not modified.
            positions: [T] int64, true positions in the text.

        Returns:
            [T] int64, the next token at each position.
        """
        target, _ = self._sample(batch, rows, logits, positions)
        return target

    def _sample(
        self,
        batch: ScheduleBatch,
        rows: Sequence[RowQueries[SampledRequest]],
        logits: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, list[_Sampled]]:
        """Sample [T] tokens on the device; also return the sampled groups."""
        target = torch.argmax(logits, dim=-1)
        sampled = []
        needs_sampling = [row for row in rows if not row.state.profile.greedy_fast]
        parts = (
            self._grouped(batch, needs_sampling, logits, positions)
            if needs_sampling
            else ()
        )
        for group in parts:
            tokens, one = self._tokens(group)
            (at,) = upload(
                logits.device, [query.at for row in group.rows for query in row.queries]
            )
            target[at] = tokens.to(target.dtype)
            sampled.append(one)
        return target, sampled

    def _grouped(
        self,
        batch: ScheduleBatch,
        rows: Sequence[RowQueries[SampledRequest]],
        logits: torch.Tensor,
        positions: torch.Tensor,
    ) -> Iterator[Group]:
        """Group the rows that are not greedy fast path, with logits ready to sample."""
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

    def _tokens(self, group: Group) -> tuple[torch.Tensor, _Sampled]:
        """Sample [n] tokens, one per position, independently."""
        if group.rule in (SamplingRule.GREEDY, SamplingRule.SEEDED):
            output = LogitsProcessorOutput(next_token_logits=group.logits)
            tokens = self._sampler(
                output,
                group.info,
                group.logprobs,
                group.top_logprobs_nums,
                group.token_ids_logprobs,
                group.positions,
            )
            return tokens, _Sampled(group, output)
        probs, cut = _distributions(group)
        if group.rule is SamplingRule.REJECTION:
            tokens, counts = reject(group, cut)
            return tokens, _Sampled(group, self._logprobs(group, probs, tokens), counts)
        tokens = multinomial_with_seed(
            torch.log(cut), group.info.sampling_seed, group.positions
        ).view(-1)
        return tokens, _Sampled(group, self._logprobs(group, probs, tokens))

    def _logprobs(
        self, group: Group, probs: torch.Tensor, tokens: torch.Tensor
    ) -> LogitsProcessorOutput:
        """Return the requested log-probabilities of sampled tokens."""
        output = LogitsProcessorOutput(next_token_logits=None)
        if group.logprobs:
            # As in SGLang: from the unfiltered distribution.
            self._sampler.output_logprob_processor.compute_logprobs(
                torch.log(probs),
                group.top_logprobs_nums,
                group.token_ids_logprobs,
                tokens,
            ).write_output_to(output)
        return output


def _with_proposals(
    rows: Sequence[RowQueries[SampledRequest]], inputs: torch.Tensor
) -> Sequence[RowQueries[SampledRequest]]:
    """Return the rows with the proposals that masks, penalties and processors see.

    Args:
        rows: The rows of the forward; results of those that depend on tokens are known.
        inputs: [T] int64, see ``RowSampler.choose``.
    """
    counts = [_seen_proposals(row) for row in rows]
    if not any(counts):
        return rows
    tokens = download(inputs)[0].tolist()
    return [
        replace(row, proposed=tuple(tokens[q.at] for q in row.queries[-count:]))
        if count
        else row
        for row, count in zip(rows, counts, strict=True)
    ]


def _seen_proposals(row: RowQueries[SampledRequest]) -> int:
    """Return a row's proposals if the tokens after them depend on them, else 0."""
    state = row.state
    if state.profile.greedy_fast:
        return 0
    count = row.queries[-1].drafts - len(state.drafts)
    return count if count and depends_on_tokens(state.req) else 0


def _distributions(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [n, V] probabilities after temperature, and after filtering."""
    info = group.info
    probs = torch.softmax(group.logits / info.temperatures, dim=-1)
    if not group.filtered:
        return probs, probs
    return probs, filtered_probs(probs, info.top_ks, info.top_ps, info.min_ps)
