"""What is on disk: over restarts, torn, foreign, damaged, written by many at once."""

import logging
import os
import random
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from sample_segments import (
    FINGERPRINT,
    KIVI,
    NAMES,
    bit_flipped,
    fill,
    is_content,
    names_of,
    pair_of,
    whole_of,
)
from storages import file_store

from vericache_sglang.prefix_cache.store.keys import segment_names

pytestmark = pytest.mark.sglang


def intact(store):
    """Return the names whose content is what ``fill`` stored; nothing else comes."""
    good = []
    for seed, name in enumerate(NAMES):
        found = store.restore(name)
        if found is not None:
            assert is_content(found, [seed], whole_of if seed < 3 else pair_of)
            good.append(name)
    return good


def files(folder, kind="all"):
    """Return the files of a store: the manifests, the objects, or all."""
    found = [
        file
        for file in sorted(folder.iterdir())
        if kind == "all" or (".manifest." in file.name) == (kind == "manifests")
    ]
    assert found
    return found


def forked(work):
    """Run ``work`` in a child of this process, another server to the store."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def status_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


WRITER = """
import sys
from storages import file_store
from sample_segments import fill
store = file_store(sys.argv[1])
fill(store)
assert store.close()
"""


def test_a_new_process_reads_what_an_old_one_wrote(tmp_path):
    here = os.path.dirname(__file__)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([here, *sys.path])}
    subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        env=environment,
        check=True,
        timeout=600,
    )
    store = file_store(tmp_path)
    assert store.lookup(NAMES) == 5
    assert intact(store) == NAMES
    assert store.counters.damaged == 0


@pytest.mark.parametrize(("kind", "damaged"), [("objects", 5), ("manifests", 5)])
def test_a_flipped_bit_anywhere_is_a_miss_and_is_counted(
    tmp_path, caplog, kind, damaged
):
    fill(file_store(tmp_path))
    chance = random.Random(3)
    for file in files(tmp_path, kind):
        data = file.read_bytes()
        file.write_bytes(bit_flipped(data, chance.randrange(len(data) * 8)))
    store = file_store(tmp_path)
    with caplog.at_level(logging.WARNING, logger="vericache_sglang"):
        assert intact(store) == []
        assert store.lookup(NAMES) == 0
    counters = store.counters
    assert (counters.damaged, counters.hits, counters.misses) == (damaged, 0, 5)
    kinds = {record.getMessage().split(":")[1] for record in caplog.records}
    assert len(caplog.records) == len(kinds) <= 3


def test_damage_is_repaired_by_storing_anew(tmp_path):
    fill(file_store(tmp_path))
    for file in files(tmp_path):
        file.write_bytes(bit_flipped(file.read_bytes(), 4000))
    store = file_store(tmp_path)
    assert intact(store) == []
    fill(store)
    for reader in (store, file_store(tmp_path)):
        assert reader.lookup(NAMES) == 5
        assert intact(reader) == NAMES


def test_a_file_cut_anywhere_is_a_miss(tmp_path):
    assert file_store(tmp_path).put("name", whole_of(1, 400))
    tried = 0
    for file in files(tmp_path):
        data = file.read_bytes()
        for length in range(0, len(data), 1997):
            file.write_bytes(data[:length])
            store = file_store(tmp_path)
            assert store.restore("name") is None
            assert store.counters.damaged == 1
            assert store.counters.failed_calls == 0
            tried += 1
        file.write_bytes(data)
    assert tried > 15
    assert is_content(file_store(tmp_path).restore("name"), [1], long_whole)


def long_whole(seed):
    return whole_of(seed, 400)


def test_files_of_another_model_are_skipped_and_counted(tmp_path, caplog):
    other = replace(FINGERPRINT, weights="fine-tuned")
    fill(file_store(tmp_path, other))
    store = file_store(tmp_path)
    assert store.lookup(NAMES) == 0
    # Even under our own names: a folder copied, or a collision.
    for file in files(tmp_path):
        name = file.name.replace(other.short, FINGERPRINT.short)
        file.rename(tmp_path / name)
    assert intact(store) == []
    assert store.lookup(NAMES) == 0
    counters = store.counters
    assert (counters.hits, counters.damaged, counters.foreign) == (0, 0, 5)
    assert len(caplog.records) == 1
    assert "name: wanted" in caplog.text


def test_ranks_share_a_folder_and_no_segment(tmp_path):
    """Each has its own heads; what one of them lacks none may use."""
    ranks = [replace(FINGERPRINT, tp_size=2, tp_rank=rank) for rank in range(2)]
    stores = [file_store(tmp_path, rank) for rank in ranks]
    names = [segment_names(rank, (None,), range(24), 8) for rank in ranks]
    for name in names[0]:
        assert stores[0].put(name, whole_of(0))
    assert stores[1].put(names[1][0], whole_of(1))
    found = [s.lookup(own) for s, own in zip(stores, names, strict=True)]
    assert found == [3, 1]
    assert not set(names[0]) & set(names[1])


def test_a_folder_of_the_format_before_is_neither_read_nor_touched(tmp_path):
    """Version 1: own frames, records by name. Its keys began with its fingerprint."""
    before = replace(FINGERPRINT, version=1)
    (name,) = names_of(1)
    suffix = f"_vericache-{before.short}_0_1.bin"
    old = {
        f"{before.short}.{name}.record.0{suffix}": b"VCKV\1\0\0\0".ljust(1024, b"7"),
        f"{before.short}.{name}.whole.{'0' * 32}.0{suffix}": b"VCKV\1\0\0\0" * 99,
    }
    for file, data in old.items():
        (tmp_path / file).write_bytes(data)
    store = file_store(tmp_path)
    assert before.short != FINGERPRINT.short
    assert store.lookup([name]) == 0
    assert store.restore(name) is None
    assert store.put(name, whole_of(1))
    assert store.counters.damaged == 0
    assert {f: (tmp_path / f).read_bytes() for f in old} == old


def test_a_manifest_under_another_segments_name_is_skipped(tmp_path):
    fill(file_store(tmp_path))
    first, second = (
        next(f for f in files(tmp_path, "manifests") if f".{name}." in f.name)
        for name in NAMES[:2]
    )
    first.write_bytes(second.read_bytes())
    store = file_store(tmp_path)
    assert store.restore(NAMES[0]) is None
    assert store.counters.foreign == 1


def test_no_text_of_a_prompt_is_on_the_disk(tmp_path):
    """Neither its tokens nor what separates users."""
    token, salt = 0x1234567, "a customer's salt"
    names = segment_names(FINGERPRINT, ("tenant", salt), [token] * 16, 8)
    store = file_store(tmp_path)
    for seed, name in enumerate(names):
        assert store.put(name, whole_of(seed))
    for file in files(tmp_path):
        data = file.name.encode() + file.read_bytes()
        for word in (salt, "tenant", str(token)):
            assert word.encode() not in data
        for width in ("<i", "<q", ">i", ">q"):
            assert struct.pack(width, token) not in data


def test_four_processes_write_the_same_names_and_readers_see_only_whole_ones(
    tmp_path,
):
    def write(server):
        # Content of its own for each server: parts must never be mixed.
        store = file_store(tmp_path)
        for turn in range(12):
            for name in NAMES:
                store.put(name, whole_of(server))
                store.put(name, pair_of(server + 100), f"{KIVI}{turn}")
                store.lookup(NAMES)
                wrong_or_none(store, name, turn)

    def wrong_or_none(store, name, turn):
        found = store.restore(name, [f"{KIVI}{turn}"])
        if found is not None and found.manifest.compressor:
            assert is_content(found, range(100, 104), pair_of)
        else:
            assert found is None or is_content(found, range(4))

    writers = [forked(lambda server=server: write(server)) for server in range(4)]
    store = file_store(tmp_path)
    for turn in range(12):
        for name in NAMES:
            wrong_or_none(store, name, turn)
    assert [status_of(pid) for pid in writers] == [0] * 4
    counters = store.counters
    assert counters.damaged == counters.foreign == counters.failed_calls == 0
    assert file_store(tmp_path).lookup(NAMES) == 5
    assert not list(tmp_path.glob("*.tmp"))


def test_a_writer_killed_at_any_moment_leaves_nothing_half(tmp_path):
    names = names_of(20_000)  # more than are written before it is killed

    def write():
        store = file_store(tmp_path)
        for seed, name in enumerate(names):
            store.put(name, long_whole(seed))

    chance = random.Random(5)
    for _ in range(8):
        before = len(list(tmp_path.iterdir()))
        pid = forked(write)
        deadline = time.monotonic() + 240
        while len(list(tmp_path.iterdir())) < before + 4:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        assert status_of(pid) == -signal.SIGKILL
        store = file_store(tmp_path)
        run = store.lookup(names)
        for seed, name in enumerate(names[: run + 1]):
            found = store.restore(name)
            assert (found is not None) == (seed < run)
            assert found is None or is_content(found, [seed], long_whole)
        assert store.counters.damaged == 0
        assert run > 0
