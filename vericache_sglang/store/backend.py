"""The key-value store below: a HiCache storage backend of SGLang, bounded and quiet."""

from __future__ import annotations

import os
import time
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from vericache_sglang.errors import ConfigError
from vericache_sglang.store.calls import BoundedCalls, Breaker
from vericache_sglang.store.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    from vericache_sglang.store.keys import Fingerprint

BACKENDS = ("file", "mooncake", "dynamic")
"""Those whose ``get``, ``set`` and ``exists`` work for keys that are not pages."""
SLOWEST_BYTES_PER_S = 16e6
"""A call may take its time-out and what its bytes take at this rate."""
RETRY_S = 0.02
"""Mooncake answers -800 for an object whose first replica's node died; then another."""
ABANDONED_S = 3600
"""Age of a temporary file whose writer must have died."""


class SegmentFiles(HiCacheFile):
    """SGLang's file backend in a folder of our own.

    ``set`` is SGLang's: write-once, a temporary file and a rename in the same folder,
    under the limits ``max_size`` and ``min_free_space``. Safe for several processes.

    Args:
        storage_config: ``extra_config["directory"]`` is the folder; it is made.
        _: What the factory hands to every dynamic backend.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, _: object = None) -> None:
        folder = Path(storage_config.extra_config["directory"])
        folder.mkdir(parents=True, exist_ok=True)
        # HiCache's own folder, if any, must not become ours: its `clear` empties it.
        with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(folder)):
            super().__init__(storage_config, str(folder))
        remove_abandoned(folder)

    def get(
        self,
        key: str,
        target_location: torch.Tensor,
        target_sizes: object = None,
    ) -> torch.Tensor | None:
        """See ``HiCacheStorage.get``; a file that is too short leaves the rest as is.

        The reader of the bytes sees that they are not whole; it is no failing disk.
        """
        try:
            found = super().get(key, target_location, target_sizes)
        except OSError as error:
            if error.errno is not None:
                raise
            found = target_location
        return target_location if found is not None else None


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files whose writers died, if they are old enough."""
    for file in folder.glob(".*.tmp"):
        try:
            if time.time() - file.stat().st_mtime > ABANDONED_S:
                file.unlink()
        except OSError:
            continue  # another process was faster, or its writer still lives


class Tensors:
    """Calls of a backend that takes tensors, as ``file`` does.

    Args:
        storage: The backend.
    """

    def __init__(self, storage: HiCacheStorage) -> None:
        self.storage = storage

    def get(self, key: str, nbytes: int) -> torch.Tensor | None:
        """Read an object into new memory, [nbytes] uint8; None where there is none."""
        target = torch.zeros(nbytes, dtype=torch.uint8)
        return target if self.storage.get(key, target) is not None else None

    def set(self, key: str, data: torch.Tensor) -> bool:
        """Write [n] uint8 under a key; False where the backend refused."""
        return bool(self.storage.set(key, data))


