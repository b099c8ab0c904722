"""Any backend of SGLang's, bounded and quiet; files in a folder of our own."""

import os
import time
from dataclasses import replace

import pytest
import torch
from storages import PATIENCE_S, AddressStorage, MemoryStorage, memory_store
from stored_segments import FINGERPRINT, names_of, took

from vericache_sglang.errors import ConfigError
from vericache_sglang.store.backend import ABANDONED_S, Backend, open_backend

pytestmark = pytest.mark.sglang

DATA = torch.arange(200, dtype=torch.uint8)


def dynamic(class_name, **settings):
    return open_backend(
        "dynamic",
        FINGERPRINT,
        extra={
            "backend_name": "test",
            "module_path": "storages",
            "class_name": class_name,
        },
        **settings,
    )


def in_files(folder, fingerprint=FINGERPRINT, **settings):
    return open_backend("file", fingerprint, folder, timeout_s=PATIENCE_S, **settings)


@pytest.fixture(params=["file", "MemoryStorage", "AddressStorage"])
def backend(request, tmp_path):
    if request.param == "file":
        return in_files(tmp_path)
    return dynamic(request.param, timeout_s=PATIENCE_S)


def test_what_is_written_is_read(backend):
    assert backend.present(["a", "b"]) == [False, False]
    assert backend.read(["a"], 200) == [None]
    assert backend.write("a", DATA)
    assert backend.present(["a", "b"]) == [True, False]
    found, missing = backend.read(["a", "b"], 200)
    assert found.equal(DATA)
    assert missing is None
    assert backend.tally.snapshot().failed_calls == 0


def test_what_is_there_is_never_overwritten(backend):
    assert backend.write("a", DATA)
    assert backend.write("a", DATA.flip(0))
    assert backend.read(["a"], 200)[0].equal(DATA)


def test_another_size_than_asked_for_is_no_failure(backend):
    backend.write("a", DATA)
    assert backend.read(["a"], 150)[0].equal(DATA[:150])
    longer = backend.read(["a"], 250)[0]
    assert longer is not None
    assert longer[:200].equal(DATA)
    assert backend.tally.snapshot().failed_calls == 0


def test_files_are_in_our_folder_whatever_hicache_was_told(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "hi"))
    ours = tmp_path / "deep" / "ours"
    backend = in_files(ours)
    assert backend.write("a", DATA)
    assert len(list(ours.iterdir())) == 1
    assert not (tmp_path / "hi").exists()
    assert os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"].endswith("hi")


def test_temporary_files_of_dead_writers_are_removed(tmp_path):
    old, new = tmp_path / ".old.tmp", tmp_path / ".new.tmp"
    for file in (old, new):
        file.write_bytes(b"half")
    past = time.time() - ABANDONED_S - 60
    os.utime(old, (past, past))
    in_files(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [".new.tmp"]


def test_a_size_limit_evicts_the_oldest_files(tmp_path):
    backend = in_files(tmp_path, extra={"max_size": 1000})
    for key in "abcdef":
        assert backend.write(key, DATA)
    present = backend.present(list("abcdef"))
    assert not present[0]
    assert present[5]
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 1000


def test_writes_that_are_refused_do_not_stop_reads(tmp_path):
    backend = in_files(tmp_path, extra={"max_size": 300})
    assert backend.write("a", DATA)
    large = torch.zeros(400, dtype=torch.uint8)
    assert [backend.write("b", large) for _ in range(4)] == [False] * 4
    assert backend.read(["a"], 200)[0].equal(DATA)
    counters = backend.tally.snapshot()
    assert (counters.failed_calls, counters.refused_calls) == (3, 1)


def test_a_folder_that_cannot_be_read_is_a_miss(tmp_path):
    backend = in_files(tmp_path)
    backend.write("a", DATA)
    file = next(tmp_path.iterdir())
    file.unlink()
    file.mkdir()  # exists, and cannot be read: EISDIR
    assert backend.read(["a"], 200) == [None]
    assert backend.tally.snapshot().failed_calls == 1


@pytest.mark.parametrize("fault", ["raise", "hang"])
def test_a_dead_backend_costs_three_time_outs_then_nothing(fault):
    store, storage, backend = memory_store(timeout_s=0.4, breaker_pause_s=0.5)
    assert backend.write("a", DATA)
    storage.fault = fault
    seconds = took(lambda: [backend.read(["a"], 200) for _ in range(3)])
    assert seconds < 15
    calls = storage.calls
    assert backend.read(["a"], 200) == [None]
    assert store.lookup(names_of(3)) == 0
    assert storage.calls == calls
    storage.fault = None
    storage.go_on.set()
    time.sleep(0.6)
    assert backend.read(["a"], 200)[0].equal(DATA)


def test_an_object_that_exists_but_does_not_come_is_asked_for_again():
    storage = AddressStorage()
    backend = Backend(storage, timeout_s=PATIENCE_S)
    backend.write("a", DATA)
    storage.failing_gets = 1  # Mooncake's -800 while a replica's node is dead
    assert backend.read(["a"], 200)[0].equal(DATA)
    storage.failing_gets = 2
    assert backend.read(["a"], 200) == [None]


def test_registered_memory_is_used_again():
    storage = AddressStorage()
    backend = Backend(storage, timeout_s=PATIENCE_S)
    for key in "abc":
        backend.write(key, DATA)
        backend.read([key], 200)
    assert len(storage.registered) == 1
    backend.write("d", torch.zeros(3 << 20, dtype=torch.uint8))
    assert [size for _, size in storage.registered] == [1 << 20, 4 << 20]
    assert backend.read(["a"], 200)[0].equal(DATA)


def test_ranks_of_a_folder_keep_apart(tmp_path):
    first = replace(FINGERPRINT, tp_size=2)
    second = replace(FINGERPRINT, tp_size=2, tp_rank=1)
    in_files(tmp_path, first).write("a", DATA)
    other = in_files(tmp_path / "made-by-rank-1", second)
    assert other.write("a", DATA)
    assert in_files(tmp_path, second).present(["a"]) == [False]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("nixl", FINGERPRINT), "'nixl'.*file.*mooncake.*dynamic"),
        (("file", FINGERPRINT), "wanted a directory"),
        (("dynamic", FINGERPRINT), "'dynamic' did not open.*backend_name"),
    ],
)
def test_what_cannot_be_opened_is_refused_by_name(arguments, wanted):
    with pytest.raises(ConfigError, match=wanted):
        open_backend(*arguments)


def test_the_storage_is_told_the_rank_and_the_model():
    backend = dynamic("MemoryStorage")
    storage = backend._calls.storage
    assert type(storage).__name__ == MemoryStorage.__name__
    assert (storage.config.tp_rank, storage.config.tp_size) == (0, 1)
    assert FINGERPRINT.short in storage.config.model_name
