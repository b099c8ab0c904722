"""Stores to test with: in files, in memory, called as Mooncake is."""

import ctypes
import threading

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from stored_segments import FINGERPRINT

from vericache_sglang.store.backend import Backend, open_backend
from vericache_sglang.store.segment_store import SegmentStore

PATIENCE_S = 60.0
"""Time-out where none is wanted: threads wait long for a busy small machine."""


def file_store(folder, fingerprint=FINGERPRINT):
    backend = open_backend("file", fingerprint, folder, timeout_s=PATIENCE_S)
    return SegmentStore(backend, fingerprint)


class MemoryStorage(HiCacheStorage):
    """Objects in a dict, write-once as Mooncake's; may hang, raise or refuse."""

    def __init__(self, config=None, _=None):
        self.config = config
        self.objects = {}
        self.calls = 0
        self.fault = None
        self.go_on = threading.Event()

    def get(self, key, target_location=None, target_sizes=None):
        self._enter("get")
        data = self.objects.get(key)
        if data is None:
            return None
        size = min(len(data), target_location.numel())
        found = torch.frombuffer(data, dtype=torch.uint8, count=size)
        target_location[:size].copy_(found)
        return target_location

    def set(self, key, value=None, target_location=None, target_sizes=None):
        if self._enter("set") == "refuse":
            return False
        self.objects.setdefault(key, bytearray(value.numpy().tobytes()))
        return True

    def exists(self, key):
        self._enter("exists")
        return key in self.objects

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        raise AssertionError("only get, set and exists work for any key")

    batch_set = batch_get

    def _enter(self, call):
        self.calls += 1
        if self.fault == "hang":
            self.go_on.wait(30)
        if self.fault in ("raise", call):
            raise ConnectionError("the store is gone")
        return self.fault


class AddressStorage(MemoryStorage):
    """The calls of Mooncake: addresses, sizes, registered memory, True or False."""

    def __init__(self, config=None, _=None):
        super().__init__(config)
        self.registered = []
        self.failing_gets = 0

    def register_buffer(self, tensor):
        self.registered.append((tensor.data_ptr(), tensor.numel()))

    def get(self, key, target_location=None, target_sizes=None):
        self._enter("get")
        self._check(target_location, target_sizes)
        if self.failing_gets:
            self.failing_gets -= 1
            return False
        if key not in self.objects:
            return False
        data = bytes(self.objects[key])[:target_sizes]
        ctypes.memmove(target_location, data, len(data))
        return True

    def set(self, key, value=None, target_location=None, target_sizes=None):
        self._enter("set")
        self._check(target_location, target_sizes)
        data = ctypes.string_at(target_location, target_sizes)
        self.objects.setdefault(key, bytearray(data))
        return True

    def _check(self, address, nbytes):
        assert any(
            start <= address and address + nbytes <= start + size
            for start, size in self.registered
        ), "memory that was not registered"


def memory_store(storage=None, **settings):
    """Return a store over memory, its storage and its backend."""
    storage = storage or MemoryStorage()
    backend = Backend(storage, **{"timeout_s": PATIENCE_S, **settings})
    return SegmentStore(backend, FINGERPRINT), storage, backend
