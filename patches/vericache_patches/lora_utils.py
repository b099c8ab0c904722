"""Hook on ``sglang/srt/lora/utils.py``: adapters in a forward of ragged rows."""

from __future__ import annotations

from typing import Any

import torch

from vericache_patches.record import Hook, Patch


def generate_sequence_lengths(
    original: Hook, forward_batch: Any, device: Any = None
) -> torch.Tensor:
    """Return [rows] int32, the query tokens of every row of a mixed forward."""
    lengths = getattr(forward_batch.spec_info, "row_lengths", None)
    if lengths is None:
        made: torch.Tensor = original(forward_batch, device)
        return made
    return torch.tensor(lengths, dtype=torch.int32, device=device)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target="sglang.srt.lora.utils.generate_sequence_lengths",
            kind="around",
            args=("forward_batch", "device"),
            reason="It takes every row of a verification to have as many tokens, and "
            "would give tokens of one request to another's adapter.",
            remove_when="SGLang reads the lengths of a verification's rows from its "
            "spec input.",
        ),
        generate_sequence_lengths,
    ),
)
