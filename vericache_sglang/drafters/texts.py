"""The text of every running request on the device, drafts included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vericache_sglang.device.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence


class Texts:
    """One row per ``req_pool_idx``: prompt, output and drafts by position.

    Args:
        requests: Most running requests; their rows are 1 to ``requests``.
        longest: Most tokens of a text with its drafts.
        device: Device of the forwards.

    Attributes:
        tokens: [requests + 1, longest + 1] int32, contiguous.
    """

    def __init__(self, requests: int, longest: int, device: torch.device | str) -> None:
        # The last column takes what is written for nothing.
        self.tokens = torch.zeros(
            requests + 1, longest + 1, dtype=torch.int32, device=device
        )

    def put(self, pool_idx: int, tokens: Sequence[int], position: int = 0) -> None:
        """Write tokens that the host knows, the first one at ``position``."""
        (sent,) = upload(self.tokens.device, tokens)
        end = position + len(tokens)
        self.tokens[pool_idx, position:end] = sent.to(torch.int32)

    def write(
        self, pool_idx: torch.Tensor, position: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Write runs of tokens without waiting for the device.

        Args:
            pool_idx: [n] int64, unique.
            position: [n] int64, where each run begins.
            tokens: [n, m], any integer dtype; a run ends before the first negative one.
        """
        spare = self.tokens.shape[1] - 1
        place = position[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        place = torch.where(tokens >= 0, place, spare).clamp(max=spare)
        self.tokens[pool_idx[:, None], place] = tokens.to(torch.int32)
