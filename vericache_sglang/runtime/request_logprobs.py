"""Log-probabilities that SGLang keeps with a request, read, added and taken back."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch

from vericache_sglang.remote.messages import Logprobs, WantedLogprobs
from vericache_sglang.sampling.logprobs import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sglang.srt.managers.schedule_batch import Req

LISTS = tuple(
    f"output_{kind}_logprobs_{field}"
    for kind in ("token", "top", "token_ids")
    for field in ("val", "idx")
)
"""Lists of SGLang's ``ReqLogprob``, with an entry per output token; the last four stay
empty if they are not requested."""

OF_PROMPT = tuple(name.replace("output", "input") for name in LISTS)
"""The same lists of a prompt's tokens; None until the prompt is prefilled."""


def wanted_by(req: Req) -> WantedLogprobs | None:
    """Return the log-probabilities of output tokens that a request asks for."""
    if not req.return_logprob:
        return None
    asked = req.logprob
    chosen = asked.token_ids_logprob
    return WantedLogprobs(
        asked.top_logprobs_num, None if chosen is None else tuple(chosen)
    )


def logprobs_from(req: Req, first: int) -> list[Logprobs]:
    """Return the entries of a request from index ``first`` on."""
    values, _, *others = (getattr(req.logprob, name)[first:] for name in LISTS)
    columns = [map(_plain, each) if each else repeat(()) for each in others]
    return [
        Logprobs(float(value), tuple(row[:2]), tuple(row[2:]))
        for value, *row in zip(values, *columns, strict=False)
    ]


def add_logprobs(req: Req, tokens: Sequence[int], added: Sequence[Logprobs]) -> None:
    """Append entries to those of a request.

    Args:
        tokens: The output tokens they belong to, as many.
        added: The entries.
    """
    asked = req.logprob
    for token, each in zip(tokens, added, strict=True):
        asked.output_token_logprobs_val.append(each.value)
        asked.output_token_logprobs_idx.append(token)
        if asked.top_logprobs_num > 0:
            asked.output_top_logprobs_val.append(list(each.top[0]))
            asked.output_top_logprobs_idx.append(list(each.top[1]))
        if asked.token_ids_logprob is not None:
            asked.output_token_ids_logprobs_val.append(list(each.chosen[0]))
            asked.output_token_ids_logprobs_idx.append(list(each.chosen[1]))


def take_last_logprobs(req: Req) -> Logprobs | None:
    """Remove and return the last entry of a request; None if it wants none."""
    if not req.return_logprob:
        return None
    (last,) = logprobs_from(req, len(req.logprob.output_token_logprobs_val) - 1)
    for name in LISTS:
        del getattr(req.logprob, name)[-1:]
    return last


def tell_no_prompt(req: Req) -> None:
    """Have SGLang tell nothing of a prompt that was never prefilled here.

    It does so after the prefill of a prompt alone. A prefill of further tokens, which
    are known without one, would take their log-probabilities for the prompt's, and
    SGLang's scheduler would end at an assertion about their number.
    """
    for name in OF_PROMPT:
        if getattr(req.logprob, name) is None:
            setattr(req.logprob, name, [])


def put_logprobs(output: Any, i: int, known: Logprobs) -> None:
    """Replace what SGLang's sampler tells of a row.

    Args:
        output: Its ``LogitsProcessorOutput``.
        i: Index of the row.
        known: What takes its place.
    """
    output.next_token_logprobs[i].fill_(known.value)
    if output.next_token_top_logprobs_val:
        values, tokens = _top(known)
        output.next_token_top_logprobs_val[i] = values
        output.next_token_top_logprobs_idx[i] = tokens
    if output.next_token_token_ids_logprobs_val:
        values, chosen = _chosen(known)
        output.next_token_token_ids_logprobs_val[i] = values
        output.next_token_token_ids_logprobs_idx[i] = chosen


def told(others: Iterable[Logprobs]) -> list[TokenLogprob]:
    """Return the log-probabilities that another server has computed."""
    return [TokenLogprob(each.value, _top(each), _chosen(each)) for each in others]


def _top(entry: Logprobs) -> tuple[torch.Tensor, torch.Tensor]:
    values, tokens = entry.top
    return torch.tensor(values), torch.tensor(tokens, dtype=torch.int64)


def _chosen(entry: Logprobs) -> tuple[torch.Tensor, list[int]]:
    values, tokens = entry.chosen
    return torch.tensor(values), list(tokens)


def _plain(entries: Any) -> tuple[Any, ...]:
    """Return a tensor or list as a tuple of numbers."""
    return tuple(entries.tolist() if isinstance(entries, torch.Tensor) else entries)
