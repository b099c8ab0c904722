"""Entries arrive as they left; cancelled and damaged copies never pass for good."""

import time

import pytest
import torch

from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.host_image import CopyTarget
from vericache_sglang.kv.link import Link
from vericache_sglang.kv.residual import RawResidual
from vericache_sglang.kv.segmented_residual import SegmentedResidual
from vericache_sglang.kv.staging import Lease, Span, StagingBuffer
from vericache_sglang.kv.swapped import SwappedImage, gathered
from vericache_sglang.kv.thread_transfers import ThreadTransfers
from vericache_sglang.kv.transfers import open_transfers

LAYERS, POOL = 3, 64
DTYPES = [torch.float32, torch.bfloat16]
SLOW = 1e-9
"""GB/s at which one layer of the complement below takes twenty minutes."""


def geometry(dtype):
    return KVGeometry(
        layers=LAYERS,
        kv_heads=2,
        head_dim=4,
        v_head_dim=6,
        element_bytes=dtype.itemsize,
        page_size=1,
    )


def scramble(tensor, seed):
    """Random bits, NaN payloads included."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (tensor.nbytes,), generator=generator)
    tensor.view(torch.uint8).view(-1).copy_(raw)
    return tensor


def new_residual(dtype, seed=1):
    return filled(RawResidual(geometry(dtype), 16, 4, dtype), seed)


def filled(made, seed):
    scramble(made.keys, seed)
    scramble(made.values, seed + 1)
    for layer in range(LAYERS):
        made.seal(layer)
    return made


def new_pool(dtype, seed=None):
    shapes = [(POOL, 2, 4)] * LAYERS, [(POOL, 2, 6)] * LAYERS
    keys, values = ([torch.zeros(s, dtype=dtype) for s in kind] for kind in shapes)
    if seed is not None:
        for i, buffer in enumerate([*keys, *values]):
            scramble(buffer, seed + i)
    return keys, values


def rows(tensor):
    """Every slot's bytes, as Python integers."""
    return tensor.view(torch.uint8).flatten(1).tolist()


