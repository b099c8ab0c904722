"""A CUDA device that is not there: runs the code of a GPU, and says where it waits.

``open_device()`` has ``torch.cuda`` answer for one device. What runs meanwhile is the
code a GPU would run, on the host and at once: streams keep no order of their own (see
``memory/device_clock.py`` for that). Triton kernels do what their references do.
"""

import sys
import threading
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fake_kernels import replace_kernels
from fake_tensor import (
    COPIES,
    CUDA,
    INDEXED,
    ROOM,
    VIEWS,
    WAITS,
    DeviceTensor,
    Dispatch,
    Indexed,
    PinnedMemory,
    have_device_guard,
    held,
    tensors_in,
    why_copy_waits,
)
from sglang.srt.platforms import current_platform

from vericache_sglang.compression.codecs.turboquant import (
    coordinate_book,
    random_rotation,
)

ROOT = Path(__file__).parents[2]
OURS = tuple(
    f"{ROOT / folder}/"
    for folder in (
        "vericache_sglang",
        "kernels/vericache_kernels",
        "patches/vericache_patches",
    )
)
TESTS = f"{ROOT / 'tests'}/"
HARNESS = f"{Path(__file__).parent}/fake_"

LAUNCH_S = 5e-6
HOST_LAUNCH_S = 2e-5
"""What a launch takes on the device, and before it on the host."""
BYTES_PER_S = 4e12
"""What the device's clock takes for a launch, and for what it touches."""


class Wait(NamedTuple):
    """A place where the host waits for the device.

    Attributes:
        where: File and function of ours,
            ``runtime/in_flight.py::InFlightForward.outcome``.
        why: What it does.
        via: The function of SGLang that does it; "" where it is ours.
    """

    where: str
    why: str
    via: str = ""


class Stream:
    """A stream on which everything has run already."""

    cuda_stream = 0
    device = CUDA

    def __init__(self, device=None, priority=0):
        self.opened = []

    def wait_event(self, event):
        """Go on behind an event."""

    def wait_stream(self, stream):
        """Go on behind another stream."""

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def query(self):
        return True

    def synchronize(self):
        DeviceTensor.device_of_all.wait("stream")

    def __enter__(self):
        self.opened.append(DeviceTensor.device_of_all.on(self))
        self.opened[-1].__enter__()
        return self

    def __exit__(self, *raised):
        return self.opened.pop().__exit__(*raised)


class Event:
    """An event; the host waits for one that was recorded after its last wait.

    What it waited for has ended, and so has what was launched before, copies included.
    """

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self._timed = enable_timing
        self._at = self._waited = None

    def record(self, stream=None):
        device = DeviceTensor.device_of_all
        device.catch_up()
        self._at, self._waited = device.clock_s, len(device.reasons)

    def wait(self, stream=None):
        """Have a stream go on behind it."""

    def query(self):
        return True

    def synchronize(self):
        device = DeviceTensor.device_of_all
        if self._at is not None and self._waited == len(device.reasons):
            device.wait("event")

    def elapsed_time(self, end):
        if not (self._timed and end._timed) or None in (self._at, end._at):
            raise ValueError("both events must be recorded, with timing enabled")
        return 1e3 * (end._at - self._at)


class Cudart:
    """As ``torch.cuda.cudart()``: page-locks memory of the host."""

    def __init__(self, device):
        self._pinned = device.pinned

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        self._pinned.register(address, size)
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        self._pinned.unregister(address)
        return 0


