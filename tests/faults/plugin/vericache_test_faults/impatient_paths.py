"""Every request that drafts for a verifier is taken to be better off there."""

from vericache_sglang.scheduling.path_paces import PathPaces
from vericache_sglang.scheduling.paths import Path


def install():
    """Have them return with their first verdict; all begin at their verifier."""
    PathPaces.choose = lambda *_: Path.P1_CACHED
    PathPaces.completes = lambda *_: False
    PathPaces.returns = lambda *_: True
