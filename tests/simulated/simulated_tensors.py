"""Tensors of a simulated device; see ``simulated_cuda``."""

import torch

aten = torch.ops.aten
CUDA = torch.device("cuda:0")

READS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
}
"""Operations whose result, or its shape, the host waits for."""


DEVICES = []
"""Devices that are simulated now, the last one in use: a cached tensor may be of one
that is gone."""


class Block:
    """Memory of the device; somebody else's once no tensor has it.

    As with torch's caching allocator it is the stream's it was taken on, whose next
    tensor may lie there; other streams' work keeps it only where ``record_stream`` said
    so.
    """

    def __init__(self, device, memory):
        self.device, self.memory = device, memory
        self.stream, self.recorded = device.current(), []

    def __del__(self):
        if not self.device.closed:
            events = [stream.record_event() for stream in self.recorded]
            self.stream.freed.append((self.memory, events))


class DeviceTensor(torch.Tensor):
    """A tensor whose ``memory`` only the device's work may touch."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, memory, block):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=CUDA,
        )
        made.memory, made.block = memory, block
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return DEVICES[-1].dispatch(func, args, kwargs or {})

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, *, force=False):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def inner(value):
    return value.memory if isinstance(value, DeviceTensor) else value


def blueprint(value):
    """Return a tensor without memory in the place of one of the device's."""
    if not isinstance(value, torch.Tensor):
        return torch.device("meta") if isinstance(value, torch.device) else value
    size, stride = value.size(), value.stride()
    return torch.empty_strided(size, stride, dtype=value.dtype, device="meta")


def move(target, source):
    same = target.dtype == source.dtype and target.shape == source.shape
    if same:
        target, source = bits_of(target), bits_of(source)
    target.copy_(source)


def bits_of(tensor):
    """View as integers: a copy of NaNs as floats may change them."""
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    wide = tensor.is_floating_point() and tensor.element_size() in sizes
    return tensor.view(sizes[tensor.element_size()]) if wide else tensor


def is_tensor(value):
    return isinstance(value, torch.Tensor)


def is_masked(func, args):
    """Say whether a result's shape depends on a mask."""
    if func not in (aten.index.Tensor, aten.index_put_.default):
        return False
    return any(is_tensor(i) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
