"""The store of segments: put, get, look up, upgrade, copy; against a plain dict."""

import threading
import time
from dataclasses import replace
from math import inf

import pytest
import torch
from storages import memory_store
from stored_segments import (
    FINGERPRINT,
    KIVI,
    SNAPKV,
    about,
    bit_flipped,
    is_content,
    names_of,
    pair_parts,
    same,
    tensors_of,
)

from vericache_sglang.errors import InvariantError, StoreError
from vericache_sglang.store.payload import About, Label, Payload
from vericache_sglang.store.records import MOST_OBJECT_BYTES
from vericache_sglang.store.segment_store import SegmentStore, move

pytestmark = pytest.mark.sglang

NAMES = names_of(6)


@pytest.fixture
def store():
    return memory_store()[0]


def put_whole(store, names, first=0):
    for seed, name in enumerate(names, first):
        assert store.put(name, {"whole": tensors_of(seed)}, about())


def test_what_is_put_comes_back_with_its_label(store):
    where = About((5, -7), "before", (None, "", "lora"))
    assert store.put("name", {"whole": tensors_of(1)}, where)
    payload = store.get("name", "whole")
    assert payload.label == Label("name", "whole", "", where)
    assert same(payload.tensors, tensors_of(1))
    counters = store.counters()
    assert (counters.hits, counters.misses) == (1, 0)
    assert counters.read_bytes == counters.written_bytes > 0


def test_a_fetch_takes_as_long_as_those_before_it(store):
    """Reads are timed, and writes for as long as nothing was read."""
    assert store.pace.s_per_byte == inf
    began = time.perf_counter()
    put_whole(store, NAMES)
    most = time.perf_counter() - began
    nbytes = sum(tensor.nbytes for tensor in tensors_of(0).values())
    assert 0 < store.pace.s_per_byte <= most / nbytes
    written = store.pace.s_per_byte
    store.pace.note_read(1000, 3600.0)  # a slow one
    assert store.pace.s_per_byte == 3.6
    assert store.restore(NAMES[0]) is not None
    assert written < store.pace.s_per_byte < 3.6
    assert store.restore("nowhere") is None


def test_nothing_comes_of_a_name_that_was_not_put(store):
    assert store.get("name", "whole") is None
    assert store.restore("name") is None
    assert not store.exists("name", "whole")
    assert store.counters().misses == 2


def test_parts_of_a_pair_come_back_together(store):
    assert store.put("name", pair_parts(1), about(KIVI))
    assert store.get("name", "draft") is None
    assert store.get("name", "draft", SNAPKV) is None
    assert store.exists("name", "rest", KIVI)
    assert not store.exists("name", "whole")
    draft = store.get("name", "draft", KIVI)
    rest = store.get("name", "rest", KIVI, pair=draft.label.pair)
    assert same(draft.tensors, pair_parts(1)["draft"])
    assert same(rest.tensors, pair_parts(1)["rest"])
    assert store.get("name", "rest", KIVI, pair="another") is None


@pytest.mark.parametrize(
    ("parts", "compressor"),
    [((), ""), (("whole",), KIVI), (("draft",), ""), (("whole", "draft"), KIVI)],
)
def test_parts_that_do_not_go_together_are_refused(store, parts, compressor):
    with pytest.raises(InvariantError):
        store.put("name", {part: tensors_of(1) for part in parts}, about(compressor))


def test_a_second_put_writes_nothing(store):
    put_whole(store, ["name"])
    written = store.counters().written_bytes
    assert store.put("name", {"whole": tensors_of(9)}, about())
    assert store.counters().written_bytes == written
    assert same(store.get("name", "whole").tensors, tensors_of(0))


def test_lookup_counts_up_to_the_first_gap(store):
    put_whole(store, [NAMES[0], NAMES[1], NAMES[3]])
    assert store.put(NAMES[4], pair_parts(4), about(KIVI))
    assert store.lookup(NAMES) == 2
    assert store.put(NAMES[2], pair_parts(2), about(SNAPKV))
    assert store.lookup(NAMES) == 5
    assert store.lookup([]) == 0
    assert store.lookup_compressed(NAMES, KIVI) == 0
    assert store.lookup_compressed(NAMES[4:], KIVI) == 1


def test_a_draft_part_alone_drafts_and_restores_nothing(store):
    assert store.put("name", {"draft": tensors_of(1)}, about(KIVI))
    assert store.lookup_compressed(["name"], KIVI) == 1
    assert store.lookup(["name"]) == 0
    assert store.restore("name") is None


