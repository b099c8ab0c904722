"""A custom logit processor that reads the request's text, for the comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

if TYPE_CHECKING:
    import torch


class Avoid(CustomLogitProcessor):
    """Lowers the last ``window`` output tokens by ``by``, as its parameters say.

    What it does to a position depends on every token before it, drafts included, so it
    shows whether a processor sees the text it would see on plain SGLang.
    """

    def __call__(
        self,
        logits: torch.Tensor,
        custom_param_list: list[dict[str, Any]] | None = None,
    ) -> torch.Tensor:
        """Return ``logits`` [n, V], lowered in place; one parameter set per row."""
        for row, params in enumerate(custom_param_list or []):
            for token in params["__req__"].output_ids[-params["window"] :]:
                logits[row, token] -= params["by"]
        return logits
