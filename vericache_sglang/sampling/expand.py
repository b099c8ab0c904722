"""Expands SGLang's sampling state from one row per request to one per position."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from sglang.srt.constrained.base_grammar_backend import GrammarMask
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo

from vericache_sglang.device.upload import send, upload
from vericache_sglang.sampling.request_view import processor_params

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.sampling.query import RowQueries, SampledRequest


def expand(
    info: SamplingBatchInfo, rows: Sequence[RowQueries[SampledRequest]], *, late: bool
) -> tuple[SamplingBatchInfo, list[int]]:
    """Repeat each request's sampling state for each of its positions.

    Penalties and grammar masks are those of the position: of the verified text and the
    drafts before it.

    Args:
        info: Sampling state of the schedule batch; not modified.
        rows: Rows of the requests, with N positions in total.
        late: Custom processors see all output tokens but the last, as in SGLang's
            overlap schedule.

    Returns:
        The state of N rows, ready for ``apply_logits_bias``; and the number of valid
        positions of each row of ``rows`` (a grammar may end earlier).
    """
    queries = [query for row in rows for query in row.queries]
    batch_indices, seeds = upload(
        info.device,
        [query.batch_index for query in queries],
        [query.state.profile.seed for query in queries],
    )
    additive, scaling = _penalties(info, rows, len(queries))
    mask, usable = _masks(info, rows, len(queries))
    expanded = dataclasses.replace(
        pick(info, batch_indices),
        sampling_seed=seeds,
        logit_bias=None if info.logit_bias is None else info.logit_bias[batch_indices],
        acc_additive_penalties=additive,
        acc_scaling_penalties=scaling,
        grammar_mask=mask,
        **_processors(info, rows, late=late),
    )
    return expanded, usable


def pick(info: SamplingBatchInfo, rows: torch.Tensor) -> SamplingBatchInfo:
    """Return the sampler's inputs for a selection of rows, in the given order.

    Penalties, masks, biases and processors are omitted.

    Args:
        info: State of n rows.
        rows: [m] int64.
    """
    return dataclasses.replace(
        info,
        temperatures=info.temperatures[rows],
        top_ps=info.top_ps[rows],
        top_ks=info.top_ks[rows],
        min_ps=info.min_ps[rows],
        sampling_seed=None if info.sampling_seed is None else info.sampling_seed[rows],
        grammars=None,
        grammar_mask=None,
        penalizer_orchestrator=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        has_custom_logit_processor=False,
        custom_params=None,
        custom_logit_processor=None,
        logit_bias=None,
        return_sampling_masks=None,
        return_sampling_support_logprobs=None,
        sampling_mask_batch_indices=None,
        sampling_support_logprobs_capture_indices=None,
    )


def _penalties(
    info: SamplingBatchInfo, rows: Sequence[RowQueries[SampledRequest]], count: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if all(row.state.penalties is None for row in rows):
        return None, None
    additive = torch.zeros(count, info.vocab_size, device=info.device)
    scaling, scaled = torch.ones_like(additive), False
    end = 0
    for row in rows:
        start, end = end, end + len(row.queries)
        state = row.state
        if state.penalties is None:
            continue
        made = state.penalties.rows(state.emitted, row.ahead, row.queries[0].drafts)
        additive[start:end] = made.additive
        if made.scaling is not None:
            scaling[start:end], scaled = made.scaling, True
    return additive, scaling if scaled else None


def _masks(
    info: SamplingBatchInfo, rows: Sequence[RowQueries[SampledRequest]], count: int
) -> tuple[GrammarMask | None, list[int]]:
    usable = [len(row.queries) for row in rows]
    grammars = [row.state.req.grammar for row in rows if row.state.cursor is not None]
    if not grammars:
        return None, usable
    # On the host: outlines would synchronise when filling device rows.
    mask = grammars[0].allocate_vocab_mask(
        vocab_size=info.vocab_size, batch_size=count, device="cpu"
    )
    end = 0
    for i, row in enumerate(rows):
        start, end = end, end + len(row.queries)
        cursor = row.state.cursor
        if cursor is None:
            continue
        if row.emits:
            cursor.settle()
        behind = row.ahead[row.queries[0].drafts :]
        usable[i] = cursor.mask_after(behind, mask, range(start, end))
    # ``move_vocab_mask`` copies from pageable memory, which synchronises.
    return GrammarMask(grammars[0], send(mask, info.device)), usable


def _processors(
    info: SamplingBatchInfo, rows: Sequence[RowQueries[SampledRequest]], *, late: bool
) -> dict[str, object]:
    if not info.has_custom_logit_processor:
        return {}
    owners = [row for row in rows for _ in row.queries]
    entries = {}
    for key, entry in info.custom_logit_processor.items():
        own = [i for i, row in enumerate(owners) if row.batch_index in entry.rows]
        (indices,) = upload(info.device, own)
        entries[key] = ProcessorEntry(entry.processor, own, indices)
    params = []
    for row in rows:
        state = row.state
        for query in row.queries:
            text = [*state.outputs, *row.ahead[: query.drafts]]
            seen = text[:-1] if late else text
            params.append(processor_params(state.req, seen))
    return {
        "has_custom_logit_processor": True,
        "custom_logit_processor": entries,
        "custom_params": params,
    }
