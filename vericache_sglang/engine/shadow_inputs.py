"""Which of the scheduler's inputs a shadow check gets out of the way for."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    CloseSessionReqInput,
    FlushCacheReqInput,
    GetInternalStateReq,
    OpenSessionReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)

BESIDE = (
    *(TokenizedGenerateReqInput, BatchTokenizedGenerateReqInput),
    *(TokenizedEmbeddingReqInput, BatchTokenizedEmbeddingReqInput),
    *(AbortReq, OpenSessionReqInput, CloseSessionReqInput, GetInternalStateReq),
)
"""Inputs that are served beside a shadow."""


def needs_quiet(given: Any) -> bool:
    """Say whether an input may expect a server whose clients wait for nothing to idle.

    A flush is refused, and a weight update ends the process, while requests run. What
    is not known to be harmless counts as such an input.
    """
    return not isinstance(given, BESIDE)


def may_change_answers(given: Any) -> bool:
    """Say whether answers from before an input may rightly differ from later ones.

    True of new weights and adapters, and of what is not known; a flush changes none.
    """
    return needs_quiet(given) and not isinstance(given, FlushCacheReqInput)


def brings_weights(given: Any) -> bool:
    """Say whether an input replaces the model's weights, from wherever they come."""
    return type(given).__name__.startswith("UpdateWeight")
