"""Classic speculative sampling (arXiv:2211.17192, 2302.01318; the paper's footnote)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vericache_sglang.device.upload import upload

if TYPE_CHECKING:
    from vericache_sglang.sampling.group import Group


def filtered_probs(
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    """Return the distributions SGLang samples from, after top-k, top-p and min-p.

    As ``top_k_top_p_min_p_sampling_from_probs_torch`` (srt/layers/sampler.py), which
    also draws from them with ``torch.multinomial`` and so waits for the device.

    Args:
        probs: [n, V] after temperature.
        top_ks: [n] int32.
        top_ps: [n] float32.
        min_ps: [n] float32.

    Returns:
        [n, V] float32, rows sum to 1.
    """
    kept, tokens = probs.sort(dim=-1, descending=True)
    before = torch.cumsum(kept, dim=-1) - kept
    rank = torch.arange(probs.shape[-1], device=probs.device)
    kept.masked_fill_((rank >= top_ks[:, None]) | (before > top_ps[:, None]), 0.0)
    # Without a min-p the threshold is 0.
    kept.masked_fill_(kept < kept[:, :1] * min_ps[:, None], 0.0)
    whole = torch.zeros_like(probs).scatter_(-1, tokens, kept)
    return whole / whole.sum(dim=-1, keepdim=True)


def draw(probs: torch.Tensor) -> torch.Tensor:
    """Draw a token from each distribution [n, V]; returns [n] int64.

    As ``torch.multinomial`` does, which waits for the device to check them first.
    """
    return (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1)


def accept(
    drafts: torch.Tensor, drafted_from: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep drafts so that the output is distributed as the target's; nothing waits.

    Draft i is kept with probability min(1, p(x)/q(x)); the first one that is not is
    replaced by a draw from the positive part of p - q; after the last a token is drawn
    from p.

    Args:
        drafts: [d] int64, drawn from ``drafted_from``.
        drafted_from: [d, V] q, distributions of the draft part.
        target: [n, V] p, the full KV's; n is d + 1, or d where nothing may follow the
            last draft.

    Returns:
        [n] int64, of which the first ones are emitted; and how many, 1 to n.
    """
    count, most = len(drafts), len(target)
    p, x = target[:count], drafts[:, None]
    chance = torch.rand(count, device=target.device)
    kept = chance * drafted_from.gather(1, x)[:, 0] <= p.gather(1, x)[:, 0]
    rest = (p - drafted_from).clamp_(min=0.0)
    # Rounding may leave nothing although the draft was refused.
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p)
    drawn = draw(torch.cat([rest, target[count:]]))
    agreed = kept.to(torch.int64).cumprod(dim=0)
    tokens = drawn.clone()
    tokens[:count] = torch.where(agreed > 0, drafts, drawn[:count])
    return tokens, (agreed.sum() + 1).clamp(max=most)


def reject(group: Group, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw drafts and plain tokens, verify drafts; remember what drafts are drawn from.

    Args:
        group: Rows under the rule.
        probs: [n, V] distributions of its n positions.

    Returns:
        [n] int64 tokens; and [rows] int64, how many of its first ones a row emits.
    """
    tokens = draw(probs)
    counts = torch.ones(len(group.rows), dtype=torch.int64, device=probs.device)
    spans = zip(group.spans(), group.usable, strict=True)
    for i, ((start, row), usable) in enumerate(spans):
        state = row.state
        if not row.emits:
            state.drafted_from.append(probs[start])
        if row.verifies and state.drafts:
            (drafts,) = upload(probs.device, state.drafts[:usable])
            drafted_from = torch.stack(state.drafted_from[: len(drafts)])
            end = start + usable
            tokens[start:end], counts[i] = accept(
                drafts, drafted_from, probs[start:end]
            )
    return tokens, counts
