"""The backend ``file``: objects as files in a folder private to this user."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
import uuid
from typing import TYPE_CHECKING

from sglang.srt.environ import envs
from sglang.srt.mem_cache.storage.file.lru_file_evictor import LRUFileEvictor

from vericache_sglang.errors import ConfigError
from vericache_sglang.prefix_cache.store.objects import memory_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Does not follow symbolic links, and does not block on a FIFO."""
NOT_OURS = (errno.ELOOP, errno.ENXIO)
"""Errors of opening a symbolic link or a socket with ``OPEN_FLAGS``."""
DISK_SHARE = 10
"""By default, all ranks together use at most 1 / ``DISK_SHARE`` of the disk."""
ABANDONED_S = 3600
"""Age in seconds of a temporary file whose writer is assumed dead."""


class SegmentFiles:
    """A backend with the methods of SGLang's ``HiCacheFile``, in a private folder.

    Write-once: a temporary file, then a rename. SGLang's evictor removes the least
    recently used files to keep the limits ``max_size``, here 10 % of the disk by
    default, and ``min_free_space``. Safe for several processes, each of which applies
    the limits to the files that it wrote, read or found when it started.

    Args:
        folder: Created with mode 0700 if missing.
        limits: HiCache's extra configuration.
        rank: Rank that owns these files; ranks never access each other's.
        ranks: Number of ranks that share the folder.
        shared: Allow a folder that others can write to. Files then have its mode.

    Raises:
        ConfigError: Others can write to the folder, or a limit is not a size.
        OSError: The folder cannot be created or read.
    """

    def __init__(
        self,
        folder: Path,
        limits: Mapping[str, object],
        rank: int = 0,
        ranks: int = 1,
        shared: bool = False,
    ) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        self._mode = 0o600 if not shared else folder.stat().st_mode & 0o666
        if not shared:
            require_private(folder)
        self._folder = folder
        self._suffix = f".vericache{rank}"
        remove_abandoned(folder)
        size = limits.get("max_size")
        if size is None and envs.SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE.get() is None:
            size = shutil.disk_usage(folder).total // (DISK_SHARE * ranks)
        self._evictor = LRUFileEvictor(
            str(folder),
            self._suffix,
            tp_rank=rank,
            is_mla_model=False,
            extra_config={**limits, "max_size": size},
        )
        if size not in (None, 0, "0") and not self._evictor.max_size_bytes:
            raise ConfigError(f"max_size: wanted a size as 200G, got {size!r}")

    def get(self, key: str, target: torch.Tensor) -> torch.Tensor | None:
        """Read a file into [n] uint8; a shorter one leaves the rest as it is.

        Returns:
            ``target``; None without a regular file.
        """
        path = self._path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | OPEN_FLAGS)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in NOT_OURS:
                return None
            raise
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            file.readinto(memory_of(target))
        self._evictor.touch(path.stem, str(path))
        return target

    def set(self, key: str, value: torch.Tensor) -> bool:
        """Write [n] uint8 under a key, unless it exists; see ``HiCacheStorage.set``.

        Returns:
            False if the limits leave no space.

        Raises:
            OSError: The write failed, e.g. on a full disk; no file remains.
        """
        path = self._path(key)
        if self.exists(key):
            self._evictor.touch(path.stem, str(path))
            return True
        if not self._evictor.reserve(path.stem, value.numel(), key=key):
            return False
        temporary = self._folder / f".{uuid.uuid4().hex}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FLAGS
        try:
            with open(os.open(temporary, flags, self._mode), "wb") as file:
                os.fchmod(file.fileno(), self._mode)  # whatever the umask
                file.write(memory_of(value))
            os.replace(temporary, path)
        except BaseException:
            self._evictor.abort(path.stem)
            temporary.unlink(missing_ok=True)
            raise
        self._evictor.commit(path.stem)
        return True

    def exists(self, key: str) -> bool:
        """Return whether a key has a regular file; a symbolic link does not count."""
        try:
            return stat.S_ISREG(self._path(key).lstat().st_mode)
        except FileNotFoundError:
            return False

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{self._suffix}.bin"


def require_private(folder: Path) -> None:
    """Require that no user but this one and root can write to a folder.

    A writer could change the output of the model, as KV that is read is trusted.

    Raises:
        ConfigError: Other users can write to it.
    """
    found = folder.stat()
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o022 or found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"folder {folder}: others can write to it (mode 0{mode:03o}, owner "
            f"{found.st_uid}) and so change answers. Run chmod 700, choose another "
            "folder, or trust them with --vericache-store-shared-folder on"
        )


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files older than ``ABANDONED_S``."""
    for file in folder.glob(".*.tmp"):
        try:
            if time.time() - file.lstat().st_mtime > ABANDONED_S:
                file.unlink()
        except OSError:
            continue  # another process removed or renamed it
