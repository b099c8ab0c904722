"""Tensors of a CUDA device that is not there: their numbers lie in host memory.

``torch.device("cuda")`` is what they say, and what the dispatcher believes. Every
operator on them arrives at ``DeviceTensor.__torch_dispatch__``, so it can be counted,
refused as CUDA would refuse it, or found to wait. Unlike torch's own fake tensors they
have contents: what the host reads is right, and a test may go on behind a wait.
"""

import ctypes
import os
import threading

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

CUDA = torch.device("cuda", 0)

VIEWS = {
    *("alias", "as_strided", "detach", "diagonal", "expand", "permute", "select"),
    *("slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind"),
    *("unfold", "unsqueeze", "view", "_unsafe_view", "_reshape_alias", "lift_fresh"),
}
"""Operators that launch nothing: they say where numbers are."""

ROOM = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operators that only take memory."""

WAITS = {
    "_local_scalar_dense": "item",
    "nonzero": "nonzero",
    "masked_select": "boolean index",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "bincount": "bincount",
    "equal": "equal",
    "multinomial": "multinomial",
}
"""Operators whose result, or whose size, the host reads."""

COPIES = {"copy_", "_to_copy"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operators whose indices CUDA takes from the host, too."""


def have_device_guard():
    """Let torch's bindings guard a CUDA device in a build that knows of none.

    They look the guard up in a table of libc10 before an operator is dispatched. That
    of the CPU does nothing, which is right here, but it knows of no current device: see
    ``Indexed``.
    """
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    library = ctypes.CDLL(os.path.join(folder, "libc10.so"))
    name = "_ZN3c104impl26device_guard_impl_registryE"
    guards = (ctypes.c_void_p * 2).in_dll(library, name)
    guards[1] = guards[1] or guards[0]


class DeviceTensor(torch.Tensor):
    """A tensor on the device; ``held`` has its numbers."""

    device_of_all = None
    """The ``FakeDevice`` that is open."""

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=CUDA,
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls.device_of_all.dispatch(func, args, kwargs or {})

    def __repr__(self):
        return f"DeviceTensor({self.held})"

    def tolist(self):
        DeviceTensor.device_of_all.wait("tolist")
        return self.held.tolist()

    def numpy(self, *, force=False):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def data_ptr(self):
        return self.held.data_ptr()

    def is_pinned(self, device=None):
        return False

    def record_stream(self, stream):
        """Keep its memory for another stream; tensors of the host know of none."""

    def new_tensor(self, data, **options):
        return torch.tensor(data, **({"device": CUDA, "dtype": self.dtype} | options))


def held(tree):
    """Replace every device tensor in nested containers by what it holds."""
    return tree_map(lambda x: x.held if isinstance(x, DeviceTensor) else x, tree)


class Dispatch(TorchDispatchMode):
    """Sends every operator of a thread to the device, those of the CPU as well."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.device.dispatch(func, args, kwargs or {})


class Indexed(TorchFunctionMode):
    """Names the device by its index, and has what Python holds copied to it.

    ``torch.tensor`` and lists as indices go around the dispatcher.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        args = [_indexed(each) for each in args]
        kwargs = {name: _indexed(each) for name, each in kwargs.items()}
        if func is torch.Tensor.cuda:
            func, args = torch.Tensor.to, [args[0], CUDA]
        if func in INDEXING and isinstance(args[0], DeviceTensor):
            args[1] = _listed(args[1])
        if func is torch.tensor and kwargs.pop("pin_memory", False):
            return func(*args, **kwargs).pin_memory()
        copied = func in (torch.tensor, torch.as_tensor) and not types
        if copied and kwargs.get("device") == CUDA:
            del kwargs["device"]
            return func(*args, **kwargs).to(CUDA)
        return func(*args, **kwargs)


INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def _indexed(given):
    """Return the device for what names no index; anything else as it is."""
    unnamed = isinstance(given, torch.device) and given == torch.device("cuda")
    return CUDA if unnamed or (isinstance(given, str) and given == "cuda") else given


def _listed(index):
    """Return an index with its lists as tensors of the host."""
    if isinstance(index, tuple):
        return tuple(map(_listed, index))
    return torch.tensor(index) if isinstance(index, list) else index


class PinnedMemory:
    """Which host memory is page-locked, by address."""

    def __init__(self):
        self._ranges = {}
        self._kept = []
        self._lock = threading.Lock()

    def pin(self, tensor):
        """Lock a new tensor's storage, for as long as the device is open."""
        storage = tensor.untyped_storage()
        self._kept.append(storage)  # else its address may be another's soon
        self.register(storage.data_ptr(), storage.nbytes())

    def register(self, start, nbytes):
        with self._lock:
            self._ranges[start] = start + nbytes

    def unregister(self, start):
        with self._lock:
            del self._ranges[start]

    def has(self, tensor):
        at = tensor.data_ptr()
        with self._lock:
            return any(start <= at < end for start, end in self._ranges.items())


def why_copy_waits(*, down, pinned, direct, non_blocking):
    """Say why a copy between host and device holds the caller up; None: it does not.

    As ATen's ``copy_kernel_cuda``.

    Args:
        down: To the host.
        pinned: The host's side is page-locked.
        direct: Both sides have one dtype and the host's is contiguous; otherwise the
            bytes go through a temporary on the host, which is not pinned.
        non_blocking: As given.
    """
    name = "copy to host" if down else "copy from host"
    if not pinned:
        return f"{name}, pageable"
    if not direct:
        return f"{name}, through a temporary"
    return None if non_blocking else f"{name}, blocking"


def tensors_in(args, kwargs):
    """Return the tensors among an operator's arguments."""
    found, ahead = [], [*kwargs.values()][::-1] + [*args][::-1]
    while ahead:  # tree_flatten took a third of the tests' time
        each = ahead.pop()
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, tuple | list):
            ahead += each[::-1]
    return found
