"""SGLang 0.5.21's memory defaults, by GPU memory.

Copied from ``arg_groups/memory_hook.py`` (``handle_gpu_memory_settings``,
``reserve_for_graph_mb``), ``cuda_graph_hook.py`` and ``allocation_sizing.py``; the
tests compare every function with the original. Dense models, no DP attention.
"""

from __future__ import annotations

from typing import NamedTuple


class MemoryTier(NamedTuple):
    """SGLang's defaults for GPUs of less than ``below_mib`` MiB.

    Attributes:
        below_mib: Bound on the GPU's memory, exclusive.
        chunk: ``--chunked-prefill-size``, in tokens.
        graph_rows: ``--cuda-graph-max-bs-decode`` with fewer than 4 ranks.
        graph_rows_tp4: The same with 4 or more ranks.
    """

    below_mib: float
    chunk: int
    graph_rows: int
    graph_rows_tp4: int


TIERS = (
    MemoryTier(20 * 1024, 2048, 8, 8),
    MemoryTier(35 * 1024, 4096, 48, 160),
    MemoryTier(60 * 1024, 4096, 32, 160),
    MemoryTier(160 * 1024, 8192, 256, 512),
    MemoryTier(float("inf"), 16384, 512, 512),
)

RESERVE_FLOOR_MIB = 10 * 1024
"""Least reserve of a GPU of more than 60 GiB."""


def tier_of(gpu_mib: float) -> MemoryTier:
    """Return the tier of a GPU with ``gpu_mib`` MiB, as nvidia-smi reports them."""
    return next(tier for tier in TIERS if gpu_mib < tier.below_mib)


def prefill_graph_sizes(most: int) -> int:
    """Return the number of prefill graphs captured up to ``most`` tokens."""
    steps = (
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, most + 1, 512),
    )
    return sum(size <= most for size in steps)


def fraction_static(
    gpu_mib: float, ranks: int, chunk: int, graph_rows: int, prefill_graphs: int
) -> float:
    """Return ``--mem-fraction-static``: the share for weights and KV pool.

    Args:
        gpu_mib: Memory of the GPU, in MiB.
        ranks: Tensor-parallel ranks.
        chunk: Tokens of a prefill chunk.
        graph_rows: Rows of the largest decode graph; 0 without graphs.
        prefill_graphs: Captured sizes of prefill graphs; 0 without graphs.
    """
    reserve = 512 + max(chunk, 2048) * 1.5 + ranks / 8 * 1024
    reserve += graph_rows * 2 + prefill_graphs * 8
    if gpu_mib > 60 * 1024:
        reserve = max(reserve, RESERVE_FLOOR_MIB)
    return round((gpu_mib - reserve) / gpu_mib, 3)


def block_table_width(context: int, page: int, draft_length: int) -> int:
    """Return the width of a block-table row, in KV slots.

    Args:
        context: Longest context, in tokens.
        page: Page size, in KV slots.
        draft_length: x; SGLang is told to reserve x + 1 tokens a cycle.
    """
    extra = 4 + draft_length + 1
    if page > 1:
        extra = max(extra, 2 * (draft_length + 1) + page - 1)
    return context + extra
