"""Records of ``suffix_match``: texts and the corpus that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LONGEST = 8
"""Tokens of the longest match."""
NONE = -1
"""Where no token follows; documents of a corpus end with it."""


@dataclass(frozen=True, slots=True, eq=False)
class TextRows:
    """n texts.

    Attributes:
        text: [R, W] int32, contiguous, token ids >= 0.
        pool_idx: [n] int64, rows of ``text``.
        length: [n] int64, tokens of each text, 0 to W.
        shared: [n] int64, 1 if the corpus is searched too, else 0.
    """

    text: torch.Tensor
    pool_idx: torch.Tensor
    length: torch.Tensor
    shared: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """A ring of documents, each followed by ``NONE``.

    Attributes:
        tokens: [C] int32, contiguous; ``NONE`` where nothing was written yet. The first
            document after the ring's end may have lost its beginning.
        end: [1] int64, place of the next document, in [0, max(C, 1)).
    """

    tokens: torch.Tensor
    end: torch.Tensor