def test_halves_of_different_splits_never_make_a_segment(store):
    # Same tokens, same compressor: but another server's KV differs in rounding.
    one, other = pair_parts(1), pair_parts(5)
    assert store.put("name", {"draft": one["draft"]}, about(KIVI))
    assert store.put("name", {"rest": other["rest"]}, about(KIVI))
    assert store.lookup(["name"]) == 0
    assert store.restore("name", KIVI) is None
    draft = store.get("name", "draft", KIVI)
    assert store.get("name", "rest", KIVI, pair=draft.label.pair) is None
    assert store.put("name", one, about(KIVI))
    both = store.restore("name", KIVI)
    assert same(both["rest"].tensors, one["rest"])


def test_long_prompts_are_looked_up_in_few_calls():
    store, storage, _ = memory_store()
    names = names_of(130)
    put_whole(store, names)
    reader = SegmentStore(memory_store(storage)[2], FINGERPRINT)
    assert reader.lookup(names) == 130
    storage.calls = 0
    assert reader.lookup(names) == 130
    assert storage.calls == 2 * 130  # no later record; the object is there


def test_what_was_evicted_and_stored_anew_by_another_is_found():
    store, storage, _ = memory_store()
    put_whole(store, ["name"])
    assert store.lookup(["name"]) == 1
    storage.objects.clear()
    other = memory_store(storage)[0]
    put_whole(other, ["name"], first=7)
    assert store.lookup(["name"]) == 1  # not the object it remembers
    storage.objects.clear()
    assert store.lookup(["name"]) == 0
    assert store.get("name", "whole") is None
    put_whole(other, ["name"], first=7)
    assert same(store.get("name", "whole").tensors, tensors_of(7))


def test_a_record_that_another_writer_was_faster_with_goes_under_the_next_number():
    store, storage, _ = memory_store()
    other = memory_store(storage)[0]
    write = storage.set

    def be_slower(key, value):
        if "record.0" in key:
            storage.set = write
            assert other.put("name", {"whole": tensors_of(5)}, about())
        return write(key, value)  # True, although the key was taken meanwhile

    storage.set = be_slower
    assert store.put("name", pair_parts(1), about(KIVI))
    for reader in (store, other):
        assert set(reader.restore("name", KIVI)) == {"draft", "rest"}
        assert set(reader.restore("name")) == {"whole"}


def test_an_upgrade_replaces_whole_segments_by_pairs(store):
    put_whole(store, NAMES[:3])

    def split(source):
        keys = source["whole"].tensors["keys"]
        return {"k": keys[:1]}, {"k": keys[1:]}

    assert store.compress(NAMES, split, KIVI) == 3
    assert store.lookup_compressed(NAMES, KIVI) == 3
    both = store.restore(NAMES[1], KIVI)
    joined = torch.cat([both["draft"].tensors["k"], both["rest"].tensors["k"]])
    assert same({"keys": joined}, {"keys": tensors_of(1)["keys"]})
    assert both["draft"].label.about == about(KIVI)
    written = store.counters().written_bytes
    assert store.compress(NAMES, None, KIVI) == 3  # nothing left to split
    assert store.counters().written_bytes == written


def test_an_upgrade_can_start_from_another_compressor(store):
    assert store.put("name", pair_parts(1), about(SNAPKV))
    seen = []

    def split(source):
        seen.append(
            {part: each.label.about.compressor for part, each in source.items()}
        )
        return source["draft"].tensors, source["rest"].tensors

    assert store.compress(["name"], split, KIVI) == 1
    assert seen == [{"draft": SNAPKV, "rest": SNAPKV}]
    assert store.restore("name", KIVI)["draft"].label.about.compressor == KIVI
    assert store.restore("name", SNAPKV)["draft"].label.about.compressor == SNAPKV
    assert store.restore("name")["draft"].label.about.compressor == KIVI  # the newest
    for first, second in ((KIVI, SNAPKV), (SNAPKV, KIVI)):
        for asked in ((first,), (first, second), ("unknown", first, second)):
            found = store.restore("name", *asked)
            assert found["draft"].label.about.compressor == first


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
    assert store.compress(["name"], lambda _: pair_parts(1).values(), KIVI) == 0
    assert store.counters().dropped_writes == 1
    for reader in (store, memory_store(storage)[0]):
        assert reader.lookup(["name"]) == 1
        assert reader.lookup_compressed(["name"], KIVI) == 0
        assert reader.get("name", "draft", KIVI) is None
        assert same(reader.restore("name", KIVI)["whole"].tensors, tensors_of(0))


