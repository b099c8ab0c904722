"""Stored segments as the scheduler uses them: written once, fetched in time or not."""

from math import inf

import pytest
import torch
from sample_segments import FINGERPRINT, KIVI, SNAPKV, TOKENS, pair_of, whole_of
from storages import HeldStore, forge

from vericache_sglang.prefix_cache.store import fetches, pace, stored_segments
from vericache_sglang.prefix_cache.store.stored_segments import StoredSegments

pytestmark = pytest.mark.sglang


class Clock:
    """``time`` as ``stored_segments`` sees it."""

    now = 100.0

    def monotonic(self):
        return self.now


def opened(refuse=(), storage=None, fails=()):
    """Return stored segments, their store, and what was taken in, in order."""
    store, taken = HeldStore(FINGERPRINT, storage), []

    def keep(name, parent, found):
        taken.append((name, parent, sorted(found.parts)))
        if name in fails:
            raise KeyError("kept")
        return name not in refuse

    return StoredSegments(store, KIVI, keep, [SNAPKV], TOKENS), store, taken


def written(store, names):
    for seed, name in enumerate(names):
        assert store.put(name, whole_of(seed))


def finish(stored, rid="r"):
    """Take in what came, as a single rank does; False while the request waits."""
    count = stored.found(rid)
    return count is not None and stored.take(rid, count)


# -- writing ------------------------------------------------------------------------


def test_a_segment_is_written_once_in_each_form():
    stored, store, _ = opened()
    assert stored.wants("a")
    stored.write("a", whole_of(1))
    assert not stored.wants("a")
    assert stored.wants("a", split=True)
    assert "a" not in stored, "it is not there yet"
    store.announce()
    assert stored.changes() == [("a", True)]
    assert "a" in stored
    stored.write("a", pair_of(1))
    assert not stored.wants("a", split=True)
    store.announce()
    assert stored.changes() == [("a", True)]
    assert store.lookup_compressed(["a"], KIVI) == 1
    assert not stored.wants("a", split=True)
    assert stored.changes() == []


def test_both_forms_may_wait_at_once():
    stored, store, _ = opened()
    stored.write("a", whole_of(1))
    stored.write("a", pair_of(1))
    assert stored.report()["cache_store_waiting"] == 2
    store.announce()
    assert stored.changes() == [("a", True)]
    assert not stored.wants("a", split=True)
    assert stored.report()["cache_store_waiting"] == 0


@pytest.mark.parametrize("why", ["queue", "disk", "content"])
def test_a_write_that_failed_may_be_tried_again(why):
    stored, store, _ = opened()
    if why == "queue":
        store._most_waiting = 0
    if why == "disk":
        store.storage.fault = "set"
    stored.write("a", {"whole": {}} if why == "content" else whole_of(1))
    store.announce()
    assert stored.changes() == []
    assert stored.wants("a")
    assert stored.report()["cache_store_dropped_writes"] == 1
    store._most_waiting, store.storage.fault = 9, None
    stored.write("a", whole_of(1))
    store.announce()
    assert stored.changes() == [("a", True)]


def test_a_write_of_a_segment_that_was_forgotten_changes_nothing():
    stored, store, _ = opened()
    stored.write("a", whole_of(1))
    stored.forget("a")
    store.announce()
    assert stored.changes() == []
    assert stored.wants("a")


# -- reading ------------------------------------------------------------------------


def test_what_comes_is_taken_in_in_order_up_to_the_first_that_is_missing():
    stored, store, taken = opened()
    written(store, "abd")
    stored.fetch("r", ["a", "b", "c", "d"], 0)
    assert not finish(stored)
    store.arrive()
    assert finish(stored)
    assert taken == [("a", None, ["whole"]), ("b", "a", ["whole"])]
    assert stored.changes() == [("a", True), ("b", True), ("c", False)]
    assert stored.pop("r") == (2 * TOKENS, 0)
    assert stored.pop("r") == (0, None)


