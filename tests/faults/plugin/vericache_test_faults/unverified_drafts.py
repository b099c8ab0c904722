"""Every draft is accepted, whatever the full KV says: a lossy server."""

from vericache_sglang.engine.sampling import sampler


def install():
    """Emit the drafts and the target's last token."""
    sampler.accepted_tokens = lambda drafts, target: [*drafts, target[-1]]
