"""What the device that is not there refuses, and what it says waits, as CUDA does."""

import threading

import pytest
import torch
from fake_cuda import Wait, open_device
from fake_tensor import DeviceTensor

from vericache_kernels.head_entries import pick_entries
from vericache_sglang.device.upload import upload
from vericache_sglang.prefix_cache.segment_slots import SegmentSlots


@pytest.fixture
def device():
    with open_device() as made:
        yield made


def on_device(*shape, **options):
    return torch.zeros(*shape, device="cuda", **options)


WAITING = {
    "item": (lambda t: t[0, 0].item(), ["item"]),
    "bool": (lambda t: bool(t.any()), ["item"]),
    "int": (lambda t: int(t.sum()), ["item"]),
    "tolist": (lambda t: t.tolist(), ["tolist"]),
    "nonzero": (lambda t: t.nonzero(), ["nonzero"]),
    "mask": (lambda t: t[t > 0], ["boolean index"]),
    "mask written": (lambda t: t.__setitem__(t > 0, 1.0), []),
    "unique": (lambda t: t.unique(), ["unique"]),
    "equal": (lambda t: torch.equal(t, t), ["equal"]),
    "cpu": (lambda t: t.cpu(), ["copy to host, pageable"]),
    "cpu later": (lambda t: t.to("cpu", non_blocking=True), []),
    "cpu later, another dtype": (
        lambda t: t.to("cpu", torch.float64, non_blocking=True),
        ["copy to host, through a temporary"],
    ),
    "into pageable": (
        lambda t: torch.zeros(2, 3).copy_(t, non_blocking=True),
        ["copy to host, pageable"],
    ),
    "into pinned": (
        lambda t: torch.zeros(2, 3, pin_memory=True).copy_(t, non_blocking=True),
        [],
    ),
    "into pinned at once": (
        lambda t: torch.zeros(2, 3, pin_memory=True).copy_(t),
        ["copy to host, blocking"],
    ),
    "from pageable": (
        lambda t: t.copy_(torch.zeros(2, 3), non_blocking=True),
        ["copy from host, pageable"],
    ),
    "from pinned": (
        lambda t: torch.zeros(2, 3).pin_memory().to("cuda", non_blocking=True),
        [],
    ),
    "from pinned, turned": (
        lambda t: t.copy_(torch.zeros(3, 2).pin_memory().t(), non_blocking=True),
        ["copy from host, through a temporary"],
    ),
    "torch.tensor": (
        lambda t: torch.tensor([1, 2], device="cuda"),
        ["copy from host, pageable"],
    ),
    "new_tensor": (lambda t: t.new_tensor([1.0]), ["copy from host, pageable"]),
    "index from host": (lambda t: t[torch.tensor([0])], ["index from host"]),
    "a list as an index": (lambda t: t[[0, 1]], ["index from host"]),
    "repeats on the device": (
        lambda t: t.repeat_interleave(torch.ones_like(t[:, 0], dtype=torch.int64), 0),
        ["repeat_interleave"],
    ),
    "stream": (lambda t: torch.cuda.Stream().synchronize(), ["stream"]),
    "device": (lambda t: torch.cuda.synchronize(), ["device"]),
    "arithmetic": (lambda t: (t * 2 + 1) @ t.new_ones(3), []),
    "a scalar of the host": (lambda t: t + torch.tensor(2.0), []),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WAITING)
def test_waits_are_found(device, name, inference):
    does, why = WAITING[name]
    with torch.inference_mode(inference):
        tensor = on_device(2, 3)
        before = len(device.reasons)
        does(tensor)
    assert device.reasons[before:] == why
    assert not device.waits, "those of tests are nobody's"


def test_a_wait_is_that_of_our_innermost_function(device):
    tables = on_device(4, 2, dtype=torch.int64)
    slots = SegmentSlots(9, "cuda")
    with device.noting() as found:
        slots.leave(tables[0])
    where = "vericache_sglang/prefix_cache/segment_slots.py::SegmentSlots.leave"
    assert found == {Wait(where, "tolist"): 1}
    with device.noting() as found:
        upload("cuda", [1, 2], [3])
    assert not found


