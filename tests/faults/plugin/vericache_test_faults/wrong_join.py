"""Draft part and residual are put together wrongly: an eighth of the keys doubled."""

from vericache_sglang.compression.codecs.split_planes import SplitPlanes


def install():
    """Alter what a join returns; parts and checksums are right."""
    right = SplitPlanes._join

    def wrong(self, draft, residual):
        keys, values = right(self, draft, residual)
        keys = keys.clone()
        keys[:, ::8] *= 2
        return keys, values

    SplitPlanes._join = wrong