class FakeDevice:
    """One device; what was launched on it, and what waited for it.

    Attributes:
        waits: By place of ours, how often the thread that opened it waited.
        reasons: Why it waited, wherever, tests included.
        launches: Names of what was launched, by whichever thread.
        clock_s: When the device has done what was launched, in seconds.
        host_s: When the host has launched it.
        pinned: Which host memory is page-locked.
    """

    def __init__(self):
        self.waits = Counter()
        self.reasons = []
        self.launches = []
        self.clock_s = self.host_s = 0.0
        self.pinned = PinnedMemory()
        self.mode = Dispatch(self)
        self._owner = threading.get_ident()
        self._local = threading.local()
        self._default = Stream()

    # -- what torch.cuda is asked -----------------------------------------------------

    def current_stream(self, device=None):
        return getattr(self._local, "stream", self._default)

    @contextmanager
    def on(self, stream):
        """Launch on a stream; a thread that does is the device's from then on."""
        before = self.current_stream()
        self._local.stream = stream or before
        try:
            with nullcontext() if self._is_owner else self.attached():
                yield
        finally:
            self._local.stream = before

    @contextmanager
    def attached(self):
        """Have what this thread does go to the device."""
        with Indexed(), self.mode:
            yield

    def synchronize(self, device=None):
        self.wait("device")

    @property
    def _is_owner(self):
        return threading.get_ident() == self._owner

    @contextmanager
    def noting(self):
        """Yield the waits of a block, once it has ended."""
        before, found = self.waits.copy(), Counter()
        yield found
        found.update(self.waits - before)

    # -- what happens -----------------------------------------------------------------

    def wait(self, why):
        """Note that the host waits, unless a thread beside the scheduler does."""
        if self._is_owner:
            self.host_s = max(self.host_s, self.clock_s)
            self.reasons.append(why)
            where, via = site()
            if where:
                self.waits[Wait(where, why, via)] += 1

    def launch(self, name, nbytes):
        """Note that something was launched that touches so many bytes."""
        self.launches.append(name)
        self.host_s += HOST_LAUNCH_S
        self.catch_up()
        self.clock_s += LAUNCH_S
        self.touch(nbytes)

    def catch_up(self):
        """Have an idle device begin what the host launches now."""
        self.clock_s = max(self.clock_s, self.host_s)

    def pause(self, cycles):
        """Have the device do nothing, at 2 GHz."""
        self.launch("_sleep", 0)
        self.clock_s += cycles / 2e9

    def touch(self, nbytes):
        """Let pass the time that bytes take."""
        self.clock_s += nbytes / BYTES_PER_S

    def dispatch(self, func, args, kwargs):
        """Run an operator on what its arguments hold.

        Raises:
            RuntimeError: CUDA would refuse tensors on both sides.
        """
        if _is_composite(func):
            with self.mode:
                return func.decompose(*args, **kwargs)
        name = func.overloadpacket.__name__
        tensors = tensors_in(args, kwargs)
        here = [each for each in tensors if isinstance(each, DeviceTensor)]
        target = kwargs.get("device")
        asked = target is not None and torch.device(target).type == "cuda"
        if name in ("is_pinned", "_pin_memory"):
            return self._pin(name, args[0])
        if not here and not asked:
            return self._on_host(func, args, kwargs)
        self._refuse_mixed(name, args, kwargs)
        self._note_waits(name, args, kwargs)
        given = held(kwargs)
        if asked:
            given["device"] = torch.device("cpu")
        given.pop("pin_memory", None)
        inner = held(args)
        found = func(*inner, **given)
        if name not in VIEWS and name not in ROOM:
            touched = tensors
            if name in INDEXED:  # only what is picked or put is read, and written
                moved = found if name == "index" else args[2]
                touched = [*tensors_in(args[1:2], {}), moved, moved]
            self.launch(name, sum(each.nbytes for each in touched))
        found = _outputs(found, (args, kwargs), (inner, given), asked or target is None)
        if name == "_to_copy" and kwargs.get("non_blocking") and not asked:
            self.pinned.pin(held(found))
        return found

    def _on_host(self, func, args, kwargs):
        """Run an operator of the CPU; memory may be asked to be pinned."""
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        made = func(*args, **{**kwargs, "pin_memory": False})
        self.pinned.pin(made)
        return made

    def _pin(self, name, tensor):
        if name == "is_pinned":
            return self.pinned.has(tensor)
        made = tensor.clone()
        self.pinned.pin(made)
        return made

    def _refuse_mixed(self, name, args, kwargs):
        """Refuse tensors of both sides, as CUDA does.

        Raises:
            RuntimeError: See above.
        """
        if name in COPIES:
            return
        if name in INDEXED and isinstance(args[0], DeviceTensor):
            args = (args[0], *args[2:])
        tensors = tensors_in(args, kwargs)
        here = [isinstance(each, DeviceTensor) for each in tensors]
        # Tensors without dimensions are numbers.
        if any(here) and not all(
            on or not each.dim() for on, each in zip(here, tensors, strict=True)
        ):
            raise RuntimeError(
                f"{name}: expected all tensors on the same device, found cuda:0 and cpu"
            )

    def _note_waits(self, name, args, kwargs):
        if name in WAITS:
            self.wait(WAITS[name])
        elif name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.wait("repeat_interleave")
        elif name in COPIES:
            self._note_copy(name, args, kwargs)
        elif name in INDEXED:
            # A number that is written where a mask says so is filled in.
            filled = len(args) > 2 and not isinstance(args[2], DeviceTensor)
            self._note_indices(args[1], filled)

    def _note_copy(self, name, args, kwargs):
        """Note that a copy between the two sides waits, if it does."""
        if name == "copy_":
            target, source = args[:2]
            later = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            up, dtype = isinstance(target, DeviceTensor), target.dtype
        else:
            source, device = args[0], kwargs.get("device")
            later, dtype = kwargs.get("non_blocking"), kwargs.get("dtype")
            there = isinstance(source, DeviceTensor)
            up = there if device is None else torch.device(device).type == "cuda"
            target = None
        down = isinstance(source, DeviceTensor)
        if up == down or not source.numel():
            return
        host = target if down else source
        why = why_copy_waits(
            down=down,
            # What ATen allocates for a copy to the host that may come later is pinned.
            pinned=bool(later) if host is None else self.pinned.has(host),
            direct=dtype in (None, source.dtype)
            and (host is None or host.is_contiguous()),
            non_blocking=later,
        )
        if why:
            self.wait(why)

    def _note_indices(self, indices, filled):
        for index in indices:
            if index is None:
                continue
            if not isinstance(index, DeviceTensor):
                self.wait("index from host")
            elif index.dtype in (torch.bool, torch.uint8) and not filled:
                self.wait("boolean index")