def test_a_fetch_begins_with_the_segment_that_is_cached_in_part():
    stored, store, taken = opened()
    written(store, "abc")
    stored.fetch("r", ["a", "b", "c"], 2 * TOKENS - 3)
    store.arrive()
    assert finish(stored)
    assert [(name, parent) for name, parent, _ in taken] == [("b", "a"), ("c", "b")]
    assert stored.pop("r") == (2 * TOKENS, TOKENS)


def test_without_room_the_rest_is_not_taken_in():
    stored, store, taken = opened(refuse=["b"])
    written(store, "abc")
    stored.fetch("r", ["a", "b", "c"], 0)
    store.arrive()
    assert finish(stored)
    assert [name for name, *_ in taken] == ["a", "b"]
    assert stored.pop("r") == (TOKENS, 0)


def test_what_was_fetched_is_not_written_again():
    stored, store, _ = opened()
    written(store, "a")
    assert store.put("b", pair_of(1), SNAPKV)
    stored.fetch("r", ["a", "b"], 0)
    store.arrive()
    assert finish(stored)
    assert [stored.wants(name) for name in "ab"] == [False, False]
    assert [stored.wants(name, split=True) for name in "ab"] == [True, False]


def test_a_long_prompt_is_read_and_taken_in_by_slices(monkeypatch):
    """Else it would be in memory whole, beyond what the host tier may take."""
    monkeypatch.setattr(stored_segments, "AHEAD_BYTES", 1600)
    stored, store, taken = opened()
    written(store, "abcde")
    stored.fetch("r", list("abcdef"), 0)
    for turn in range(2):
        store.arrive()
        assert not finish(stored)
        assert [name for name, *_ in taken] == list("abcd"[: 2 * turn + 2])
    assert stored.found("r") is None
    store.arrive()
    assert finish(stored)
    assert taken[-1] == ("e", "d", ["whole"])
    assert stored.changes()[-1] == ("f", False)
    assert stored.pop("r") == (5 * TOKENS, 0)


def test_no_request_waits_past_the_deadline(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stored_segments, "time", clock)
    stored, store, taken = opened()
    written(store, "a")
    stored.fetch("r", ["a"], 0)
    clock.now += stored_segments.LONGEST_S - 0.1
    assert not finish(stored)
    clock.now += 0.2
    assert finish(stored)
    assert stored.pop("r") == (0, None)
    store.arrive()  # too late: it is not even read any more
    assert store.counters.hits == 0
    assert finish(stored)
    assert taken == []


def test_a_request_that_is_to_be_read_whole_waits_longer(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stored_segments, "time", clock)
    stored, store, _ = opened()
    written(store, "abc")
    alone_s = stored.whole_s(1)
    assert 0.0 < alone_s == stored.whole_s(2) / 2
    assert alone_s == pytest.approx(TOKENS * stored.token_s)
    stored.await_whole("r", 2 * stored_segments.LONGEST_S)
    stored.fetch("r", ["a", "b"], 0)
    assert stored.whole_s(1) == pytest.approx(3 * alone_s), "behind two others"
    stored.fetch("other", ["c"], 0)
    clock.now += stored_segments.LONGEST_S + 0.1
    assert finish(stored, "other")
    assert not finish(stored)
    store.arrive()
    assert finish(stored)
    assert stored.pop("r") == (2 * TOKENS, 0)
    assert stored.whole_s(1) == stored.whole_s(2) / 2, "behind none"


@pytest.mark.parametrize(("predicted", "waits"), [(0.0, 1), (2.0, 4), (inf, 1)])
def test_on_b2_a_request_waits_twice_as_long_as_predicted(
    predicted, waits, monkeypatch
):
    clock, longest = Clock(), stored_segments.LONGEST_S
    monkeypatch.setattr(stored_segments, "time", clock)
    stored, store, _ = opened()
    written(store, "ab")
    stored.awaits_whole = True
    monkeypatch.setattr(stored, "whole_s", lambda segments: predicted * longest)
    stored.fetch("r", ["a", "b"], 0)
    clock.now += waits * longest - 0.1
    assert not finish(stored)
    clock.now += 0.2
    assert finish(stored)


