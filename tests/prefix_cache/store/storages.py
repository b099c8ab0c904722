"""Stores to test with: in files, in memory, called as Mooncake is."""

import ctypes
import threading
from collections import deque
from concurrent.futures import Executor, Future

import torch
from sample_segments import FINGERPRINT
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from vericache_sglang.prefix_cache.store.backend import Backend, open_backend
from vericache_sglang.prefix_cache.store.keys import Seal
from vericache_sglang.prefix_cache.store.manifest import Manifest, Stored
from vericache_sglang.prefix_cache.store.objects import encode, memory_of
from vericache_sglang.prefix_cache.store.segment_store import SegmentStore

PATIENCE_S = 60.0
"""Time-out where none is wanted: threads wait long for a busy small machine."""


def file_store(folder, fingerprint=FINGERPRINT):
    extra = {"directory": str(folder)}
    backend = open_backend("file", fingerprint, extra, timeout_s=PATIENCE_S)
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


def memory_store(storage=None, fingerprint=FINGERPRINT, **settings):
    """Return a store over memory, its storage and its backend."""
    storage = storage or MemoryStorage()
    backend = Backend(storage, **{"timeout_s": PATIENCE_S, **settings})
    return SegmentStore(backend, fingerprint), storage, backend


class HeldExecutor(Executor):
    """Runs jobs when it is told to."""

    def __init__(self):
        self.jobs, self.closed = deque(), False

    def submit(self, job, *arguments):
        if self.closed:
            raise RuntimeError("closed, as other executors are")
        future = Future()
        self.jobs.append((future, job, arguments))
        return future

    def run(self):
        """Run the oldest job."""
        future, job, arguments = self.jobs.popleft()
        if future.set_running_or_notify_cancel():
            future.set_result(job(*arguments))

    def shutdown(self, wait=True, *, cancel_futures=False):
        self.closed = True
        while cancel_futures and self.jobs:
            self.jobs.popleft()[0].cancel()


class HeldStore(SegmentStore):
    """A store over memory whose background reads and writes end when a test says so.

    Attributes:
        storage: Where it is kept; another store may share it.
    """

    def __init__(self, fingerprint, storage=None):
        self.storage = storage or MemoryStorage()
        super().__init__(Backend(self.storage, PATIENCE_S), fingerprint)
        self._writer, self._reader = HeldExecutor(), HeldExecutor()

    @property
    def reads(self):
        """Prefetches that did not end."""
        return len(self._reader.jobs)

    @property
    def names(self):
        """Segments the storage has, sorted."""
        keys = [key.split(".") for key in self.storage.objects]
        return sorted({key[1] for key in keys if key[2:3] == ["manifest"]})

    def announce(self):
        """End every write."""
        while self._writer.jobs:
            self._writer.run()

    def arrive(self):
        """End the oldest read."""
        self._reader.run()

    def lose(self, name):
        """Have the storage evict a segment."""
        gone = [key for key in self.storage.objects if f".{name}.manifest" in key]
        for key in gone:
            del self.storage.objects[key]

    def close(self, timeout_s=10.0):
        self.announce()
        return super().close(timeout_s)


def forge(storage, fingerprint, name, objects, said=()):
    """Store anything with valid seals, as a hostile writer without a key can.

    Args:
        storage: A ``MemoryStorage``.
        fingerprint: Whose KV it claims to be.
        name: Which segment.
        objects: Tensors, or raw bytes, by part.
        said: What the manifest says otherwise.
    """
    seal, stored = Seal(fingerprint.key), {}
    for part, content in objects.items():
        if isinstance(content, bytes):
            data = torch.frombuffer(bytearray(content or b"0"), dtype=torch.uint8)
        else:
            data = encode(content)
        stored[part] = Stored(data.numel(), seal.of(memory_of(data)).hex())
        storage.set(f"{fingerprint.short}.{stored[part].digest}", data)
    manifest = Manifest(
        **{
            "model": fingerprint.short,
            "name": name,
            "compressor": "",
            "tokens": 8,
            "kept": 0,
            "objects": stored,
            **dict(said),
        }
    )
    key = f"{fingerprint.short}.{name}.manifest.0"
    storage.objects[key] = bytearray(manifest.encode(seal).numpy().tobytes())
