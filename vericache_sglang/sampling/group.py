"""Groups rows of one forward by the sampling path of SGLang's sampler."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vericache_sglang.device.upload import upload
from vericache_sglang.sampling.expand import pick
from vericache_sglang.sampling.profile import SamplingRule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from vericache_sglang.sampling.query import RowQueries, SampledRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows that are sampled in one call.

    SGLang's sampler uses one path for a whole batch: argmax, noise over the vocabulary,
    or noise over the tokens sorted for top-k and top-p. A seeded request must not
    change its path with the other requests of the batch, so each path has its own call.

    Attributes:
        usable: Number of valid positions of each row.
        rule: Sampling rule of the rows.
        filtered: Top-k, top-p or min-p filter their distributions.
        info: Sampling state, one row per position.
        logits: [n, V], ready for temperature and sampling; a copy.
        positions: [n] int64, true positions of the last token before each.
        logprobs: Log-probabilities are requested.
        top_logprobs_nums: Per position, as SGLang's sampler takes it.
        token_ids_logprobs: Per position, as SGLang's sampler takes it.
    """

    rows: list[RowQueries[SampledRequest]]
    usable: list[int]
    rule: SamplingRule
    filtered: bool
    info: SamplingBatchInfo
    logits: torch.Tensor
    positions: torch.Tensor
    logprobs: bool
    top_logprobs_nums: list[int]
    token_ids_logprobs: list[list[int] | None]

    def spans(self) -> Iterator[tuple[int, RowQueries[SampledRequest]]]:
        """Yield each row with the index of its first position."""
        start = 0
        for row in self.rows:
            yield start, row
            start += len(row.queries)


def groups(
    batch: ScheduleBatch,
    rows: Sequence[RowQueries[SampledRequest]],
    usable: Sequence[int],
    info: SamplingBatchInfo,
    logits: torch.Tensor,
    positions: torch.Tensor,
) -> Iterator[Group]:
    """Group rows by their sampling path.

    Args:
        batch: The decode batch; gives the requested log-probabilities.
        rows: Rows with N positions in total.
        usable: Number of valid positions of each row.
        info: Sampling state of the N positions.
        logits: [N, V], penalties, masks, biases and processors applied.
        positions: [N] int64, true positions of the last token before each.
    """
    starts, count = [], 0
    for row in rows:
        starts.append(count)
        count += len(row.queries)
    kinds: dict[tuple[SamplingRule, bool], list[int]] = {}
    for i, row in enumerate(rows):
        profile = row.state.profile
        kinds.setdefault((profile.rule, profile.filtered), []).append(i)
    for (rule, filtered), members in kinds.items():
        mine = [rows[i] for i in members]
        queries = [query for row in mine for query in row.queries]
        (at,) = upload(
            logits.device,
            [starts[i] + j for i in members for j in range(len(rows[i].queries))],
        )
        batch_indices = [query.batch_index for query in queries]
        yield Group(
            rows=mine,
            usable=[usable[i] for i in members],
            rule=rule,
            filtered=filtered,
            info=dataclasses.replace(
                pick(info, at),
                is_all_greedy=rule is SamplingRule.GREEDY,
                is_any_greedy=rule is SamplingRule.GREEDY,
                need_top_p_sampling=filtered,
                need_top_k_sampling=filtered,
                need_min_p_sampling=filtered,
            ),
            logits=logits[at],
            positions=positions[at],
            logprobs=any(row.state.req.return_logprob for row in mine),
            top_logprobs_nums=_of_batch_indices(
                batch.top_logprobs_nums, batch_indices, 0
            ),
            token_ids_logprobs=_of_batch_indices(
                batch.token_ids_logprobs, batch_indices, None
            ),
        )


def _of_batch_indices(
    values: Sequence[Any] | None, batch_indices: list[int], default: Any
) -> Any:
    return [
        default if not values else values[batch_index] for batch_index in batch_indices
    ]