@pytest.mark.parametrize(
    ("prefill_s", "idle", "late"),
    [(0.9, 0.5, True), (1.1, 0.5, False), (1.1, 1.1, True)],
    ids=["prefill is faster", "reading is faster", "the store stands still"],
)
def test_a_late_request_waits_on_where_reading_is_faster(
    prefill_s, idle, late, monkeypatch
):
    clock, longest = Clock(), stored_segments.LONGEST_S
    monkeypatch.setattr(stored_segments, "time", clock)
    monkeypatch.setattr(pace, "time", clock)
    stored, store, _ = opened()
    written(store, "abc")
    asked = []

    def predicted(before, tokens):
        asked.append((before, tokens))
        return prefill_s * stored.whole_s(0)

    stored.prefill_s = predicted
    stored.fetch("r", ["z", "a", "b", "c"], TOKENS)
    stored.fetch("other", ["c"], 0)
    clock.now += 2 * longest
    store.pace.note("read", 1, 1.0)
    clock.now += idle * longest
    assert finish(stored) == late
    assert set(asked) <= {(TOKENS, 3 * TOKENS)}
    if not late:
        store.arrive()
        assert finish(stored)
        assert stored.pop("r") == (3 * TOKENS, TOKENS)


def test_what_came_before_the_deadline_is_taken_in(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stored_segments, "time", clock)
    stored, store, taken = opened()
    written(store, "abc")
    restore = store.restore

    def slow(name, compressors, only):
        if name == "c":
            clock.now += stored_segments.LONGEST_S
            assert finish(stored)
        return restore(name, compressors, only)

    monkeypatch.setattr(store, "restore", slow)
    stored.fetch("r", ["a", "b", "c"], 0)
    store.arrive()
    assert [name for name, *_ in taken] == ["a", "b"]
    assert stored.pop("r") == (2 * TOKENS, 0)


def test_nothing_to_fetch_is_nothing_to_wait_for():
    stored, store, _ = opened()
    assert finish(stored)
    stored.fetch("r", ["a"], TOKENS)
    assert store.reads == 0
    assert finish(stored)


def test_a_request_is_fetched_for_once():
    stored, store, _ = opened()
    stored.fetch("r", ["a"], 0)
    stored.fetch("r", ["a"], 0)
    stored.fetch("s", ["a"], 0)
    assert store.reads == 2


def test_a_request_that_is_aborted_is_read_for_no_more():
    stored, store, taken = opened()
    written(store, "a")
    stored.fetch("r", ["a"], 0)
    assert stored.pop("r") == (0, None)
    store.arrive()
    assert store.counters.hits == 0
    assert finish(stored)
    assert taken == []


@pytest.mark.parametrize("why", ["raise", "cancel", "close"])
def test_a_read_that_failed_costs_a_prefill_and_nothing_else(why):
    stored, store, taken = opened()
    written(store, "a")
    stored.fetch("r", ["a"], 0)
    if why == "raise":
        store.storage.fault = "raise"
        store.arrive()
    if why == "cancel":
        store._reader.shutdown(cancel_futures=True)
    if why == "close":
        stored.close()
    assert finish(stored)
    assert taken == []
    assert stored.pop("r") == (0, None)


def test_what_takes_a_segment_in_may_fail_and_the_server_goes_on(caplog):
    """What was checked should not fail; but no file may end a scheduler."""
    stored, store, taken = opened(fails=["b"])
    written(store, "abc")
    stored.fetch("r", ["a", "b", "c"], 0)
    store.arrive()
    assert finish(stored)
    assert [name for name, *_ in taken] == ["a", "b"]
    assert stored.pop("r") == (TOKENS, 0)
    assert "cannot be used" in caplog.text
    assert store.counters.damaged == 1
    assert store.restore("b") is None, "it is not read again"