def wait(transfer, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not transfer.done():
        assert time.monotonic() < deadline, "the copy never finished"
        time.sleep(0.001)


@pytest.fixture
def links():
    """Open transfers that are closed at the end of the test."""
    opened = []

    def open_link(pool, gbps=0.0):
        opened.append(ThreadTransfers(*pool, gbps))
        return opened[-1]

    yield open_link
    for link in opened:
        link.close()


def whole(start, slots=16):
    return Lease((Span(start, slots),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "pieces",
    [
        [(40, 16)],
        [(0, 16)],
        [(48, 16)],
        [(3, 5), (20, 1), (30, 10)],
        [(i, 1) for i in range(0, 48, 3)],
        [(4, 8), (32, 16)],
    ],
    ids=["span", "first", "last", "pieces", "single slots", "larger lease"],
)
def test_every_layer_arrives_in_its_pieces(dtype, pieces, links):
    residual, pool = new_residual(dtype), new_pool(dtype, seed=70)
    lease = Lease(tuple(Span(*piece) for piece in pieces))
    places = [slot for start, n in pieces for slot in range(start, start + n)][:16]
    expected = []
    for buffers, source in zip(pool, (residual.keys, residual.values), strict=True):
        for buffer, arriving in zip(buffers, source, strict=True):
            wanted = rows(buffer)
            for place, entry in zip(places, rows(arriving), strict=True):
                wanted[place] = entry
            expected.append(wanted)
    transfer = links(pool).start(residual, lease, None)
    wait(transfer)
    assert [rows(buffer) for buffers in pool for buffer in buffers] == expected
    assert transfer.nbytes == residual.keys.nbytes + residual.values.nbytes
    assert transfer.seconds > 0


@pytest.mark.parametrize("counts", [(16,), (5, 11), (1, 7, 4, 4)])
def test_segments_arrive_one_behind_the_other(counts, links):
    made = [
        filled(RawResidual(geometry(torch.float32), n, 4, torch.float32), n)
        for n in counts
    ]
    pool = new_pool(torch.float32, seed=70)
    before = [rows(buffer) for buffers in pool for buffer in buffers]
    pieces = Lease((Span(3, 5), Span(20, 1), Span(30, 12)))
    wait(links(pool).start(SegmentedResidual(made), pieces, None))
    places = [*range(3, 8), 20, *range(30, 40)]
    sides = [[each.keys for each in made], [each.values for each in made]]
    after = [
        rows(torch.cat([side[layer] for side in sides[kind]]))
        for kind in range(2)
        for layer in range(LAYERS)
    ]
    for expected, entries in zip(before, after, strict=True):
        for place, entry in zip(places, entries, strict=True):
            expected[place] = entry
    assert [rows(buffer) for buffers in pool for buffer in buffers] == before


def test_a_fragmented_region_still_stages(links):
    region = StagingBuffer(0, POOL, 4)
    leases = [region.take(4) for _ in range(POOL // 4)]
    for lease in leases[::2]:
        region.give(lease)
    lease = region.take(16)
    residual, pool = new_residual(torch.float32), new_pool(torch.float32)
    wait(links(pool).start(residual, lease, None))
    listed = [slot for p in lease.pieces for slot in range(p.start, p.end)]
    for layer in range(LAYERS):
        assert rows(pool[0][layer][listed]) == rows(residual.keys[layer])
        assert rows(pool[1][layer][listed]) == rows(residual.values[layer])


def test_a_full_region_or_a_small_lease_starts_nothing(links):
    region = StagingBuffer(0, 20)
    assert region.take(16)
    assert region.take(16) is None
    pool = new_pool(torch.float32)
    with pytest.raises(InvariantError, match="16 slots in a lease of 4"):
        links(pool).start(new_residual(torch.float32), region.take(4), None)
    assert not any(buffer.any() for buffers in pool for buffer in buffers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_saved_is_sealed_and_comes_back(dtype, links):
    pool = new_pool(dtype, seed=5)
    link = links(pool)
    before, after = torch.tensor([9, 1, 33, 62, 0]), torch.tensor([2, 40, 39, 1, 63])
    image = SwappedImage(geometry(dtype), 5, dtype)
    swapped = [rows(buffer[before]) for buffers in pool for buffer in buffers]
    saved = link.save(gathered(*pool, before), image)
    assert saved.done()
    assert image.sealed
    assert saved.nbytes == image.nbytes
    assert saved.seconds > 0
    for i, buffer in enumerate(b for buffers in pool for b in buffers):
        scramble(buffer, 200 + i)  # the slots are somebody else's now
    untouched = [slot for slot in range(POOL) if slot not in after.tolist()]
    others = [rows(buffer[untouched]) for buffers in pool for buffer in buffers]
    restored = link.load(image, CopyTarget(after))
    wait(restored)
    assert [rows(b[after]) for buffers in pool for b in buffers] == swapped
    assert [rows(b[untouched]) for buffers in pool for b in buffers] == others
    assert restored.nbytes == image.nbytes


def test_blocks_are_asked_for_one_layer_at_a_time(links):
    pool = new_pool(torch.float32)
    image = SwappedImage(geometry(torch.float32), 2, torch.float32)
    log = []

    def blocks():
        for layer in range(LAYERS):
            log.append((layer, [s is not None for s in image.checksums]))
            yield torch.full((2, 2, 4), layer), torch.full((2, 2, 6), -layer)
        log.append("end")

    links(pool).save(((k.float(), v.float()) for k, v in blocks()), image)
    assert log == [
        (0, [False, False, False]),
        (1, [True, False, False]),
        (2, [True, True, False]),
        "end",
    ]
    assert image.keys[:, 1, 1, 3].tolist() == [0, 1, 2]
    assert image.values[:, 1, 1, 5].tolist() == [0, -1, -2]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [(LAYERS - 1, "2 layers to save of 3"), (LAYERS + 1, "more than 3 layers to save")],
)
def test_a_wrong_number_of_layers_is_not_saved(pairs, message, links):
    image = SwappedImage(geometry(torch.float32), 2, torch.float32)
    blocks = [(torch.zeros(2, 2, 4), torch.zeros(2, 2, 6))] * pairs
    with pytest.raises(InvariantError, match=message):
        links(new_pool(torch.float32)).save(blocks, image)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_damage_is_noticed_and_a_second_try_can_succeed(dtype, part, layer, links):
    residual, pool = new_residual(dtype), new_pool(dtype)
    link = links(pool)
    byte = getattr(residual, part).view(torch.uint8)[layer, 3, 1]
    byte[0] ^= 1
    transfer = link.start(residual, whole(0), None)
    for _ in range(2):  # it stays failed
        with pytest.raises(TransferError, match=f"checksum differs in layer {layer}"):
            wait(transfer)
    assert transfer.seconds == 0.0
    assert not pool[0][layer].any(), "a damaged layer reaches no slot"
    transfer.cancel()
    byte[0] ^= 1
    again = link.start(residual, whole(0), None)
    wait(again)
    assert rows(pool[1][layer][:16]) == rows(residual.values[layer])


def test_a_damaged_swapped_image_is_not_restored(links):
    pool = new_pool(torch.float32, seed=5)
    image = SwappedImage(geometry(torch.float32), 4, torch.float32)
    for layer, pair in enumerate(gathered(*pool, torch.arange(4))):
        image.write(layer, *pair)
    image.values[1].view(torch.uint8)[0, 0, 0] ^= 16
    with pytest.raises(
        TransferError, match="swapped image checksum differs in layer 1"
    ):
        wait(links(pool).load(image, CopyTarget(torch.arange(8, 12))))


def test_a_copy_that_raises_names_its_layer(links):
    residual, pool = new_residual(torch.float32), new_pool(torch.float32)
    pool[0][1] = torch.zeros(40, 2, 4)
    link = links(pool)
    transfer = link.start(residual, whole(40), None)
    with pytest.raises(TransferError, match="copying layer 1 failed: could not broad"):
        wait(transfer)
    wait(link.start(residual, whole(20), None))  # the link goes on


def test_bookings_follow_each_other():
    link = Link(2.0)
    assert link.book(10**9, asked=5.0) == (5.0, 5.5)
    assert link.book(10**9, asked=5.1) == (5.5, 6.0)
    assert link.book(10**9, asked=7.0) == (7.0, 7.5)
    assert Link(0.0).book(10**9, asked=5.0) == (5.0, 5.0)


def test_an_emulated_link_takes_its_time(links):
    residual, seconds = new_residual(torch.float32), 0.15
    nbytes = residual.keys.nbytes + residual.values.nbytes
    link = links(new_pool(torch.float32), nbytes / seconds / 1e9)
    began = time.perf_counter()
    transfer = link.start(residual, whole(0), None)
    wait(transfer)
    assert time.perf_counter() - began >= seconds
    assert transfer.seconds >= seconds * 0.999


def test_saving_does_not_wait_for_the_link(links):
    pool = new_pool(torch.float32, seed=5)
    image = SwappedImage(geometry(torch.float32), 16, torch.float32)
    saved = links(pool, SLOW).save(gathered(*pool, torch.arange(16)), image)
    assert image.sealed
    assert not saved.done(), "its bytes take minutes"
    assert saved.seconds == 0.0
    saved.cancel()


def test_both_directions_share_one_link(links):
    residual, seconds = new_residual(torch.float32), 0.1
    pool = new_pool(torch.float32)
    nbytes = residual.keys.nbytes + residual.values.nbytes
    link = links(pool, nbytes / seconds / 1e9)
    image = SwappedImage(geometry(torch.float32), 16, torch.float32)
    began = time.perf_counter()
    saved = link.save(gathered(*pool, torch.arange(16)), image)
    first = link.start(residual, whole(0), None)
    second = link.start(residual, whole(16), None)
    for position, transfer in enumerate((saved, first, second), start=1):
        wait(transfer)
        assert time.perf_counter() - began >= position * seconds
        assert transfer.seconds >= seconds * 0.999


def test_cancelling_a_running_copy_returns_when_nothing_writes_any_more(links):
    residual, pool = new_residual(torch.float32), new_pool(torch.float32)
    transfer = links(pool, SLOW).start(residual, whole(0), None)
    while not pool[1][0].any():
        time.sleep(0.001)
    transfer.cancel()
    assert not pool[0][1].any(), "no later layer was begun, nor its pace waited for"
    pool[0][0].zero_()
    time.sleep(0.01)
    assert not any(buffer.any() for buffer in pool[0])
    with pytest.raises(TransferError, match="cancelled in layer 0"):
        transfer.done()
    transfer.cancel()


def test_a_cancelled_copy_that_had_not_begun_wrote_nothing(links):
    residual, pool = new_residual(torch.float32), new_pool(torch.float32)
    link = links(pool, SLOW)
    running = link.start(residual, whole(0), None)
    behind = link.start(residual, whole(20), None)
    behind.cancel()
    with pytest.raises(TransferError, match="cancelled before layer 0"):
        behind.done()
    running.cancel()
    assert not pool[0][0][20:36].any()


def test_closing_drops_what_waits():
    residual, pool = new_residual(torch.float32), new_pool(torch.float32)
    link = ThreadTransfers(*pool, SLOW)
    running, waiting = (link.start(residual, whole(i), None) for i in (0, 20))
    running.cancel()
    waiting.cancel()
    link.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        link.start(residual, whole(0), None)


def test_a_pool_on_the_cpu_gets_a_thread():
    opened = open_transfers(*new_pool(torch.float32), 0.0)
    assert isinstance(opened, ThreadTransfers)
    opened.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cuda_device_saves_stages_and_restores(dtype):
    pool = tuple([b.cuda() for b in kind] for kind in new_pool(dtype, seed=5))
    link = open_transfers(*pool, 0.0)
    residual, lease = new_residual(dtype), Lease((Span(3, 6), Span(40, 10)))
    staged = link.start(residual, lease, None)
    wait(staged)
    places = torch.tensor([*range(3, 9), *range(40, 50)], device="cuda")
    image = SwappedImage(geometry(dtype), 16, dtype)
    saved = link.save(gathered(*pool, places), image)
    wait(saved)
    after = torch.arange(20, 36, device="cuda")
    restored = link.load(image, CopyTarget(after))
    wait(restored)
    for layer in range(LAYERS):
        assert rows(image.keys[layer]) == rows(residual.keys[layer])
        assert rows(pool[1][layer][after].cpu()) == rows(residual.values[layer])
    for transfer in (staged, saved, restored):
        assert transfer.nbytes == image.nbytes
        assert transfer.seconds > 0
    residual.keys[1].view(torch.uint8)[0, 0, 0] ^= 1
    damaged = link.start(residual, lease, None)
    with pytest.raises(TransferError, match="checksum differs in layer 1"):
        wait(damaged)
    damaged.cancel()
    link.close()