class Addresses:
    """Calls of a backend that takes addresses in memory it registered, as Mooncake.

    Registered buffers are lent to one call at a time and never freed; a call that hangs
    keeps its own. Thread-safe.

    Args:
        storage: The backend; has ``register_buffer``.
    """

    def __init__(self, storage: HiCacheStorage) -> None:
        self.storage = storage
        self._free: list[torch.Tensor] = []
        self._lock = Lock()

    def get(self, key: str, nbytes: int) -> torch.Tensor | None:
        """See ``Tensors.get``."""
        buffer = self._borrow(nbytes)
        found = self.storage.get(key, buffer.data_ptr(), nbytes)
        if not found and self.storage.exists(key):
            time.sleep(RETRY_S)
            found = self.storage.get(key, buffer.data_ptr(), nbytes)
        data = buffer[:nbytes].clone() if found else None
        self._return(buffer)
        return data

    def set(self, key: str, data: torch.Tensor) -> bool:
        """See ``Tensors.set``."""
        buffer = self._borrow(data.numel())
        buffer[: data.numel()].copy_(data)
        taken = bool(
            self.storage.set(
                key, target_location=buffer.data_ptr(), target_sizes=data.numel()
            )
        )
        self._return(buffer)
        return taken

    def _borrow(self, nbytes: int) -> torch.Tensor:
        with self._lock:
            for index, buffer in enumerate(self._free):
                if buffer.numel() >= nbytes:
                    return self._free.pop(index)
        buffer = torch.zeros(1 << max(20, (nbytes - 1).bit_length()), dtype=torch.uint8)
        register: Any = self.storage.register_buffer
        register(buffer)
        return buffer

    def _return(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self._free.append(buffer)


class Backend:
    """A HiCache storage backend that never raises and never holds anyone up for long.

    Thread-safe where the backend is; SGLang's are. Reads and writes are given up on
    apart: a full disk can still be read.

    Args:
        storage: The backend; only ``get``, ``set`` and ``exists`` are used.
        timeout_s: Most seconds of a call, but see ``SLOWEST_BYTES_PER_S``.
        breaker_pause_s: See ``Breaker.pause_s``.

    Attributes:
        tally: Counters of this backend and of the store above it.
    """

    def __init__(
        self,
        storage: HiCacheStorage,
        timeout_s: float = 2.0,
        breaker_pause_s: float = 5.0,
    ) -> None:
        by_address = hasattr(storage, "register_buffer")
        self._calls = Addresses(storage) if by_address else Tensors(storage)
        self._timeout_s = timeout_s
        self.tally = Tally()
        self._reads = BoundedCalls(self.tally, Breaker(pause_s=breaker_pause_s))
        self._writes = BoundedCalls(self.tally, Breaker(pause_s=breaker_pause_s))

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Say which keys exist, in one bounded call; all False where it failed."""
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
            [nbytes] uint8 each, None where there is none or the call failed.
        """
        calls = self._calls

        def fetch() -> list[torch.Tensor | None]:
            exist = calls.storage.exists
            return [calls.get(key, nbytes) if exist(key) else None for key in keys]

        limit = self._timeout_s + len(keys) * nbytes / SLOWEST_BYTES_PER_S
        return self._reads.call("get", fetch, limit) or [None] * len(keys)

    def write(self, key: str, data: torch.Tensor) -> bool:
        """Write an object, unless its key exists.

        Args:
            key: Its key.
            data: [n] uint8 in host memory; not modified, and unchanged until it is
                written, which a call past its time may do later.

        Returns:
            It is there now, or was there before.
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
    directory: str | os.PathLike[str] = "",
    extra: Mapping[str, object] | None = None,
    timeout_s: float = 2.0,
) -> Backend:
    """Open a HiCache storage backend through SGLang's factory.

    Args:
        name: One of ``BACKENDS``. ``dynamic`` loads a class of the user's, see
            ``StorageBackendFactory``; one with ``register_buffer`` is called as
            Mooncake's is, others as ``file`` is.
        fingerprint: Whose KV; backends that keep ranks apart are told its rank.
        directory: Folder of ``file``, made where it is missing.
        extra: What HiCache's ``--hicache-storage-backend-extra-config`` would hold:
            Mooncake's addresses; ``max_size`` and ``min_free_space`` of ``file``.
        timeout_s: See ``Backend``.

    Raises:
        ConfigError: The name is unknown, a folder is missing from the settings, or the
            backend did not open.
    """
    if name not in BACKENDS:
        raise ConfigError(f"store backend {name!r}: wanted one of {BACKENDS}")
    settings = dict(extra or {})
    if name == "file":
        if not directory:
            raise ConfigError("store backend 'file': wanted a directory, got none")
        settings |= {
            "directory": os.fspath(directory),
            "backend_name": "vericache-file",
            "module_path": __name__,
            "class_name": SegmentFiles.__name__,
        }
    config = HiCacheStorageConfig(
        tp_rank=fingerprint.tp_rank,
        tp_size=fingerprint.tp_size,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=f"vericache-{fingerprint.short}",
        extra_config=settings,
    )
    factory_name = "dynamic" if name == "file" else name
    try:
        storage = StorageBackendFactory.create_backend(factory_name, config, None)
    except Exception as error:
        raise ConfigError(f"store backend {name!r} did not open: {error}") from error
    return Backend(storage, timeout_s)
