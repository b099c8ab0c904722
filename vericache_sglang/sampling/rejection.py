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
    also draws from them with ``torch.multinomial`` and therefore synchronises.

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

    Like ``torch.multinomial``, but without its validity check, which synchronises.
    """
    return (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1)


def accept(
    drafts: torch.Tensor, drafted_from: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafts so that outputs follow the target distribution; never synchronises.

    Draft i is accepted with probability min(1, p(x)/q(x)). The first rejected draft is
    replaced by a draw from the positive part of p - q; after the last accepted draft a
    token is drawn from p.

    Args:
        drafts: [d] int64, drawn from ``drafted_from``.
        drafted_from: [d, V] q, distributions under the draft KV.
        target: [n, V] p, distributions under the full KV; n is d + 1, or d if nothing
            may follow the last draft.

    Returns:
        [n] int64 tokens, and the number of leading tokens to emit, 1 to n.
    """
    count, most = len(drafts), len(target)
    p, x = target[:count], drafts[:, None]
    chance = torch.rand(count, device=target.device)
    kept = chance * drafted_from.gather(1, x)[:, 0] <= p.gather(1, x)[:, 0]
    rest = (p - drafted_from).clamp_(min=0.0)
    # Rounding may leave no mass although the draft was rejected.
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p)
    drawn = draw(torch.cat([rest, target[count:]]))
    agreed = kept.to(torch.int64).cumprod(dim=0)
    tokens = drawn.clone()
    tokens[:count] = torch.where(agreed > 0, drafts, drawn[:count])
    return tokens, (agreed.sum() + 1).clamp(max=most)


def reject(group: Group, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample drafts and single tokens, verify drafts; store the draft distributions.

    Args:
        group: Rows under rejection sampling.
        probs: [n, V] distributions of its n positions.

    Returns:
        [n] int64 tokens; and [rows] int64, the number of leading tokens a row emits.
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
