"""A CUDA device without the device: tensors on it, streams, events, and late work.

Nothing of ours is replaced. A ``DeviceTensor`` says that it is on ``cuda:0`` and holds
ordinary memory. Every operation on one is queued on the current stream and runs when
the device goes on, in an order of streams that is drawn: what no event orders runs in
any order. Memory that was freed is overwritten, pageable copies and reads by the host
wait and are noted, tensors of the host are refused where a GPU refuses them.

What is patched: ``torch.cuda``'s streams, events and host registration, and the launch
functions of our Triton kernels, which queue their torch reference.
"""

import ctypes
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pytest
import torch
from simulated_kernels import Cudart, kernels
from simulated_streams import Event, Stream
from simulated_tensors import (
    DEVICES,
    READS,
    Block,
    DeviceTensor,
    aten,
    bits_of,
    blueprint,
    inner,
    is_masked,
    is_tensor,
    move,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

STAYS = 64
"""Pieces of work, about, for which the streams keep their order."""


class Mode(TorchDispatchMode):
    """Catches what mentions the device without a tensor on it."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.is_pinned.default:
            return self.device.is_pinned(args[0])
        if func is aten._pin_memory.default:
            return self.device.pin(args[0].clone())
        if kwargs.get("pin_memory") and kwargs["device"].type == "cpu":
            return self.device.pin(func(*args, **{**kwargs, "pin_memory": False}))
        where = kwargs.get("device")
        if where is not None and torch.device(where).type == "cuda":
            return self.device.dispatch(func, args, kwargs)
        return func(*args, **kwargs)


class Device:
    """Streams and memory of one device.

    Args:
        seed: Of the order in which streams go on.
        in_order: Work runs as it is queued, as on a device with one stream: what a
            program computes then is what it means.

    Attributes:
        runs: Threads that wait make it go on; else the test's own does alone.
        now: Pieces of work done so far, taken for milliseconds.
        main: The stream that is current where none was chosen.
        late: A stream that goes on where no other one may.
        waits: Operations, by name, for which the host waited unasked.
        registered: Host memory registered now: bytes by address.
        locks: Most bytes that may be.
    """

    def __init__(self, seed=0, in_order=False):
        self.lock = threading.RLock()
        self.in_order, self.runs, self.closed, self.now = in_order, in_order, False, 0
        self.streams, self.waits, self.registered = [], [], {}
        self.locks = 1 << 30
        self._owner = threading.current_thread()
        self._random, self._local, self._pinned = Random(seed), threading.local(), []
        self._turns = []
        self.main, self.asynchronous = self.stream(), None

    # -- streams ------------------------------------------------------------------

    def stream(self, *_, **__):
        made = Stream(self, len(self.streams) + 1)
        self.streams.append(made)
        self._turns.insert(self._random.randrange(len(self.streams)), made)
        return made

    def current(self, device=None):
        return getattr(self._local, "stream", self.main)

    @contextmanager
    def on(self, stream):
        """As ``torch.cuda.stream``; a thread's first one lets it make tensors here."""
        before = self.current()
        self._local.stream = stream
        try:
            with self.mode():
                yield
        finally:
            self._local.stream = before

    @contextmanager
    def mode(self):
        if getattr(self._local, "inside", False):
            yield
            return
        self._local.inside = True
        try:
            with Mode(self):
                yield
        finally:
            self._local.inside = False

    def goes_on(self):
        return self.runs or threading.current_thread() is self._owner

    def step(self):
        """Do one piece of work of a stream that may go on; False: none may."""
        with self.lock:
            ready = [s for s in self.streams if s.work and s.work[0][0]()]
            if not ready:
                return False
            # A stream may starve for long: one that is a little late shows less.
            if self._random.random() < 1 / STAYS:
                self._random.shuffle(self._turns)
            stream = min(
                ready, key=lambda s: (s is self.asynchronous, self._turns.index(s))
            )
            _, does = stream.work.popleft()
            self.now += 1
            does()
            return True

    def run(self, pieces):
        """Do up to so many pieces of work."""
        return sum(self.step() for _ in range(pieces))

    def drain(self):
        """Do all there is.

        Raises:
            AssertionError: Streams wait for each other.
        """
        with self.lock:
            while self.step():
                pass
            assert not any(s.work for s in self.streams), "a deadlock"

    # -- memory -------------------------------------------------------------------

    def put(self, tensor):
        """Return a tensor of the device with these bytes; nothing is queued."""
        return self._wrap(tensor.clone())

    def look(self, tensor):
        """Return the bytes of a tensor as they are now; nothing is waited for."""
        return inner(tensor).clone()

    def pin(self, tensor):
        self._pinned.append(tensor)
        return tensor

    def is_pinned(self, tensor):
        if isinstance(tensor, DeviceTensor):
            return False
        at = tensor.data_ptr()
        ranges = [(t.data_ptr(), t.nbytes) for t in self._pinned]
        ranges += self.registered.items()
        return any(start <= at < start + size for start, size in ranges)

    def spoil(self, memory):
        """Overwrite memory that nothing has any more."""
        raw = memory.untyped_storage()
        torch.tensor([], dtype=torch.uint8).set_(raw).fill_(self._random.randrange(256))

    def _wrap(self, memory, block=None):
        return DeviceTensor(memory, block or Block(self, memory))

    def _fresh(self, plan):
        """Return memory for a planned tensor, with bytes of whatever was there."""
        stride = plan.stride() if plan.numel() else None
        made = torch.empty(plan.size(), dtype=plan.dtype)
        if stride is not None:
            made = torch.empty_strided(plan.size(), stride, dtype=plan.dtype)
        self.spoil(made)
        self.current().reuse()
        return self._wrap(made)

    # -- operations ---------------------------------------------------------------

    def kernel(self, does, *tensors):
        """Queue work over the memory of these tensors, as one launch does."""
        for each in tensors:
            if not isinstance(each, DeviceTensor) and not self.is_pinned(each):
                raise ValueError("Pointer argument cannot be accessed from Triton")
        held = [inner(each) for each in tensors]
        self.current().put(lambda: does(*held))

    def dispatch(self, func, args, kwargs):
        if func is aten.record_stream.default:
            stream = self.streams[args[1].stream_id - 1]
            args[0].block.recorded.append(stream)
            return None
        if func is aten._to_copy.default:
            return self._to(args[0], kwargs)
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        if self._is_view(func):
            return self._view(func, args, kwargs)
        tensors = [e for e in tree_flatten((args, kwargs))[0] if is_tensor(e)]
        self._check_places(func, tensors)
        if func in READS or is_masked(func, args):
            return self._wait(func, args, kwargs)
        if func._schema.is_mutable:
            given, named = tree_map(inner, (args, kwargs))
            self.current().put(lambda: func(*given, **named))
            return args[0]
        return self._compute(func, args, kwargs)

    @staticmethod
    def _is_view(func):
        returned = func._schema.returns
        aliased = returned and returned[0].alias_info
        return bool(aliased) and not aliased.is_write

    def _view(self, func, args, kwargs):
        own = args[0]
        given, named = tree_map(inner, (args, kwargs))
        made = func(*given, **named)
        return tree_map(lambda t: self._wrap(t, own.block) if is_tensor(t) else t, made)

    def _check_places(self, func, tensors):
        """Refuse what a GPU refuses: work over memory of the host, numbers apart."""
        for each in tensors:
            if not isinstance(each, DeviceTensor) and each.dim():
                raise RuntimeError(
                    f"{func}: expected all tensors to be on the same device, "
                    "found at least two devices, cuda:0 and cpu!"
                )

    def _wait(self, func, args, kwargs):
        self.waits.append(str(func))
        self.current().synchronize()
        found = func(*tree_map(inner, args), **tree_map(inner, kwargs))
        return tree_map(lambda t: self._wrap(t.clone()) if is_tensor(t) else t, found)

    def _compute(self, func, args, kwargs):
        plans = func(*tree_map(blueprint, args), **tree_map(blueprint, kwargs))
        results = tree_map(lambda t: self._fresh(t) if is_tensor(t) else t, plans)
        if func is aten.empty.memory_format or func is aten.empty_strided.default:
            return results
        given = tree_map(inner, args)
        named = {**tree_map(inner, kwargs)}
        if "device" in named:
            named["device"] = torch.device("cpu")
        places = [r.memory for r in tree_flatten(results)[0] if is_tensor(r)]

        def does():
            found = tree_flatten(func(*given, **named))[0]
            for place, value in zip(places, found, strict=True):
                bits_of(place).copy_(bits_of(value))

        self.current().put(does)
        return results

    def _to(self, source, kwargs):
        where = torch.device(kwargs.get("device") or source.device)
        dtype = kwargs.get("dtype") or source.dtype
        soon = kwargs.get("non_blocking", False)
        if where.type == "cpu":
            target = self.pin(torch.empty(source.size(), dtype=dtype))
            self._copy(target, source, soon)
            return target
        plan = torch.empty(source.size(), dtype=dtype, device="meta")
        target = self._fresh(plan)
        return self._copy(target, source, soon)

    def _copy(self, target, source, non_blocking=False):
        to, of = inner(target), inner(source)
        both = isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor)
        other = source if isinstance(target, DeviceTensor) else target
        if both or (non_blocking and self.is_pinned(other)):
            self.current().put(lambda: move(to, of))
        else:
            self.waits.append("copy of pageable memory" if non_blocking else "copy_")
            self.current().synchronize()
            move(to, of)
        return target


