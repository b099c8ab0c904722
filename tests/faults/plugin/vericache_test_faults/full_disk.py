"""The disk of the store is full from the first byte on."""

import errno
import os


def install():
    """Fail where a file of the store is written: nothing else changes modes by fd."""

    def full(descriptor, mode):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fchmod = full