def test_other_threads_wait_for_themselves(device):
    tensor = on_device(2)
    thread = threading.Thread(target=tensor.tolist)
    thread.start()
    thread.join()
    assert not device.reasons


REFUSED = {
    "arithmetic": lambda t: t + torch.ones(3),
    "a tensor of the host with an index of the device": (
        lambda t: torch.zeros(3)[torch.zeros(1, dtype=torch.int64, device="cuda")]
    ),
    "written values": lambda t: t.__setitem__(torch.tensor([0]), torch.ones(1, 3)),
    "concatenation": lambda t: torch.cat([t, torch.zeros(1, 3)]),
    "where": lambda t: torch.where(t > 0, t, torch.zeros(2, 3)),
    "equal": lambda t: torch.equal(t, torch.zeros(2, 3)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_of_both_sides_are_refused(device, name):
    with pytest.raises(RuntimeError, match=r"same device|cuda:0 and cpu"):
        REFUSED[name](on_device(2, 3))


def test_numpy_and_streams_of_tensors_of_the_host_are_refused(device):
    with pytest.raises(TypeError, match="numpy"):
        on_device(2).numpy()
    with pytest.raises(NotImplementedError, match="record_stream"):
        torch.zeros(2).record_stream(torch.cuda.Stream())
    on_device(2).record_stream(torch.cuda.Stream())


def test_numbers_are_right_and_views_share_them(device):
    tensor = torch.arange(12, device="cuda").view(3, 4)
    tensor[1:, 2] += 100
    assert tensor.t()[2].tolist() == [2, 106, 110]
    assert (tensor.device, tensor.is_cuda) == (torch.device("cuda", 0), True)
    assert torch.equal(tensor.cpu(), torch.tensor(tensor.tolist()))
    assert tensor.to("cuda") is tensor
    assert torch.zeros_like(tensor).device == tensor.new_ones(1).device == tensor.device


def test_kernels_are_launched_once_and_do_what_their_reference_does(device):
    side = torch.randn(5, 2, 4, device="cuda")
    index = torch.tensor([[0, 3], [4, 1]], device="cuda")
    device.launches.clear()
    (found,) = pick_entries([side], index)
    assert device.launches == ["entries_kernel"]
    side, index = side.cpu(), index.cpu()
    assert torch.equal(found.cpu(), pick_entries([side], index)[0])


def test_events_tell_what_the_device_has_worked(device):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    tensor = on_device(1000, 1000)
    begin.record()
    tensor += 1
    end.record()
    # It was idle, and so waited for the host to launch.
    assert begin.elapsed_time(end) > 20e-3
    torch.cuda._sleep(1_000_000)
    begin.record()
    tensor += 1
    end.record()
    assert begin.elapsed_time(end) == pytest.approx(6e-3, rel=0.01)
    with pytest.raises(ValueError, match="enabled"):
        begin.elapsed_time(torch.cuda.Event())
    assert begin.query()


def test_an_event_is_waited_for_unless_the_host_has_waited_since(device):
    early, late = torch.cuda.Event(), torch.cuda.Event()
    early.record()
    torch.cuda.current_stream().synchronize()
    late.record()
    for event in (early, late, late):
        event.synchronize()
    assert device.reasons == ["stream", "event"]


def test_another_thread_may_launch_once_it_has_a_stream(device):
    made = []

    def launch():
        with torch.cuda.stream(torch.cuda.Stream()):
            made.append(torch.zeros(2, pin_memory=True).to("cuda", non_blocking=True))

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert isinstance(made[0], DeviceTensor)


def test_afterwards_torch_is_as_it_was():
    before = torch.cuda.Stream, torch.cuda.is_available()
    with open_device():
        assert torch.cuda.is_available()
    assert (torch.cuda.Stream, torch.cuda.is_available()) == before
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")
