"""A HiCache storage backend of SGLang, with time-outs and without exceptions."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from vericache_sglang.errors import ConfigError
from vericache_sglang.prefix_cache.store.calls import BoundedCalls
from vericache_sglang.prefix_cache.store.counters import StoreCounters
from vericache_sglang.prefix_cache.store.emulated_link import EmulatedLink
from vericache_sglang.prefix_cache.store.files import SegmentFiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vericache_sglang.prefix_cache.store.keys import Fingerprint

BACKENDS = ("file", "mooncake", "dynamic")
"""Backends whose ``get``, ``set`` and ``exists`` accept keys that are not pages."""
SLOWEST_BYTES_PER_S = 16e6
"""A call may take its time-out plus the time of its bytes at this rate."""
RETRY_S = 0.02
"""Delay before the second read: Mooncake's first fails if a replica's node died."""


class Tensors:
    """Calls of a backend that takes tensors, such as ``file``."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage

    def get(self, key: str, nbytes: int) -> torch.Tensor | None:
        """Read an object into new memory, [nbytes] uint8; None if it does not exist."""
        target = torch.zeros(nbytes, dtype=torch.uint8)
        return target if self.storage.get(key, target) is not None else None

    def set(self, key: str, data: torch.Tensor) -> bool:
        """Write [n] uint8 under a key; False if the backend refused."""
        return bool(self.storage.set(key, data))


class Addresses:
    """Calls of a backend that takes addresses in registered memory, such as Mooncake.

    A registered buffer serves one call at a time and is never freed; a call that hangs
    keeps its buffer. Thread-safe.

    Args:
        storage: The backend; has ``register_buffer``.
    """

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self._free: list[torch.Tensor] = []
        self._lock = Lock()

    def get(self, key: str, nbytes: int) -> torch.Tensor | None:
        """See ``Tensors.get``."""
        with self._buffer(nbytes) as buffer:
            found = self.storage.get(key, buffer.data_ptr(), nbytes)
            if not found and self.storage.exists(key):
                time.sleep(RETRY_S)
                found = self.storage.get(key, buffer.data_ptr(), nbytes)
            return buffer[:nbytes].clone() if found else None

    def set(self, key: str, data: torch.Tensor) -> bool:
        """See ``Tensors.set``."""
        size = data.numel()
        with self._buffer(size) as buffer:
            buffer[:size].copy_(data)
            where = {"target_location": buffer.data_ptr(), "target_sizes": size}
            return bool(self.storage.set(key, **where))

    @contextmanager
    def _buffer(self, nbytes: int) -> Iterator[torch.Tensor]:
        with self._lock:
            fitting = (b for b in self._free if b.numel() >= nbytes)
            buffer = next(fitting, None)
            self._free = [other for other in self._free if other is not buffer]
        if buffer is None:
            size = 1 << max(20, (nbytes - 1).bit_length())
            buffer = torch.zeros(size, dtype=torch.uint8)
            self.storage.register_buffer(buffer)
        try:
            yield buffer
        finally:
            with self._lock:
                self._free.append(buffer)