def test_a_segment_of_fewer_tokens_is_no_whole_segment():
    stored, store, taken = opened()
    short = {"tokens": TOKENS - 1}
    forge(store.storage, FINGERPRINT, "a", whole_of(1, TOKENS - 1), short)
    stored.fetch("r", ["a"], 0)
    store.arrive()
    assert finish(stored)
    assert taken == []
    assert store.counters.damaged == 1


# -- draft KV first -----------------------------------------------------------------


def drafted(names):
    """Return stored segments, their store, and a request whose draft KV was read."""
    stored, store, taken = opened()
    for seed, name in enumerate(names):
        assert store.put(name, pair_of(seed), KIVI)
    stored.draft_first = "r"
    stored.fetch("r", [*names, "missing"], 0)
    assert stored.drafted() == []
    assert not finish(stored)
    store.arrive()
    assert stored.drafted() == ["r"]
    assert not finish(stored), "it waits for its start"
    return stored, store, taken


def residual_key(store, name):
    (found,) = store._manifests.read([name])[0]
    return f"{FINGERPRINT.short}.{found.objects['residual'].digest}"


def test_draft_kv_comes_behind_that_of_other_requests():
    stored, store, _ = opened()
    written(store, "abc")
    stored.fetch("whole", ["c"], 0)
    alone_s = stored.draft_s(1, 0.25)
    assert alone_s == pytest.approx(stored.token_s * TOKENS / 4)
    assert stored.draft_s(2, 0.5) == pytest.approx(4 * alone_s)
    stored.draft_first = "r"
    stored.fetch("r", ["a", "b"], 0)
    assert stored.draft_s(1, 0.25) == pytest.approx(3 * alone_s)
    store.arrive()
    stored.pop("r")
    assert stored.draft_s(1, 0.25) == pytest.approx(stored.token_s * TOKENS / 4)


@pytest.mark.parametrize("later", [False, True])
def test_draft_kv_is_read_first_and_residual_kv_behind_all_other_reads(later):
    stored, store, taken = drafted("ab")
    names, found = stored.drafts_of("r")
    assert list(names) == ["a", "b", "missing"]
    assert [list(each.parts) for each in found] == [["draft"], ["draft"]]
    if later:
        stored.pop("r")  # for now it needs the draft KV alone
    rest = stored.start_early("r", found)
    assert stored.drafted() == []
    assert [stored.wants(name, split=True) for name in "ab"] == [False, False]
    stored.fetch("s", ["a"], 0)
    store.arrive()
    assert list(rest.arrived()) == [], "the other request's read comes first"
    store.arrive()
    assert finish(stored, "s")
    assert taken == [("a", None, ["draft", "residual"])]
    while store.reads:
        assert not rest.complete
        assert not rest.lost
        store.arrive()
        assert [list(each.parts) for _, each in rest.arrived()] == [["residual"]]
    assert rest.complete
    assert not rest.lost


@pytest.mark.parametrize("fault", ["missing", "damaged", "late", "closed", "ended"])
def test_residual_kv_that_does_not_come_is_lost(fault, monkeypatch):
    clock = Clock()
    for module in (stored_segments, fetches):
        monkeypatch.setattr(module, "time", clock)
    stored, store, _ = drafted("ab")
    key = residual_key(store, "b")
    if fault == "missing":
        del store.storage.objects[key]
    if fault == "damaged":
        store.storage.objects[key][-1] ^= 1
    rest = stored.start_early("r", stored.drafts_of("r")[1])
    store._reader.closed = fault == "closed"
    clock.now += stored_segments.LONGEST_S - 0.1
    store.arrive()
    assert [name for name, _ in rest.arrived()] == ["a"]
    clock.now += 0.2  # what has arrived gives the others their whole time again
    assert rest.lost is (fault == "closed")
    if fault == "late":
        clock.now += stored_segments.LONGEST_S + 0.1
    if fault == "ended":
        stored.pop("r")
    hits = store.counters.hits
    while store.reads and fault != "late":
        store.arrive()
    assert rest.lost
    assert not rest.complete
    assert store.counters.hits == hits