def test_what_a_split_raises_is_passed_on(store):
    put_whole(store, ["name"])
    with pytest.raises(ZeroDivisionError):
        store.compress(["name"], lambda _: 1 / 0, KIVI)


def test_parts_are_copied_to_another_store_in_their_pair(store):
    target = memory_store()[0]
    assert store.put("name", pair_parts(1), about(KIVI))
    assert move("name", "draft", store, target, KIVI)
    assert target.lookup_compressed(["name"], KIVI) == 1
    assert target.lookup(["name"]) == 0
    assert move("name", "rest", store, target, KIVI)
    assert target.lookup(["name"]) == 1
    for part, payload in target.restore("name").items():
        assert same(payload.tensors, pair_parts(1)[part])
        assert payload.label == store.get("name", part, KIVI).label
    assert not move("name", "whole", store, target)


def test_stores_of_different_models_exchange_nothing(store):
    other = replace(FINGERPRINT, weights="other")
    with pytest.raises(InvariantError, match="weights='other'"):
        move("name", "whole", store, SegmentStore(memory_store()[2], other))


def test_later_is_before_drain_returns(store):
    futures = [store.put_later(n, {"whole": tensors_of(1)}, about()) for n in NAMES]
    assert store.drain(10)
    assert store.lookup(NAMES) == 6
    assert all(future.result(0) for future in futures)
    assert store.close()
    assert store.put_later("more", {"whole": tensors_of(1)}, about()) is None
    assert store.counters().dropped_writes == 1


def test_a_full_queue_drops_and_counts():
    storage = memory_store()[1]
    backend = memory_store(storage, timeout_s=10)[2]
    store = SegmentStore(backend, FINGERPRINT, most_waiting=2)
    storage.fault = "hang"
    futures = [store.put_later(n, {"whole": tensors_of(1)}, about()) for n in NAMES]
    dropped = futures.count(None)
    assert dropped in (3, 4)  # the first may have left the queue already
    assert store.counters().dropped_writes == dropped
    storage.fault = None
    storage.go_on.set()
    assert store.drain(10)
    assert store.lookup(NAMES[:2]) == 2


def test_what_cannot_be_stored_is_reported_without_anybody_asking(store, caplog):
    future = store.put_later("name", {"whole": {"t": torch.zeros([1] * 9)}}, about())
    assert store.drain(10)
    assert isinstance(future.exception(0), StoreError)
    assert store.counters().dropped_writes == 1
    assert "9 dims" in caplog.text


def test_prefetch_reads_up_to_the_first_gap(store):
    put_whole(store, NAMES[:3])
    found = store.prefetch(NAMES, store.restore).result(10)
    assert [same(f["whole"].tensors, tensors_of(i)) for i, f in enumerate(found)] == (
        [True] * 3
    )
    future = store.prefetch(NAMES[3:], lambda name: store.get(name, "draft", KIVI))
    assert future.result(10) == []


def test_an_object_too_large_for_a_record_is_dropped(store, monkeypatch):
    where = "vericache_sglang.store.segment_store.MOST_OBJECT_BYTES"
    monkeypatch.setattr(where, 100)
    assert MOST_OBJECT_BYTES > 100
    assert not store.put("name", {"whole": tensors_of(1)}, about())
    assert store.counters().dropped_writes == 1


def test_what_was_found_damaged_can_be_stored_anew():
    store, storage, _ = memory_store()
    put_whole(store, ["name"])
    for round_ in range(3):
        for key in list(storage.objects):
            if "whole" in key:
                data = bit_flipped(bytes(storage.objects[key]), 5000)
                storage.objects[key] = bytearray(data)
        assert store.get("name", "whole") is None
        assert store.counters().checksum_failures == round_ + 1
        assert store.lookup(["name"]) == 0
        put_whole(store, ["name"])
        for reader in (store, memory_store(storage)[0]):
            assert same(reader.get("name", "whole").tensors, tensors_of(0))


def test_many_threads_use_one_store():
    store, _, _ = memory_store()
    names = names_of(20)
    faults = []

    def work(first):
        for turn in range(40):
            index = (first + turn * 7) % 20
            name = names[index]
            store.put(name, {"whole": tensors_of(index)}, about())
            payload = store.get(name, "whole")
            if payload is None or not is_content(payload, [index]):
                faults.append(name)
            store.lookup(names)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert store.lookup(names) == 20
    assert store.counters().hits == 160


def test_payloads_of_another_store_are_accepted_as_they_are(store):
    label = Label("name", "rest", "a pair", about(KIVI))
    assert store.accept(Payload(label, tensors_of(3)))
    assert store.get("name", "rest", KIVI).label == label
