"""The store of segments: put, restore, look up, upgrade, move."""

import threading
import time
from dataclasses import replace
from math import inf

import pytest
import torch
from sample_segments import (
    FINGERPRINT,
    KEPT,
    KIVI,
    SNAPKV,
    TOKENS,
    bit_flipped,
    is_by,
    is_content,
    names_of,
    pair_of,
    same,
    whole_of,
)
from storages import MemoryStorage, forge, memory_store

from vericache_sglang.errors import InvariantError, StoreError
from vericache_sglang.prefix_cache.store import manifest
from vericache_sglang.prefix_cache.store.keys import Seal
from vericache_sglang.prefix_cache.store.objects import encode
from vericache_sglang.prefix_cache.store.segment_store import SegmentStore

pytestmark = pytest.mark.sglang

NAMES = names_of(6)


@pytest.fixture
def store():
    return memory_store()[0]


def put_whole(store, names, first=0):
    for seed, name in enumerate(names, first):
        assert store.put(name, whole_of(seed))


def test_what_is_put_comes_back_with_its_manifest(store):
    assert store.put("name", whole_of(1))
    found = store.restore("name")
    assert same(found.parts["whole"], whole_of(1)["whole"])
    assert (found.manifest.tokens, found.manifest.kept) == (TOKENS, 0)
    assert store.counters.hits == 1
    assert store.counters.read_bytes == store.counters.written_bytes > 0


def test_a_shorter_segment_and_one_without_residual_kv_are_segments(store):
    """The last one of a prompt; and one of which every token is kept, or none."""
    assert store.put(NAMES[0], whole_of(1, tokens=5))
    assert store.put(NAMES[1], pair_of(1, kept=TOKENS), KIVI)
    assert store.put(NAMES[2], pair_of(1, kept=0), KIVI)
    assert store.restore(NAMES[0]).manifest.tokens == 5
    for name, kept in zip(NAMES[1:3], (TOKENS, 0), strict=True):
        found = store.restore(name)
        assert (found.manifest.tokens, found.manifest.kept) == (TOKENS, kept)
        assert is_content(found, [1], lambda seed, kept=kept: pair_of(seed, kept=kept))


def test_a_fetch_takes_as_long_as_those_before_it(store):
    """Reads are timed, and writes for as long as nothing was read."""
    assert store.pace.s_per_byte == inf
    began = time.perf_counter()
    put_whole(store, NAMES)
    most = time.perf_counter() - began
    nbytes = sum(tensor.nbytes for tensor in whole_of(0)["whole"].values())
    assert 0 < store.pace.s_per_byte <= most / nbytes
    written = store.pace.s_per_byte
    store.pace.note("read", 1000, 3600.0)  # a slow one
    assert store.pace.s_per_byte == 3.6
    assert store.restore(NAMES[0]) is not None
    assert written < store.pace.s_per_byte < 3.6
    assert store.restore("nowhere") is None


def test_nothing_comes_of_a_name_that_was_not_put(store):
    assert store.restore("name") is None
    assert store.restore("name", [KIVI], only="draft") is None
    assert store.counters.misses == 2


def test_draft_kv_comes_back_alone_where_it_is_asked_for(store):
    """As a drafter far from the store needs it."""
    assert store.put("name", pair_of(1), KIVI)
    assert store.restore("name", [SNAPKV], only="draft") is None
    found = store.restore("name", [SNAPKV, KIVI], only="draft")
    assert found.parts.keys() == {"draft"}
    assert same(found.parts["draft"], pair_of(1)["draft"])
    assert found.manifest.objects["draft"].nbytes == store.counters.read_bytes


@pytest.mark.parametrize(
    ("parts", "compressor"),
    [((), ""), (("whole",), KIVI), (("draft",), KIVI), (("draft", "residual"), "")],
)
def test_parts_that_do_not_go_together_are_refused(store, parts, compressor):
    with pytest.raises(InvariantError):
        store.put("name", {part: {} for part in parts}, compressor)


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("draft", "kept", None),
        ("draft", "kept", torch.zeros(2, 2, KEPT, dtype=torch.int64)),
        ("draft", "more", torch.zeros(2)),
        ("residual", "values", torch.zeros(2, 5, 2, 4, dtype=torch.bfloat16)),
        ("residual", "keys", torch.zeros(2, 5, 2, 4)),
    ],
)
def test_what_no_reader_would_accept_is_not_stored(store, part, field, value):
    parts = pair_of(1)
    parts[part] = {
        n: t for n, t in {**parts[part], field: value}.items() if t is not None
    }
    with pytest.raises(StoreError, match=r"^tensor: "):
        store.put("name", parts, KIVI)
    assert store.lookup(["name"]) == 0


