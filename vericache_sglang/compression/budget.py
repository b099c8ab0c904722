"""The equal-count rule: from scores to the same number of kept tokens in every head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vericache_sglang.errors import CompressionError

MOST = 2**63 - 1
"""Key of a protected token: above that of any score."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Token counts that every head of a prompt keeps, and its protected tokens.

    Attributes:
        offered: T, tokens the selector scores.
        kept: n, tokens each head keeps; 0 < n <= T.
        sinks: First tokens always kept.
        recent: Last tokens always kept.
        coded: Kept tokens that a codec encodes; the other kept tokens stay exact.
        code_slots: KV slots of the encoded tokens.
        run: Encoded tokens of each segment that prompts share, which has slots of its
            own, in whole pages; 0: the prompt's codes are those of one request.
    """

    offered: int
    kept: int
    sinks: int
    recent: int
    coded: int = 0
    code_slots: int = 0
    run: int = 0

    @property
    def dropped(self) -> int:
        """Dropped tokens per head."""
        return self.offered - self.kept

    @property
    def exact(self) -> int:
        """Kept tokens stored exactly, one slot each."""
        return self.kept - self.coded

    @property
    def slots(self) -> int:
        """Slots of the draft KV: those of codes plus those of exact tokens."""
        return self.code_slots + self.exact

    @property
    def staged(self) -> int:
        """Tokens with residual KV: encoded ones and dropped ones."""
        return self.offered - self.exact

    def times(self, count: int) -> Budget:
        """Return the counts of ``count`` >= 1 prompts like this one, in a row."""
        return replace(
            self,
            offered=count * self.offered,
            kept=count * self.kept,
            coded=count * self.coded,
            code_slots=count * self.code_slots,
        )


def budget_for(
    offered: int, keep: float, sinks: int, recent: int, align: int
) -> Budget:
    """Round the kept share up to whole pages and fit the protected tokens into it.

    Args:
        offered: T, a multiple of ``align``, >= 1.
        keep: Share of tokens to keep, in (0, 1].
        sinks: First tokens to protect; trimmed when they exceed the budget.
        recent: Last tokens to protect; trimmed after ``sinks``.
        align: Kept counts are multiples of this, in tokens.

    Returns:
        A budget with ``kept`` in [align, offered], a multiple of ``align``.
    """
    wanted = -(-round(offered * keep * 1e9) // 10**9)  # ceil without float dust
    kept = min(offered, max(align, -(-wanted // align) * align))
    sinks = min(sinks, kept)
    return Budget(offered, kept, sinks, min(recent, kept - sinks))


def code_from(budget: Budget, block: int) -> Budget:
    """Mark kept tokens as encoded, in whole blocks; protected tokens stay exact.

    Args:
        budget: A budget without encoded tokens.
        block: Tokens that a codec encodes together, a multiple of the page size.
    """
    free = budget.kept - budget.sinks - budget.recent
    return replace(budget, coded=free // block * block)


def coded_rows(kept: torch.Tensor, budget: Budget) -> tuple[torch.Tensor, torch.Tensor]:
    """Separate kept tokens into exact and encoded ones.

    Args:
        kept: [..., n] ascending per row.
        budget: Budget with n kept tokens.

    Returns:
        [..., exact] and [..., coded], ascending: the encoded tokens follow the sinks,
        unless these are encoded too.
    """
    if not budget.coded:
        return kept, kept[..., :0]
    begin = min(budget.sinks, budget.exact)
    end = begin + budget.coded
    exact = torch.cat([kept[..., :begin], kept[..., end:]], dim=-1)
    return exact, kept[..., begin:end]


def keep_indices(scores: torch.Tensor, budget: Budget) -> torch.Tensor:
    """Select the kept tokens of each row from its scores.

    Ties and NaN go to the earlier token (NaN ranks below every number), so the result
    is deterministic on every machine. Raising ``budget.kept`` with the same protected
    tokens gives supersets.

    Args:
        scores: [R, T], a row per head, or per layer and head; any float dtype; NaN and
            infinities allowed.
        budget: Token counts of a row; ``budget.offered`` is T.

    Returns:
        [R, n] int64 on the device of ``scores``, rows ascending and unique, in [0, T).

    Raises:
        CompressionError: ``scores`` is not [R, T].
    """
    if scores.dim() != 2 or scores.shape[1] != budget.offered:
        raise CompressionError(
            f"scores must be [heads, {budget.offered}], got {tuple(scores.shape)}"
        )
    lowest = -torch.inf
    rank = scores.to(torch.float32).nan_to_num(lowest, torch.inf, lowest).add_(0.0)
    bits = rank.view(torch.int32)  # 0.0 was added: zeros have one sign
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # in the order of the numbers
    # No two keys of a row are equal, so any way to find the largest ones finds these.
    token = torch.arange(budget.offered, device=scores.device)
    key = bits.to(torch.int64).mul_(budget.offered).sub_(token)
    key[:, : budget.sinks] = MOST
    key[:, budget.offered - budget.recent :] = MOST
    return key.topk(budget.kept, dim=1, sorted=False).indices.sort(dim=1).values


def residual_indices(kept: torch.Tensor, offered: int) -> torch.Tensor:
    """Return the dropped tokens of each row, without a host sync.

    Args:
        kept: [R, n] int32 or int64, ascending and unique per row, in [0, offered).
        offered: T, in tokens.

    Returns:
        [R, T - n] of the dtype of ``kept``, rows ascending; with ``kept`` every token
        once per row.
    """
    rows, count = kept.shape
    # The j-th dropped token has as many kept ones before it as have at most j dropped
    # ones before them.
    before = kept - torch.arange(count, dtype=kept.dtype, device=kept.device)
    nth = torch.arange(offered - count, dtype=kept.dtype, device=kept.device)
    nth = nth.repeat(rows, 1)
    narrow = kept.dtype == torch.int32
    less: torch.Tensor = torch.searchsorted(before, nth, right=True, out_int32=narrow)
    return nth + less