def test_a_request_that_does_not_start_early_is_fetched_whole(monkeypatch):
    """It is told so, or nothing has started it by the deadline."""
    clock = Clock()
    monkeypatch.setattr(stored_segments, "time", clock)
    for told in (True, False):
        stored, store, taken = drafted("ab")
        if told:
            stored.read_whole("r")
        else:
            clock.now += stored_segments.LONGEST_S + 0.1
        assert not finish(stored)
        assert stored.drafted() == []
        store.arrive()
        assert finish(stored)
        assert [name for name, *_ in taken] == ["a", "b"]


# -- several ranks ------------------------------------------------------------------


def test_ranks_take_in_what_every_one_of_them_has(monkeypatch):
    monkeypatch.setattr(stored_segments, "AHEAD_BYTES", 1600)
    ranks = [opened(), opened()]
    for (_, store, _), names in zip(ranks, ("abcde", "abc"), strict=True):
        written(store, names)
    for stored, *_ in ranks:
        stored.fetch("r", list("abcde"), 0)
    finished, slow = [False], 1
    while not finished[0]:
        ranks[1 - slow][1].arrive()
        counts = [stored.found("r") for stored, *_ in ranks]
        assert counts[slow] is None, "so all of them wait"
        ranks[slow][1].arrive()
        least = min(stored.found("r") for stored, *_ in ranks)
        finished = [stored.take("r", least) for stored, *_ in ranks]
        assert len(set(finished)) == 1
    for stored, _, taken in ranks:
        assert [name for name, *_ in taken] == ["a", "b", "c"]
        assert stored.changes()[-1] == ("d", False)
        assert stored.pop("r") == (3 * TOKENS, 0)


# -- how much is remembered ---------------------------------------------------------


def remembered(*holders):
    """Count what is in every collection of some objects."""
    return {
        f"{type(holder).__name__}.{name}": len(value)
        for holder in holders
        for name, value in vars(holder).items()
        if hasattr(value, "__len__")
        and not isinstance(value, str | tuple | torch.Tensor)
    }


@pytest.mark.parametrize("ends", ["forgotten", "kept", "unasked"])
def test_ten_thousand_segments_leave_nothing_behind(monkeypatch, ends):
    """Written by one half, fetched by the other; most of them never asked for again."""
    monkeypatch.setattr(stored_segments, "MOST_KNOWN", 500)
    monkeypatch.setattr(stored_segments, "MOST_FETCHES", 20)
    stored, store, _ = opened()
    before = remembered(stored, store)
    store.put = lambda name, parts, compressor: int(name) % 3 > 0
    store.restore = lambda name, compressors, only: None
    for at in range(5_000):
        name, rid = f"{2 * at}", f"r{at}"
        stored.write(name, {"whole": {}})
        store.announce()
        stored.fetch(rid, [f"{2 * at + 1}"], 0)
        store.arrive()
        if ends != "unasked":
            stored.changes()
            finish(stored, rid)
            stored.pop(rid)
        if ends == "forgotten":
            stored.forget(name)
    most = before | {"StoredSegments._changes": 1}
    if ends != "forgotten":
        most["StoredSegments._there"] = 500
    if ends == "unasked":
        most["StoredSegments._changes"] = 500
        most["StoredSegments._fetches"] = 20
        most["StoredSegments._writing"] = 1
    after = remembered(stored, store)
    assert {name: n for name, n in after.items() if n > most[name]} == {}
