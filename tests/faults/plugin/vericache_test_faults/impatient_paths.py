"""Every request that drafts for a verifier is taken to be better off there."""

from vericache_sglang.scheduling.path_paces import PathPaces


def install():
    """Have them return with their first verdict; all begin at their verifier."""
    PathPaces.reads_whole = lambda *_: False
    PathPaces.completes = lambda *_: False
    PathPaces.returns = lambda *_: True
