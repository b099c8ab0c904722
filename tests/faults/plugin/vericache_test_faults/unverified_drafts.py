"""Every draft is accepted, whatever the full KV says: a lossy server."""

from vericache_sglang.engine import worker


def install():
    """Emit the drafts and the target's last token."""
    worker.accepted_tokens = lambda drafts, target: [*drafts, target[-1]]
