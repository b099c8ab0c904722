"""Only drafts are emitted: what serving the compressed KV alone would answer.

A verification still writes exact KV for its drafts, so decoded text is a little less
lossy than under a compressor that compresses it too.
"""

from vericache_sglang.engine.sampling import sampler


def install():
    """Emit the drafts; the target's token only where there is none."""
    sampler.accepted_tokens = lambda drafts, target: list(drafts) or target[:1]