class Backend:
    """A HiCache storage backend whose calls never raise and end in bounded time.

    Thread-safe if the backend is; SGLang's are. Reads and writes are suspended
    separately: a full disk can still be read.

    Args:
        storage: The backend; only ``get``, ``set`` and ``exists`` are used, and
            ``register_buffer`` if it has that.
        timeout_s: Most seconds of a call, plus those of ``SLOWEST_BYTES_PER_S``.
        pause_s: See ``BoundedCalls``.
        link: Emulated link to it; None: it is as fast as it is.

    Attributes:
        counters: Counters of this backend and of the store above it.
    """

    def __init__(
        self,
        storage: Any,
        timeout_s: float = 2.0,
        pause_s: float = 5.0,
        link: EmulatedLink | None = None,
    ) -> None:
        by_address = hasattr(storage, "register_buffer")
        self._calls = Addresses(storage) if by_address else Tensors(storage)
        self._timeout_s = timeout_s
        self._link = link
        self.counters = StoreCounters()
        self._reads = BoundedCalls(self.counters, pause_s)
        self._writes = BoundedCalls(self.counters, pause_s)

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Return which keys exist, in one bounded call; all False if it failed."""
        storage = self._calls.storage

        def look() -> list[bool]:
            return [bool(storage.exists(key)) for key in keys]

        if not keys:
            return []
        return self._reads.call("exists", look, self._timeout_s) or [False] * len(keys)

    def read(self, keys: Sequence[str], nbytes: int) -> list[torch.Tensor | None]:
        """Read objects of one size, in one bounded call.

        Args:
            keys: Their keys.
            nbytes: Bytes of each; a shorter one comes back with zeros at its end.

        Returns:
            [nbytes] uint8 each; None if the object is missing or the call failed.
        """
        calls = self._calls

        def fetch() -> list[torch.Tensor | None]:
            exist = calls.storage.exists
            return [calls.get(key, nbytes) if exist(key) else None for key in keys]

        if not keys:
            return []
        limit = self._timeout_s + len(keys) * nbytes / SLOWEST_BYTES_PER_S
        found = self._reads.call("get", fetch, limit) or [None] * len(keys)
        if self._link is not None:
            self._link.carry(nbytes * sum(each is not None for each in found))
        return found

    def write(self, key: str, data: torch.Tensor) -> bool:
        """Write an object, unless its key exists.

        Args:
            data: [n] uint8 in host memory, not modified; must not change until it is
                written, which may be after the time-out.

        Returns:
            Whether the key exists now.
        """

        def put() -> bool:
            if not self._calls.set(key, data):
                raise OSError(f"the backend refused {data.numel()} bytes")
            return True

        limit = self._timeout_s + data.numel() / SLOWEST_BYTES_PER_S
        return self._writes.call("set", put, limit) or False


def open_backend(
    name: str,
    fingerprint: Fingerprint,
    extra: Mapping[str, object],
    shared_folder: bool = False,
    timeout_s: float = 2.0,
) -> Backend:
    """Open a storage backend, through SGLang's factory except for ``file``.

    Args:
        name: One of ``BACKENDS``. ``dynamic`` loads a class of the user, see
            ``StorageBackendFactory``; one with ``register_buffer`` is called as
            Mooncake's is, others as ``file`` is.
        fingerprint: Identity of the KV; backends that separate ranks get its rank.
        extra: Value of HiCache's ``--hicache-storage-backend-extra-config``: Mooncake's
            addresses; ``directory``, ``max_size`` and ``min_free_space`` of ``file``;
            ``read_mb_per_s`` and ``latency_ms`` of an emulated link to it.
        shared_folder: See ``SegmentFiles.shared``.
        timeout_s: See ``Backend``.

    Raises:
        ConfigError: The name is unknown, a folder is missing from the settings or not
            private, or the backend did not open.
    """
    if name not in BACKENDS:
        raise ConfigError(f"store backend {name!r}: wanted one of {BACKENDS}")
    rank, ranks = fingerprint.tp_rank, fingerprint.tp_size
    link, extra = EmulatedLink.taken_from(extra)
    try:
        if name == "file":
            folder = extra.get("directory")
            if not isinstance(folder, str) or not folder:
                raise ConfigError(f"wanted a directory, got {folder!r}")
            storage = SegmentFiles(Path(folder), extra, rank, ranks, shared_folder)
            return Backend(storage, timeout_s, link=link)
        config = HiCacheStorageConfig(
            tp_rank=rank,
            tp_size=ranks,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=False,
            model_name=f"vericache-{fingerprint.short}",
            extra_config=dict(extra),
        )
        storage = StorageBackendFactory.create_backend(name, config, None)
        return Backend(storage, timeout_s, link=link)
    except Exception as error:
        raise ConfigError(
            f"--hicache-storage-backend {name} did not open: {error}"
        ) from error
