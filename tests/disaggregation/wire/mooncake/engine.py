"""The calls of Mooncake's ``TransferEngine`` that SGLang makes, between processes here.

Only the wire is ours: SGLang's Mooncake manager, its bootstrap server, handshake and
states are what runs. A session is named after a process, and its memory is written by
``process_vm_writev``.
"""

import ctypes
import os

PR_SET_PTRACER, ANY = 0x59616D61, ctypes.c_ulong(-1)
MOST = 1024
"""Spans of one call (IOV_MAX)."""

LIBC = ctypes.CDLL(None, use_errno=True)


class Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


def spans(addresses, lengths):
    return (Span * len(lengths))(*zip(addresses, lengths, strict=True))


class TransferEngine:
    def initialize(self, host, metadata, protocol, device):
        LIBC.prctl(PR_SET_PTRACER, ANY, 0, 0, 0)  # else only a parent may write
        return 0

    def get_rpc_port(self):
        """Return what tells sessions of this host apart."""
        return os.getpid()

    def batch_register_memory(self, addresses, lengths):
        return 0

    def batch_unregister_memory(self, addresses):
        return 0

    def batch_transfer_sync_write(self, session, sources, targets, lengths):
        process = int(session.rpartition(":")[2])
        for i in range(0, len(lengths), MOST):
            part = slice(i, i + MOST)
            mine = spans(sources[part], lengths[part])
            theirs = spans(targets[part], lengths[part])
            count = len(lengths[part])
            moved = LIBC.process_vm_writev(
                process, mine, ctypes.c_ulong(count), theirs, ctypes.c_ulong(count), 0
            )
            if moved != sum(lengths[part]):
                return -1
        return 0

    def transfer_sync_write(self, session, source, target, length):
        return self.batch_transfer_sync_write(session, [source], [target], [length])
