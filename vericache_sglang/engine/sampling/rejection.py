"""Classic speculative sampling (arXiv:2211.17192, 2302.01318; the paper's footnote)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.engine.sampling.group import Group


def filtered_probs(
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """Return the distributions SGLang samples from, after top-k, top-p and min-p.

    Args:
        probs: [n, V] after temperature.
        top_ks: [n] int32.
        top_ps: [n] float32.
        min_ps: [n] float32.

    Returns:
        [n, V] float32, rows sum to 1.
    """
    _, kept, tokens, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        probs,
        top_ks,
        top_ps,
        min_ps,
        True,  # without a min-p the threshold is 0
        None,
        None,
        return_filtered_probs=True,
    )
    whole = torch.zeros_like(probs).scatter_(-1, tokens.to(torch.int64), kept)
    return whole / whole.sum(dim=-1, keepdim=True)


def draw(probs: torch.Tensor) -> int:
    """Draw one token from a [V] distribution."""
    return int(torch.multinomial(probs, num_samples=1))


def accept(
    drafts: Sequence[int],
    drafted_from: Sequence[torch.Tensor],
    target: torch.Tensor,
) -> list[int]:
    """Keep drafts so that the output is distributed as the target's.

    Draft i is kept with probability min(1, p(x)/q(x)); the first one that is not is
    replaced by a draw from the positive part of p - q; after the last a token is drawn
    from p.

    Args:
        drafts: d drafted tokens, drawn from ``drafted_from``.
        drafted_from: q, at least d distributions [V] of the draft part.
        target: [d + 1, V] p, the full KV's; [d, V] where nothing may follow the last
            draft.

    Returns:
        1 to d + 1 tokens; d at most where ``target`` has d rows.
    """
    for i, token in enumerate(drafts):
        p, q = target[i], drafted_from[i]
        if float(torch.rand(())) * float(q[token]) <= float(p[token]):
            continue
        rest = (p - q).clamp_(min=0.0)
        # Rounding may leave nothing although the draft was refused.
        return [*drafts[:i], draw(rest if float(rest.sum()) > 0 else p)]
    if len(target) == len(drafts):
        return list(drafts)
    return [*drafts, draw(target[len(drafts)])]


def reject(group: Group, probs: torch.Tensor) -> tuple[list[list[int]], torch.Tensor]:
    """Draw drafts and plain tokens, verify drafts; remember what drafts are drawn from.

    Args:
        group: Rows under the rule.
        probs: [n, V] distributions of its n positions.

    Returns:
        The tokens of every row; and [n] int64, the token chosen at each position, 0
        after the end of a run.
    """
    tokens = torch.zeros(len(probs), dtype=torch.int64, device=probs.device)
    runs = []
    for (start, row), usable in zip(group.spans(), group.usable, strict=True):
        state = row.state
        if row.verifies:
            target = probs[start : start + usable]
            run = accept(state.drafts[:usable], state.drafted_from, target)
        else:
            run = [draw(probs[start])]
            if not row.emits:
                state.drafted_from.append(probs[start])
        tokens[start : start + len(run)] = torch.tensor(run, device=probs.device)
        runs.append(run)
    return runs, tokens
