"""A softmax taken in splits: what both attention kernels write, and how it is merged.

S programs share a query head's row; each leaves the average of the values it saw and
the logarithm of their mass, and a second kernel weighs them (flash decoding,
arXiv:2311.01282).
"""

from __future__ import annotations

from vericache_kernels.split_softmax.ref import merge_splits_ref

__all__ = ["merge_splits_ref"]
