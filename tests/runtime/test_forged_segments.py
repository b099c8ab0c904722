"""Whatever a file of the store says, with valid seals: it is used or prefilled."""

import json
import os
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from segment_world import (
    IDENTITY,
    KEPT,
    SHORT,
    SegmentWorld,
    attach_store,
    fetched,
    shorten_segments,
)
from storages import MemoryStorage, forge

from vericache_sglang.prefix_cache.store.objects import encode

pytestmark = pytest.mark.sglang

MODEL, COMPRESSOR = IDENTITY
EXAMPLES = 10_000 if os.environ.get("VERICACHE_THOROUGH") else 300


@pytest.fixture(autouse=True, scope="module")
def short_segments():
    with pytest.MonkeyPatch.context() as patch:
        shorten_segments(patch)
        patch.setattr(SegmentWorld, "nans", False)
        yield


def parts_of(split):
    """Return the objects of segment ``a`` as a server writes them, and its truth."""
    world = SegmentWorld()
    if split:
        world.split("a")
        draft, residual = map(dict, world.copies.read_parts("a"))
        return {"draft": draft, "residual": residual}, world.truth("a")
    slots = world.write_text(["a"])
    return {"whole": world.copies.read_whole(slots)}, world.truth("a")


def arrived(storage, name="a"):
    """Have another server fetch a segment, by the calls SGLang makes."""
    world = SegmentWorld()
    store = attach_store(world.segments, storage)
    world.segments.kept = KEPT
    world.segments.stored.fetch("r", [name], 0)
    store.arrive()
    assert fetched(world.segments, "r")
    return world, store


def use(world, store):
    """Restore what came; return its bits, or None where it is to be prefilled."""
    tokens, _ = world.segments.stored.pop("r")
    assert world.segments.reach(["a"], 0) == tokens
    world.segments.check()
    if not tokens:
        assert world.page_pool.used_bytes == 0
        return None
    assert store.counters.damaged == 0
    target = world.take(SHORT)
    assert world.segments.restore(["a"], 0, target) == []
    return world.at(target)


def test_draft_kv_without_kept_positions_is_prefilled():
    """It ended the server with a KeyError, once."""
    objects, _ = parts_of(split=True)
    del objects["draft"]["kept"]
    storage = MemoryStorage()
    forge(storage, MODEL, "a", objects, {"compressor": COMPRESSOR, "kept": KEPT})
    world, store = arrived(storage)
    assert store.counters.damaged == 1
    assert use(world, store) is None


@pytest.mark.parametrize("split", [False, True])
def test_what_is_forged_here_is_used_as_long_as_nothing_is_changed(split):
    objects, truth = parts_of(split)
    storage = MemoryStorage()
    said = {"compressor": COMPRESSOR, "kept": KEPT} if split else {}
    forge(storage, MODEL, "a", objects, said)
    assert torch.equal(use(*arrived(storage)), truth)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "place", ["whole keys", "whole values", "draft keys", "residual values"]
)
def test_kv_that_is_not_finite_is_prefilled(place, wrong):
    """Well sealed: a writer that has no key needs none where the reader has none."""
    part, name = place.split()
    objects, _ = parts_of(split=part != "whole")
    tensors = objects[part] = dict(objects[part])
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[3] = wrong
    storage = MemoryStorage()
    said = {"compressor": COMPRESSOR, "kept": KEPT} if part != "whole" else {}
    forge(storage, MODEL, "a", objects, said)
    world, store = arrived(storage)
    assert store.counters.damaged == 1
    assert use(world, store) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(["keys", "values", "kept", "noted", "t", ""])
DTYPES = st.sampled_from(["F32", "I32", "U8", "BF16", "F16", "I64", 3])
SIZES = st.sampled_from([-1, 0, 1, 2, KEPT, SHORT - KEPT, 4, SHORT, 2**31, 2**63])
ROW = st.fixed_dictionaries(
    {},
    optional={
        "dtype": DTYPES,
        "shape": st.lists(SIZES, max_size=5) | JSON,
        "data_offsets": st.lists(st.integers(0, 700), min_size=2, max_size=2).map(
            sorted
        )
        | st.lists(st.integers(-8, 3000), max_size=3)
        | JSON,
    },
)
SAID = st.fixed_dictionaries(
    {},
    optional={
        "tokens": SIZES | JSON,
        "kept": SIZES | JSON,
        "compressor": st.sampled_from(["", COMPRESSOR, "another"]) | JSON,
        "objects": JSON,
        "name": st.sampled_from(["a", "b", 7]),
        "model": JSON,
    },
)


@st.composite
def changed_objects(draw, tensors):
    """Return an object of which something is changed, sealed anew."""
    data = encode(tensors).numpy().tobytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    kind = draw(st.sampled_from(["row", "gone", "header", "body", "length", "bytes"]))
    if kind == "bytes":
        return draw(st.binary(max_size=200))
    if kind == "row":
        name = draw(NAMES)
        header[name] = header.get(name, {}) | draw(ROW)
    if kind == "gone":
        header.pop(draw(NAMES), None)
    if kind == "body":
        for _ in range(draw(st.integers(1, 8))):
            body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    text = json.dumps(draw(JSON) if kind == "header" else header).encode()
    if kind == "length":
        length = draw(st.integers(0, 2**64 - 1) | st.integers(0, 2 * len(text)))
        return struct.pack("<Q", length) + text + bytes(body)
    return struct.pack("<Q", len(text)) + text + bytes(body)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data(), split=st.booleans())
def test_no_file_ends_the_server(data, split):
    """Changed headers, payloads and manifests: each is used whole, or prefilled."""
    objects, _ = parts_of(split)
    said = {"compressor": COMPRESSOR, "kept": KEPT} if split else {}
    changed = data.draw(st.sets(st.sampled_from([*objects, "manifest"]), min_size=1))
    if "manifest" in changed:
        said |= data.draw(SAID)
    forged = {
        part: data.draw(changed_objects(ts)) if part in changed else ts
        for part, ts in objects.items()
    }
    storage = MemoryStorage()
    forge(storage, MODEL, "a", forged, said)
    world, store = arrived(storage)
    found = use(world, store)
    if found is not None:  # nothing but KV was changed: a forger's own, in its place
        assert found.shape == world.truth("a").shape
