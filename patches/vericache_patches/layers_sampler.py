"""Hooks on ``sglang/srt/layers/sampler.py``: min-p with a seed; rows of NaN."""

from __future__ import annotations

from typing import Any

import torch

from vericache_patches.record import Hook, Patch


def sample(original: Hook, probs: torch.Tensor, *rest: Any, **more: Any) -> Any:
    """Apply min-p first if there is a seed, then call upstream.

    A token below the min-p threshold of the filtered distribution is also below that of
    the full one: filters remove only the tail, so the highest probability is kept.
    """
    top_ks, top_ps, min_ps, need_min_p, seed, positions = rest
    certain(probs)
    if need_min_p and seed is not None:
        least = probs.amax(dim=-1, keepdim=True) * min_ps.view(-1, 1)
        probs, need_min_p = torch.where(probs < least, 0.0, probs), False
    return original(probs, top_ks, top_ps, min_ps, need_min_p, seed, positions, **more)


def certain(probs: torch.Tensor) -> None:
    """Give token 0 probability 1, in place, in rows [V] of ``probs`` with a NaN.

    Such rows come from a grammar that allows no token. It does not allow token 0
    either, so SGLang aborts the request. Does not synchronise.
    """
    bad = ~torch.isfinite(probs.sum(dim=-1, keepdim=True))
    probs.masked_fill_(bad, 0.0)
    probs[:, :1].masked_fill_(bad, 1.0)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch"
            ),
            kind="around",
            args=(
                *("probs", "top_ks", "top_ps", "min_ps", "need_min_p_sampling"),
                *("sampling_seed", "positions", "return_filtered_probs"),
            ),
            reason="It asserts that no batch has both a min-p and seeds, so one such "
            "request ends the scheduler. A registered sampler has a backend's name of "
            "its own, for which SGLang's refuses to sample.",
            remove_when="SGLang samples with min-p and a seed.",
            body="e293e136fc04",
        ),
        sample,
    ),
)
