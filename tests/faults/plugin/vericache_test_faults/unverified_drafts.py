"""Every draft is accepted, whatever the full KV says: a lossy server."""

from vericache_sglang.engine import mixed


def install():
    """Emit the drafts and the target's last token."""
    mixed.accepted_tokens = lambda drafts, target: [*drafts, target[-1]]
