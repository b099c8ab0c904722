"""The token at every position of a forward: the best one, or one drawn with noise.

Shapes are fixed and nothing is read on the host, so the call can stand in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vericache_kernels.next_tokens.ref import best_tokens

__all__ = ["Noise", "bytes_moved", "next_tokens"]

SCORES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of scores."""
TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Noise:
    """Whose noise each of N positions gets.

    Attributes:
        seeds: [N] int64, read as 64 bits without a sign; the request's.
        positions: [N] int32 or int64, true position of the last token before; its low
            32 bits count.
    """

    seeds: torch.Tensor
    positions: torch.Tensor


def next_tokens(scores: torch.Tensor, noise: Noise | None = None) -> torch.Tensor:
    """Return the best token of every position, of equal ones the first.

    With noise a token is drawn: the noise is Gumbel's, from a hash of seed, position
    and column, so a position draws the same token in a draft and in its verification.
    It is the noise of SGLang's ``multinomial_with_seed`` (srt/layers/sampler.py,
    0.5.21): the hashes are equal to the bit; their logarithms and the sums are float64
    and may differ in the last place from one library to another.

    Args:
        scores: [N, V] bfloat16, float16 or float32, contiguous in V. With noise
            logarithms of probabilities; -inf is never chosen over a finite one. NaN
            counts as the greatest, as in ``torch.argmax``.
        noise: Whose noise; None: the argmax of the scores.

    Returns:
        [N] int64, in [0, V).

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    check(scores, noise)
    if scores.device.type == "cpu":
        return best_tokens(scores, noise)
    from vericache_kernels.next_tokens.triton_impl import launch

    return launch(scores, noise)


def bytes_moved(scores: torch.Tensor, noise: Noise | None = None) -> int:
    """Return the least bytes one call moves: scores once in, tokens out.

    Args:
        scores: See ``next_tokens``.
        noise: See there.
    """
    vectors = 0
    if noise is not None:
        vectors = noise.seeds.nbytes + noise.positions.nbytes
    read = scores.numel() * scores.element_size()
    return read + vectors + len(scores) * TOKEN_BYTES


def check(scores: torch.Tensor, noise: Noise | None) -> None:
    """Refuse what the kernel would misread; looks at shapes only, never at contents.

    Raises:
        ValueError: See ``next_tokens``.
    """
    if scores.dim() != 2 or scores.shape[1] < 1 or scores.stride(1) != 1:
        raise ValueError(
            f"scores must be [N, V], contiguous in V, are {tuple(scores.shape)} with "
            f"strides {scores.stride()}"
        )
    if scores.dtype not in SCORES:
        raise ValueError(f"scores are {scores.dtype}: one of {SCORES}")
    if noise is None:
        return
    wanted = {
        "noise.seeds": (noise.seeds, (torch.int64,)),
        "noise.positions": (noise.positions, (torch.int32, torch.int64)),
    }
    for name, (vector, dtypes) in wanted.items():
        if tuple(vector.shape) != (len(scores),) or not vector.is_contiguous():
            raise ValueError(
                f"{name} must be [{len(scores)}], contiguous, is {tuple(vector.shape)}"
            )
        if vector.dtype not in dtypes:
            raise ValueError(f"{name} must be one of {dtypes}, is {vector.dtype}")
        if vector.device != scores.device:
            raise ValueError(f"{name} is on {vector.device}, not on {scores.device}")
