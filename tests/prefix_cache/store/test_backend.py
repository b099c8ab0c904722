"""Any backend of SGLang's, bounded and quiet."""

import time

import pytest
import torch
from sample_segments import FINGERPRINT, names_of, took
from storages import PATIENCE_S, AddressStorage, MemoryStorage, memory_store

from vericache_sglang.errors import ConfigError
from vericache_sglang.prefix_cache.store.backend import Backend, open_backend

pytestmark = pytest.mark.sglang

DATA = torch.arange(200, dtype=torch.uint8)


def dynamic(class_name, **settings):
    extra = {
        "backend_name": "test",
        "module_path": "storages",
        "class_name": class_name,
    }
    return open_backend("dynamic", FINGERPRINT, extra, **settings)


def in_files(folder, **extra):
    extra["directory"] = str(folder)
    return open_backend("file", FINGERPRINT, extra, timeout_s=PATIENCE_S)


@pytest.fixture(params=["file", "MemoryStorage", "AddressStorage"])
def backend(request, tmp_path):
    if request.param == "file":
        return in_files(tmp_path / "store")
    return dynamic(request.param, timeout_s=PATIENCE_S)


def test_what_is_written_is_read(backend):
    assert backend.present(["a", "b"]) == [False, False]
    assert backend.read(["a"], 200) == [None]
    assert backend.write("a", DATA)
    assert backend.present(["a", "b"]) == [True, False]
    found, missing = backend.read(["a", "b"], 200)
    assert found.equal(DATA)
    assert missing is None
    assert backend.counters.failed_calls == 0


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
    assert backend.counters.failed_calls == 0


def test_writes_that_are_refused_do_not_stop_reads(tmp_path):
    backend = in_files(tmp_path / "store", max_size=300)
    assert backend.write("a", DATA)
    large = torch.zeros(400, dtype=torch.uint8)
    assert [backend.write("b", large) for _ in range(4)] == [False] * 4
    assert backend.read(["a"], 200)[0].equal(DATA)
    counters = backend.counters
    assert (counters.failed_calls, counters.refused_calls) == (3, 1)


def test_a_read_that_the_disk_refuses_is_a_miss():
    _, storage, backend = memory_store()
    backend.write("a", DATA)
    storage.fault = "get"
    assert backend.read(["a"], 200) == [None]
    assert backend.counters.failed_calls == 1


@pytest.mark.parametrize("fault", ["raise", "hang"])
def test_a_dead_backend_costs_three_time_outs_then_nothing(fault):
    store, storage, backend = memory_store(timeout_s=1.0, pause_s=3.0)
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
    time.sleep(3.1)
    assert backend.read(["a"], 200)[0].equal(DATA)


def test_an_object_that_exists_but_does_not_come_is_asked_for_again():
    storage = AddressStorage()
    backend = Backend(storage, timeout_s=PATIENCE_S)
    backend.write("a", DATA)
    storage.failing_gets = 1  # Mooncake's -800 while a replica's node is dead
    assert backend.read(["a"], 200)[0].equal(DATA)
    storage.failing_gets = 2
    assert backend.read(["a"], 200) == [None]


def test_memory_of_a_call_that_raised_is_used_again():
    storage = AddressStorage()
    backend = Backend(storage, timeout_s=PATIENCE_S)
    backend.write("a", DATA)
    storage.fault = "get"
    assert backend.read(["a"], 200) == [None]
    storage.fault = None
    assert backend.read(["a"], 200)[0].equal(DATA)
    assert len(storage.registered) == 1


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


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("nixl", FINGERPRINT, {}), "'nixl'.*file.*mooncake.*dynamic"),
        (("file", FINGERPRINT, {}), "wanted a directory"),
        (("dynamic", FINGERPRINT, {}), "dynamic did not open.*backend_name"),
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