def guard_device():
    """Let torch's bindings guard a CUDA device in a build that knows of none.

    They look the guard up in a table of libc10 before an operator is dispatched; that
    of the CPU, which does nothing, is right here.
    """
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    name = "_ZN3c104impl26device_guard_impl_registryE"
    guards = (ctypes.c_void_p * 2).in_dll(ctypes.CDLL(str(library)), name)
    guards[1] = guards[1] or guards[0]


@contextmanager
def simulated(seed=0, in_order=False):
    """Have ``torch.cuda`` be a device of ours; what is left of its work runs last."""
    guard_device()
    device = Device(seed, in_order)
    cudart = Cudart(device)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, made in {
            "Stream": device.stream,
            "Event": lambda enable_timing=False: Event(device),
            "current_stream": device.current,
            "stream": device.on,
            "cudart": lambda: cudart,
            "is_available": lambda: True,
            "_lazy_init": lambda: None,
        }.items():
            patch.setattr(torch.cuda, name, made)
        for name, module in kernels(device).items():
            patch.setitem(sys.modules, name, module)
        DEVICES.append(device)
        stack.callback(DEVICES.remove, device)
        stack.enter_context(device.mode())
        try:
            yield device
            device.drain()
        finally:
            device.closed = True


def until(condition, seconds=120.0):
    """Wait for a thread of ours."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "a thread never got there"
        time.sleep(1e-4)
