"""Files of the store: private, bounded, nothing but regular files of our own."""

import errno
import os
import shutil
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from sample_segments import FINGERPRINT, is_content, whole_of
from storages import PATIENCE_S

from vericache_sglang.errors import ConfigError
from vericache_sglang.prefix_cache.store.backend import open_backend
from vericache_sglang.prefix_cache.store.files import ABANDONED_S, SegmentFiles
from vericache_sglang.prefix_cache.store.segment_store import SegmentStore

pytestmark = pytest.mark.sglang

DATA = torch.arange(200, dtype=torch.uint8)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "deep" / "store"


def read(files, key):
    return files.get(key, torch.zeros(200, dtype=torch.uint8))


def only_file(folder):
    (file,) = folder.iterdir()
    return file


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_folder_and_files_are_this_users_alone(folder, umask):
    before = os.umask(umask)
    try:
        files = SegmentFiles(folder, {})
        assert files.set("a", DATA)
    finally:
        os.umask(before)
    assert mode_of(folder) == 0o700
    assert mode_of(only_file(folder)) == 0o600
    assert read(files, "a").equal(DATA)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_can_write_to_is_refused(folder, mode):
    folder.mkdir(parents=True)
    folder.chmod(mode)
    wanted = rf"{folder}.*mode 0{mode:o}.*--vericache-store-shared-folder"
    with pytest.raises(ConfigError, match=wanted):
        SegmentFiles(folder, {})
    assert list(folder.iterdir()) == []
    files = SegmentFiles(folder, {}, shared=True)
    assert files.set("a", DATA)
    assert mode_of(only_file(folder)) == mode & 0o666


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(folder):
    folder.mkdir(parents=True, mode=0o700)
    os.chown(folder, 12345, -1)
    with pytest.raises(ConfigError, match="owner 12345"):
        SegmentFiles(folder, {})


def test_a_folder_that_others_can_only_read_is_used(folder):
    folder.mkdir(parents=True, mode=0o755)
    folder.chmod(0o755)
    assert SegmentFiles(folder, {}).set("a", DATA)
    assert mode_of(only_file(folder)) == 0o600


def in_time(action):
    """Return what an action returns, or fail where it waits."""
    found = []
    thread = threading.Thread(target=lambda: found.append(action()), daemon=True)
    thread.start()
    thread.join(120)
    assert found, "it waits for the other end of a FIFO"
    return found[0]


@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo"])
def test_what_is_no_regular_file_is_neither_followed_nor_opened(folder, kind):
    files = SegmentFiles(folder, {})
    files.set("a", DATA)
    path, other = only_file(folder), folder.parent / "another users file"
    other.write_bytes(bytes(200))
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(other if kind == "link" else folder / "nowhere")
    assert not files.exists("a")
    assert in_time(lambda: read(files, "a") is None)
    assert in_time(lambda: files.set("a", DATA))  # takes its place
    assert other.read_bytes() == bytes(200)
    assert not (folder / "nowhere").exists()
    assert path.is_file()
    assert not path.is_symlink()
    assert read(files, "a").equal(DATA)


def test_a_short_file_leaves_the_rest_as_it_is(folder):
    files = SegmentFiles(folder, {})
    files.set("a", DATA)
    only_file(folder).write_bytes(bytes([9] * 50))
    assert read(files, "a").tolist() == [9] * 50 + [0] * 150


def test_temporary_files_of_dead_writers_are_removed(folder):
    folder.mkdir(parents=True)
    old, new = folder / ".old.tmp", folder / ".new.tmp"
    for file in (old, new):
        file.write_bytes(b"half")
    past = time.time() - ABANDONED_S - 60
    os.utime(old, (past, past))
    SegmentFiles(folder, {})
    assert [file.name for file in folder.iterdir()] == [".new.tmp"]


# -- how much there may be --------------------------------------------------------


def test_a_size_limit_evicts_the_oldest_files_of_ours_alone(folder):
    folder.mkdir(parents=True)
    theirs = folder / "pytorch_model.bin"
    theirs.write_bytes(bytes(5000))
    files = SegmentFiles(folder, {"max_size": 1000})
    for key in "abcdef":
        assert files.set(key, DATA)
    assert not files.exists("a")
    assert files.exists("f")
    theirs.unlink()
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 1000


def test_what_an_earlier_server_wrote_counts(folder):
    for key in "abcdef":
        assert SegmentFiles(folder, {"max_size": 0}).set(key, DATA)
    SegmentFiles(folder, {"max_size": 500})
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 500


@pytest.mark.parametrize(
    ("limits", "variable", "wanted"),
    [
        ({}, None, lambda disk: disk // 20),
        ({"max_size": "3Gi"}, None, lambda _: 3 << 30),
        ({"max_size": 0}, None, lambda _: 0),
        ({}, "7Mi", lambda _: 7 << 20),
    ],
)
def test_the_disk_is_never_filled_by_default(
    folder, monkeypatch, limits, variable, wanted
):
    if variable:
        monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE", variable)
    files = SegmentFiles(folder, limits, rank=1, ranks=2)
    assert files._evictor.max_size_bytes == wanted(shutil.disk_usage(folder).total)


def test_a_limit_that_is_no_size_is_refused(folder):
    with pytest.raises(ConfigError, match=r"max_size.*'much'"):
        SegmentFiles(folder, {"max_size": "much"})


def test_ranks_keep_to_their_own_files(folder):
    first = SegmentFiles(folder, {"max_size": 300}, rank=0, ranks=2)
    second = SegmentFiles(folder, {"max_size": 300}, rank=1, ranks=2)
    assert first.set("a", DATA)
    assert second.set("b", DATA)
    assert second.set("c", DATA)
    assert not second.exists("b")
    assert first.exists("a")


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no disk of 64 KiB: {error}")
    if made.returncode:
        pytest.skip(f"no disk of 64 KiB: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_refuses_writes_and_leaves_nothing_behind(small_disk):
    files = SegmentFiles(small_disk / "store", {"max_size": 0})
    files.set("a", DATA)
    large = torch.ones(200 << 10, dtype=torch.uint8)
    for _ in range(2):
        with pytest.raises(OSError, match="No space") as error:
            files.set("b", large)
        assert error.value.errno == errno.ENOSPC
    assert not files.exists("b")
    assert len(list(Path(small_disk / "store").iterdir())) == 1
    assert read(files, "a").equal(DATA)


def test_a_full_disk_costs_a_store_its_writes_and_nothing_else(small_disk):
    extra = {"directory": str(small_disk / "store"), "max_size": 0}
    backend = open_backend("file", FINGERPRINT, extra, timeout_s=PATIENCE_S)
    store = SegmentStore(backend, FINGERPRINT)
    assert store.put("a", whole_of(1, 400))
    assert not store.put("b", whole_of(2, 400))
    assert store.counters.dropped_writes == store.counters.failed_calls == 1
    assert store.lookup(["a", "b"]) == 1
    assert is_content(store.restore("a"), [1], lambda seed: whole_of(seed, 400))