def _outputs(found, given, inner, stays):
    """Return an operator's results: arguments that it wrote to, or new tensors."""
    known = {
        id(was): outer
        for outer, was in zip(tensors_in(*given), tensors_in(*inner), strict=True)
    }

    def outer(result):
        if not isinstance(result, torch.Tensor):
            return result
        if id(result) in known:
            return known[id(result)]
        return DeviceTensor(result) if stays else result

    return torch.utils._pytree.tree_map(outer, found)


def _is_composite(func):
    """Say whether torch would take an operator apart before a device sees it."""
    return func.overloadpacket.__name__ not in VIEWS and (
        torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
        )
    )


def site():
    """Return our innermost function, and SGLang's inside of it; "" where a test's."""
    frame, via = sys._getframe(1), ""
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file.startswith(OURS):
            return f"{file.removeprefix(f'{ROOT}/')}::{code.co_qualname}", via
        if file.startswith(TESTS) and not file.startswith(HARNESS):
            return "", ""
        if "/sglang/" in file and not via:
            via = code.co_qualname
        frame = frame.f_back
    return "", ""


def refuse_stream(tensor, stream):
    """Refuse a tensor of the host; see ``DeviceTensor.record_stream``."""
    raise NotImplementedError("aten::record_stream: no kernel for the CPU")


@contextmanager
def open_device():
    """Have ``torch.cuda`` be a device of ours; yields it."""
    have_device_guard()
    forget_placed_tables()
    device = FakeDevice()
    answers = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": device.current_stream,
        "default_stream": device.current_stream,
        "stream": device.on,
        "synchronize": device.synchronize,
        "cudart": lambda: Cudart(device),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_sleep": device.pause,
        "get_device_capability": lambda device=None: (9, 0),
        "is_current_stream_capturing": lambda: False,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(torch.Tensor, "record_stream", refuse_stream)
        pins = "is_pin_memory_available"
        patch.setattr(current_platform, pins, lambda device=None: True)
        patch.setattr(DeviceTensor, "device_of_all", device)
        replace_kernels(patch, device)
        with device.attached():
            yield device
    forget_placed_tables()


def forget_placed_tables():
    """Have no table that a codec keeps on a device outlive that device."""
    for table in (coordinate_book, random_rotation):
        table.cache_clear()
