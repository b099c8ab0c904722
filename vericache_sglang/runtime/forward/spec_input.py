"""The ``SpecInput`` of mixed forwards and of SGLang's relay between iterations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

if TYPE_CHECKING:
    from collections.abc import Callable

    from vericache_kernels.packed_attention import Segment
    from vericache_sglang.attention.packed_rows import CodedRows


def hidden_mode(*, features: bool) -> CaptureHiddenMode | None:
    """Return the mode of a forward whose hidden states are read; None leaves it."""
    return CaptureHiddenMode.FULL if features else None


def take_hidden(result: Any) -> torch.Tensor:
    """Take the hidden states [tokens, F] from a result, so that it does not keep them.

    Args:
        result: SGLang's ``GenerationBatchResult`` of a forward that returned them.
    """
    hidden: torch.Tensor = result.logits_output.hidden_states
    result.logits_output.hidden_states = None
    return hidden


class VeriCacheSpecInput(SpecInput):
    """Carries positions into a mixed forward; an empty relay between iterations.

    Pending and drafted tokens are kept in ``RequestState``, so nothing is relayed.
    ``RelayPayload.from_draft_input`` (overlap_utils.py) still reads the five attributes
    below.

    Args:
        positions: [tokens] int64 true positions of a mixed forward; None in a relay.
        row_lengths: Query tokens of every row of a mixed forward; None in a relay.
        features: An inner drafter reads what the forward computes.
    """

    def __init__(
        self,
        positions: torch.Tensor | None = None,
        row_lengths: list[int] | None = None,
        *,
        features: bool = False,
    ) -> None:
        # The enum cannot be extended; this member has the fewest special cases.
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.positions = positions
        # Read by the hook on LoRA batches (patches: lora_utils).
        self.row_lengths = row_lengths
        # Row -> leading code slots, and their decoder by layer.
        # SGLang copies a ForwardBatch field by field, so it cannot carry them itself.
        self.packed: dict[int, tuple[int, Callable[[int], list[Segment]]]] = {}
        # The same on a GPU; None if no row begins with codes.
        self.coded: CodedRows | None = None
        # Read by ForwardBatch.init_new, and when a CUDA graph is captured.
        self.capture_hidden_mode = hidden_mode(features=features)
        # Reason why no CUDA graph fits the forward; None if one does.
        self.eager: str | None = None
        self.future_indices: torch.Tensor | None = None
        self.bonus_tokens = None
        self.topk_p = None
        self.topk_index = None
        self.hidden_states = None
        self.num_tokens_per_req = 1
        self.num_tokens_for_logprob_per_req = 1

    def filter_batch(
        self, new_indices: torch.Tensor, new_indices_cpu: Any = None
    ) -> None:
        """Keep the rows SGLang keeps; called by ``ScheduleBatch.filter_batch``."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]

    def merge_batch(self, other: VeriCacheSpecInput) -> None:
        """Append another batch's rows; called by ``ScheduleBatch.merge_batch``."""
        if self.future_indices is not None and other.future_indices is not None:
            self.future_indices = torch.cat((self.future_indices, other.future_indices))