def test_a_second_put_writes_nothing(store):
    assert store.put("name", whole_of(1))
    written = store.counters.written_bytes
    assert store.put("name", whole_of(2))
    assert store.counters.written_bytes == written
    assert is_content(store.restore("name"), [1])
    assert store.put("name", pair_of(3), KIVI)  # another form
    assert store.counters.written_bytes > written


def test_lookup_counts_up_to_the_first_gap(store):
    put_whole(store, [NAMES[0], NAMES[1], NAMES[3]])
    assert store.put(NAMES[4], pair_of(4), KIVI)
    assert store.lookup(NAMES) == 2
    assert store.put(NAMES[2], pair_of(2), SNAPKV)
    assert store.lookup(NAMES) == 5
    assert store.lookup([]) == 0
    assert store.lookup_compressed(NAMES, KIVI) == 0
    assert store.lookup_compressed(NAMES[4:], KIVI) == 1


def test_parts_of_different_splits_never_make_a_segment(store):
    """Same tokens, same compressor: but another server's KV differs in rounding."""
    other, storage, _ = memory_store()
    assert store.put("name", pair_of(1), KIVI)
    assert other.put("name", pair_of(5), KIVI)
    target = memory_store()[0]
    assert store.move("name", target, KIVI, only="draft")
    assert other.move("name", target, KIVI, only="residual")
    assert target.lookup(["name"]) == 0
    assert target.restore("name", [KIVI]) is None
    assert is_content(target.restore("name", [KIVI], only="draft"), [1], pair_of) is (
        False
    )  # a part is no segment
    assert store.move("name", target, KIVI, only="residual")
    assert is_content(target.restore("name", [KIVI]), [1], pair_of)
    assert len(storage.objects) == 3


def test_long_prompts_are_looked_up_in_few_calls():
    store, storage, _ = memory_store()
    names = names_of(130)
    put_whole(store, names)
    reader = memory_store(storage)[0]
    calls = []
    call = reader._backend._reads.call
    reader._backend._reads.call = lambda *arguments: calls.append(1) or call(*arguments)
    assert reader.lookup(names) == 130
    assert len(calls) == 3 * 3  # of 64: manifests, no second manifest, objects


def test_what_was_evicted_and_stored_anew_by_another_is_found():
    store, storage, _ = memory_store()
    put_whole(store, ["name"])
    assert store.lookup(["name"]) == 1
    storage.objects.clear()
    other = memory_store(storage)[0]
    put_whole(other, ["name"], first=7)
    assert store.lookup(["name"]) == 1
    assert is_content(store.restore("name"), [7])
    storage.objects.clear()
    assert store.lookup(["name"]) == 0
    assert store.restore("name") is None


def test_a_manifest_that_another_writer_was_faster_with_gets_the_next_number():
    store, storage, _ = memory_store()
    other = memory_store(storage)[0]
    write = storage.set

    def be_slower(key, value):
        if "manifest.0" in key:
            storage.set = write
            assert other.put("name", whole_of(5))
        return write(key, value)  # True, although the key was taken meanwhile

    storage.set = be_slower
    assert store.put("name", pair_of(1), KIVI)
    for reader in (store, other):
        assert set(reader.restore("name", [KIVI]).parts) == {"draft", "residual"}
        assert set(reader.restore("name").parts) == {"whole"}


# -- upgrades and copies ----------------------------------------------------------


def test_an_upgrade_replaces_whole_segments_by_pairs(store):
    put_whole(store, NAMES[:3])
    seen = []

    def split(source):
        seen.append(source.parts["whole"]["keys"])
        return pair_of(len(seen)).values()

    assert store.compress(NAMES, split, KIVI) == 3
    assert [
        same({"k": k}, {"k": whole_of(i)["whole"]["keys"]}) for i, k in enumerate(seen)
    ]
    assert store.lookup_compressed(NAMES, KIVI) == 3
    assert is_content(store.restore(NAMES[1], [KIVI]), [2], pair_of)
    written = store.counters.written_bytes
    assert store.compress(NAMES, None, KIVI) == 3  # nothing left to split
    assert store.counters.written_bytes == written


def test_an_upgrade_can_start_from_another_compressor(store):
    assert store.put("name", pair_of(1), SNAPKV)
    assert store.compress(["name"], lambda found: found.parts.values(), KIVI) == 1
    assert is_by(store.restore("name"), KIVI)  # the newest
    for first, second in ((KIVI, SNAPKV), (SNAPKV, KIVI)):
        for asked in ([first], [first, second], ["unknown", first, second]):
            assert is_by(store.restore("name", asked), first)
    put_whole(store, ["name"])
    assert is_by(store.restore("name", ["unknown"]), "")


