"""What is on disk: over restarts, torn, foreign, damaged, written by many at once."""

import logging
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from storages import file_store
from stored_segments import (
    FINGERPRINT,
    KIVI,
    NAMES,
    about,
    bit_flipped,
    fill,
    is_content,
    names_of,
    pair_parts,
    same,
    tensors_of,
)

pytestmark = pytest.mark.sglang


def intact(store):
    """Return the names whose content is what ``fill`` stored; nothing else comes."""
    good = []
    for seed, name in enumerate(NAMES):
        found = store.restore(name)
        if found is not None:
            wanted = {"whole": tensors_of(seed)} if seed < 3 else pair_parts(seed)
            assert found.keys() == wanted.keys()
            assert all(same(found[part].tensors, wanted[part]) for part in wanted)
            good.append(name)
    return good


def files(folder, *words):
    found = [f for f in sorted(folder.iterdir()) if any(w in f.name for w in words)]
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
from stored_segments import fill
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
        timeout=120,
    )
    store = file_store(tmp_path)
    assert store.lookup(NAMES) == 5
    assert intact(store) == NAMES
    assert store.counters().checksum_failures == 0


@pytest.mark.parametrize(
    ("damaged", "failures"),
    [
        (("whole", "draft", "rest", "record"), 5),
        (("whole", "draft", "rest"), 5),
        (("whole", "rest"), 5),
        (("record",), 5),
    ],
)
def test_a_flipped_bit_anywhere_is_a_miss_and_is_counted(
    tmp_path, caplog, damaged, failures
):
    fill(file_store(tmp_path))
    chance = random.Random(3)
    for file in files(tmp_path, *(f".{word}." for word in damaged)):
        data = file.read_bytes()
        file.write_bytes(bit_flipped(data, chance.randrange(len(data) * 8)))
    store = file_store(tmp_path)
    with caplog.at_level(logging.WARNING, logger="vericache_sglang"):
        assert intact(store) == []
        assert store.lookup(NAMES) == 0
    counters = store.counters()
    assert counters.checksum_failures + counters.foreign >= failures
    assert (counters.hits, counters.misses) == (2 * (damaged == ("whole", "rest")), 5)
    kinds = {record.getMessage().split(":")[1] for record in caplog.records}
    assert len(caplog.records) == len(kinds) <= 3


def test_damage_is_repaired_by_storing_anew(tmp_path):
    fill(file_store(tmp_path))
    for file in files(tmp_path, ".bin"):
        file.write_bytes(bit_flipped(file.read_bytes(), 4000))
    store = file_store(tmp_path)
    assert intact(store) == []
    fill(store)
    for reader in (store, file_store(tmp_path)):
        assert reader.lookup(NAMES) == 5
        assert intact(reader) == NAMES


def test_a_file_cut_anywhere_is_a_miss(tmp_path):
    def put(store):
        return store.put("name", {"whole": tensors_of(1, 400)}, about())

    assert put(file_store(tmp_path))
    tried = 0
    for file in files(tmp_path, ".bin"):
        data = file.read_bytes()
        for length in range(0, len(data), 997):
            file.write_bytes(data[:length])
            store = file_store(tmp_path)
            assert store.get("name", "whole") is None
            assert store.counters().checksum_failures == 1
            assert store.counters().failed_calls == 0
            tried += 1
        file.write_bytes(data)
    assert tried > 15
    assert file_store(tmp_path).get("name", "whole") is not None


def test_files_of_another_model_are_skipped_and_counted(tmp_path, caplog):
    other = replace(FINGERPRINT, weights="fine-tuned")
    fill(file_store(tmp_path, other))
    store = file_store(tmp_path)
    assert store.lookup(NAMES) == 0
    # Even under our own names: a folder copied, or a collision.
    for file in files(tmp_path, ".bin"):
        name = file.name.replace(other.short, FINGERPRINT.short)
        file.rename(tmp_path / name)
    assert intact(store) == []
    assert store.lookup(NAMES) == 0
    counters = store.counters()
    assert (counters.hits, counters.checksum_failures) == (0, 0)
    assert counters.foreign >= 5
    assert len(caplog.records) == 1
    assert "fingerprint" in caplog.text


def test_a_part_under_another_segments_name_is_skipped(tmp_path):
    fill(file_store(tmp_path))
    first, second = (files(tmp_path, f"{name}.whole")[0] for name in NAMES[:2])
    first.write_bytes(second.read_bytes())
    store = file_store(tmp_path)
    assert store.get(NAMES[0], "whole") is None
    assert store.counters().foreign == 1


def test_four_processes_write_the_same_names_and_readers_see_only_whole_ones(
    tmp_path,
):
    def write(server):
        # Content of its own for each server: parts must never be mixed.
        store = file_store(tmp_path)
        for turn in range(12):
            for name in NAMES:
                store.put(name, {"whole": tensors_of(server)}, about())
                store.put(name, pair_parts(10 * server + 100), about(f"{KIVI}{turn}"))
                store.lookup(NAMES)
                wrong_or_none(store, name, turn)

    def wrong_or_none(store, name, turn):
        whole = store.get(name, "whole")
        assert whole is None or is_content(whole, range(4))
        both = store.restore(name, f"{KIVI}{turn}")
        if both is not None and "draft" in both:
            drafts = [s for s in range(100, 140, 10) if is_content(both["draft"], [s])]
            assert len(drafts) == 1
            assert is_content(both["rest"], [drafts[0] + 1])

    writers = [forked(lambda server=server: write(server)) for server in range(4)]
    store = file_store(tmp_path)
    for turn in range(12):
        for name in NAMES:
            wrong_or_none(store, name, turn)
    assert [status_of(pid) for pid in writers] == [0] * 4
    counters = store.counters()
    assert counters.checksum_failures == counters.foreign == counters.failed_calls == 0
    assert file_store(tmp_path).lookup(NAMES) == 5
    assert not list(tmp_path.glob("*.tmp"))


def test_a_writer_killed_at_any_moment_leaves_nothing_half(tmp_path):
    names = names_of(400)

    def write():
        store = file_store(tmp_path)
        for seed, name in enumerate(names):
            store.put(name, {"whole": tensors_of(seed, 2000)}, about())

    chance = random.Random(5)
    for _ in range(8):
        before = len(list(tmp_path.iterdir()))
        pid = forked(write)
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < before + 4:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        assert status_of(pid) == -signal.SIGKILL
        store = file_store(tmp_path)
        run = store.lookup(names)
        for seed, name in enumerate(names[: run + 1]):
            payload = store.get(name, "whole")
            assert (payload is not None) == (seed < run)
            assert payload is None or same(payload.tensors, tensors_of(seed, 2000))
        assert store.counters().checksum_failures == 0
        assert run > 0
