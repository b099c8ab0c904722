"""The next token of every position in torch, without a loop over positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vericache_kernels.next_tokens import Noise

LOW = 0xFFFFFFFF
"""The low 32 bits of an int64: hashes are taken there, without a sign."""


def best_tokens(scores: torch.Tensor, noise: Noise | None) -> torch.Tensor:
    """See ``next_tokens``."""
    if noise is None:
        return torch.argmax(scores.float(), dim=1)
    return torch.argmax(gumbel(noise, scores.shape[1]) + scores.double(), dim=1)


def gumbel(noise: Noise, columns: int) -> torch.Tensor:
    """Return the noise of every position and column, [N, columns] float64.

    -log(-log(u)) of u = hash / (2**32 - 1); the ends of u are cut as SGLang's
    ``multinomial_with_seed`` (srt/layers/sampler.py, 0.5.21) cuts them.
    """
    uniform = hashes(noise, columns).double() / LOW
    least = torch.finfo(torch.float64).min
    return -uniform.log().clamp(min=least, max=-(2.0**-32)).neg().log()


def hashes(noise: Noise, columns: int) -> torch.Tensor:
    """Return MurmurHash3 (x86, 32 bits) of four words, [N, columns] int64 in 32 bits.

    The words are the seed's low and high half, the position and the column.
    """
    column = torch.arange(columns, device=noise.seeds.device)
    state = torch.zeros_like(noise.seeds)
    for word in (noise.seeds & LOW, noise.seeds >> 32 & LOW, noise.positions & LOW):
        state = _mix(state, word.long())
    state = _mix(state[:, None], column[None, :]) ^ 16  # bytes hashed
    state = (state ^ state >> 16) * 0x85EBCA6B & LOW
    state = (state ^ state >> 13) * 0xC2B2AE35 & LOW
    return state ^ state >> 16


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    """Take one word into the state; products wrap, their low 32 bits are right."""
    word = _rotate(word * 0xCC9E2D51 & LOW, 15) * 0x1B873593 & LOW
    return _rotate(state ^ word, 13) * 5 + 0xE6546B64 & LOW


def _rotate(word: torch.Tensor, bits: int) -> torch.Tensor:
    return (word << bits | word >> 32 - bits) & LOW