@pytest.mark.parametrize("writes", range(3))
def test_an_upgrade_that_dies_halfway_leaves_what_was_there(writes):
    store, storage, _ = memory_store()
    put_whole(store, ["name"])
    objects = storage.objects

    class FullAfter(dict):
        def setdefault(self, key, value):
            if len(self) >= 2 + writes:
                raise OSError("no space")
            return super().setdefault(key, value)

    storage.objects = FullAfter(objects)
    assert store.compress(["name"], lambda _: pair_of(1).values(), KIVI) == 0
    assert store.counters.dropped_writes == 1
    for reader in (store, memory_store(storage)[0]):
        assert reader.lookup(["name"]) == 1
        assert reader.lookup_compressed(["name"], KIVI) == 0
        assert is_content(reader.restore("name", [KIVI]), [0])


def test_what_a_split_raises_is_passed_on(store):
    put_whole(store, ["name"])
    with pytest.raises(ZeroDivisionError):
        store.compress(["name"], lambda _: 1 / 0, KIVI)


def test_a_segment_is_moved_as_it_is(store):
    target = memory_store()[0]
    assert store.put("name", pair_of(1), KIVI)
    assert store.move("name", target, KIVI, only="draft")
    assert target.lookup_compressed(["name"], KIVI) == 1
    assert target.lookup(["name"]) == 0
    assert store.move("name", target, KIVI)
    assert target.lookup(["name"]) == 1
    assert target.restore("name").manifest == store.restore("name").manifest
    assert not store.move("name", target)
    assert not store.move("name", target, KIVI, only="whole")


def test_stores_of_different_models_exchange_nothing(store):
    other = replace(FINGERPRINT, weights="other")
    target = memory_store(fingerprint=other)[0]
    with pytest.raises(InvariantError, match="weights='other'"):
        store.move("name", target)


# -- in the background ------------------------------------------------------------


def test_later_is_before_drain_returns(store):
    futures = [store.put_later(name, whole_of(1)) for name in NAMES]
    assert store.drain(120)
    assert store.waiting == 0
    assert store.lookup(NAMES) == 6
    assert all(future.result(0) for future in futures)
    assert store.close()
    assert store.put_later("more", whole_of(1)) is None
    assert store.prefetch(NAMES).done
    assert store.counters.dropped_writes == 1


def test_a_full_queue_drops_and_counts():
    storage = MemoryStorage()
    backend = memory_store(storage)[2]
    store = SegmentStore(backend, FINGERPRINT, most_waiting=2)
    storage.fault = "hang"
    futures = [store.put_later(name, whole_of(1)) for name in NAMES]
    assert futures.count(None) == store.counters.dropped_writes == 4
    assert store.waiting == 2
    storage.fault = None
    storage.go_on.set()
    assert store.drain(120)
    assert store.lookup(NAMES[:2]) == 2


def test_a_store_that_hangs_is_closed_in_time():
    storage = MemoryStorage()
    store = memory_store(storage)[0]
    storage.fault = "hang"
    futures = [store.put_later(name, whole_of(1)) for name in NAMES]
    prefetch = store.prefetch(NAMES)
    assert not store.close(0.1)
    assert all(future.cancelled() for future in futures[1:])
    storage.go_on.set()
    prefetch.future.exception(120)


def test_what_cannot_be_stored_is_reported_without_a_question(store, caplog):
    future = store.put_later("name", {"whole": {"keys": torch.zeros([1] * 9)}})
    assert store.drain(120)
    assert future.result(0) is False
    assert store.counters.dropped_writes == 1
    assert "cannot be stored" in caplog.text


def test_prefetch_reads_up_to_the_first_gap(store):
    put_whole(store, NAMES[:3])
    prefetch = store.prefetch(NAMES)
    prefetch.future.result(120)
    assert [is_content(f, [i]) for i, f in enumerate(prefetch.found)] == [True] * 3
    assert prefetch.done


def test_a_prefetch_that_is_cancelled_reads_no_more():
    store, storage, _ = memory_store()
    put_whole(store, NAMES)
    storage.fault = "hang"
    prefetch = store.prefetch(NAMES)
    assert not prefetch.done
    prefetch.cancelled = True
    storage.fault = None
    storage.go_on.set()
    prefetch.future.result(120)
    assert len(prefetch.found) <= 1


# -- damage, and malice ------------------------------------------------------------


