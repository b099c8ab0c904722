"""Split softmax: partial results of both attention kernels, and their merge.

S programs share the row of a query head. Each stores the weighted average of its values
and the logarithm of its softmax mass, and a second kernel merges them (flash decoding,
arXiv:2311.01282).
"""

from __future__ import annotations

from vericache_kernels.split_softmax.ref import merge_splits_ref

__all__ = ["merge_splits_ref"]
