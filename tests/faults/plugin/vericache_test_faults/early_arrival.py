"""A reload is reported complete before it has begun."""

from vericache_sglang.kv.thread_transfers import ThreadTransfers


class Arrived:
    """A transfer that says it is done and never copies."""

    seconds = 1e-6
    nbytes = 1

    def done(self):
        """Lie."""
        return True

    def cancel(self):
        """Nothing runs."""


def install():
    """Start no copy at all, so that timing cannot hide the fault."""
    ThreadTransfers.start = lambda self, *asked: Arrived()
