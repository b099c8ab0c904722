"""Every third reload of a complement fails; asked again, it works."""

from collections import Counter

from vericache_sglang.errors import TransferError
from vericache_sglang.kv.thread_transfers import ThreadTransfers


class Broken:
    """A transfer that fails when it is looked at."""

    seconds = 1e-6
    nbytes = 1

    def done(self):
        """Fail."""
        raise TransferError("injected: the link dropped layer 0")

    def cancel(self):
        """Nothing runs."""


def install():
    """Count per complement, so that a retry never fails."""
    right = ThreadTransfers.start
    calls = Counter()

    def start(self, residual, lease, drafts):
        calls[id(residual)] += 1
        if calls[id(residual)] % 3 == 2:
            return Broken()
        return right(self, residual, lease, drafts)

    ThreadTransfers.start = start
