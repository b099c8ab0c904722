"""A released request's complement stays in host memory."""

from vericache_sglang.kv.host_store import HostStore


def install():
    """Forget to drop."""
    HostStore.drop = lambda self, rid: 0