def test_what_was_found_damaged_is_read_no_more_and_can_be_stored_anew():
    store, storage, _ = memory_store()
    put_whole(store, ["name"])
    for turn in range(3):
        for key in list(storage.objects):
            if "manifest" not in key:
                data = bit_flipped(bytes(storage.objects[key]), 5000)
                storage.objects[key] = bytearray(data)
        for _ in range(2):
            assert store.restore("name") is None
            assert store.counters.damaged == turn + 1
        assert store.lookup(["name"]) == 0
        put_whole(store, ["name"])
        for reader in (store, memory_store(storage)[0]):
            assert is_content(reader.restore("name"), [0])


def test_a_damaged_manifest_is_read_once_and_passed_over():
    store, storage, _ = memory_store()
    put_whole(store, ["name"])
    (key,) = (key for key in storage.objects if "manifest" in key)
    storage.objects[key] = bytearray(bit_flipped(bytes(storage.objects[key]), 77))
    reads = []
    get = storage.get
    storage.get = lambda key, *more: reads.append(key) or get(key, *more)
    for _ in range(3):
        assert store.restore("name") is None
    assert reads == [key]
    assert store.counters.damaged == 1
    put_whole(store, ["name"])
    assert is_content(store.restore("name"), [0])


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        (pair_of(1), {"compressor": "c"}),  # kept: 0
        (pair_of(1), {"compressor": "c", "kept": KEPT, "tokens": TOKENS - 1}),
        ({"draft": {}, "residual": {}}, {"compressor": "c", "kept": KEPT}),
        (whole_of(1), {"tokens": TOKENS + 1}),
        ({"whole": b""}, {}),
        ({"whole": bytes(2 << 20)}, {}),  # more than any such segment has
        ({"whole": encode(whole_of(1)["whole"]).numpy().tobytes()[:-1]}, {}),
    ],
)
def test_a_sealed_object_is_not_believed_beyond_its_geometry(objects, said):
    store, storage, _ = memory_store()
    forge(storage, FINGERPRINT, "name", objects, said)
    assert store.lookup(["name"]) == 1
    assert store.restore("name") is None
    seen = replace(store.counters)
    assert seen.damaged == 1
    assert store.restore("name") is None
    assert store.counters == replace(seen, misses=2), "it is read once"
    assert store.lookup(["name"]) == 0


def test_a_manifest_cannot_ask_for_more_memory_than_a_segment_takes():
    store, storage, _ = memory_store()
    digest = Seal().of(b"x").hex()
    said = {"objects": {"whole": (1 << 50, digest)}}
    forge(storage, FINGERPRINT, "name", {"whole": b"x"}, said)
    assert store.restore("name") is None
    assert (store.counters.damaged, store.counters.failed_calls) == (1, 0)


def test_with_a_key_nothing_is_read_that_was_not_sealed_with_it():
    """Whoever can write to the store can copy what is there, and nothing else."""
    keyed = replace(FINGERPRINT, key=b"k" * 32)
    store, storage, _ = memory_store(fingerprint=keyed)
    put_whole(store, ["a", "b"])
    objects = dict(storage.objects)
    forge(storage, replace(keyed, key=b""), "a", whole_of(5))
    forged = [key for key in storage.objects if key not in objects]
    (of_a, of_b) = (key for key in objects if "manifest" in key)
    for key in forged:
        if "manifest" in key:  # the best an attacker can do: all names are right
            storage.objects[of_a] = storage.objects[key]
    assert store.restore("a") is None
    storage.objects[of_a] = storage.objects[of_b]
    other = memory_store(storage, keyed)[0]
    assert other.restore("a") is None
    assert other.counters.foreign == 1
    assert is_content(other.restore("b"), [1])
    assert memory_store(storage)[0].restore("b") is None


def test_what_is_known_to_be_damaged_is_bounded(monkeypatch):
    monkeypatch.setattr(manifest, "MOST_UNUSABLE", 100)
    store, storage, _ = memory_store()
    for at in range(150):
        forge(storage, FINGERPRINT, f"{at}", {"whole": b"%d" % at})
        assert store.restore(f"{at}") is None
    assert len(store._unusable) == 100


def test_many_threads_use_one_store():
    store, _, _ = memory_store()
    names = names_of(20)
    faults = []

    def work(first):
        for turn in range(40):
            index = (first + turn * 7) % 20
            name = names[index]
            store.put(name, whole_of(index))
            if not is_content(store.restore(name), [index]):
                faults.append(name)
            store.lookup(names)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert store.lookup(names) == 20
    assert store.counters.hits == 160
