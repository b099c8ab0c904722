"""Our kernels' launches, and host registration, on a simulated device."""

from types import SimpleNamespace

import torch
from simulated_tensors import is_tensor, move


class Cudart:
    """As ``torch.cuda.cudart()``: registers memory of the host."""

    def __init__(self, device):
        self.device = device

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        if sum(self.device.registered.values()) + size > self.device.locks:
            return 2
        self.device.registered[address] = size
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.device.registered[address]
        return 0

    def cudaGetErrorString(self, code):  # noqa: N802
        return f"error {code}"


def kernels(device):
    """Return modules in the place of our Triton kernels, by name."""
    from vericache_kernels.head_entries import ref as entries
    from vericache_kernels.join_planes import ref as planes

    def put_or_pick(layer, index, rows, slots, *, put):
        where = [] if slots is None else [slots]
        n = len(layer)

        def does(index, *given):
            sides, parts, at = given[:n], given[n : 2 * n], given[2 * n :]
            if put:
                entries.put_rows(sides, index, parts, at[0] if at else None)
                return
            picked = entries.pick_rows(sides, index, at[0] if at else None)
            for part, own in zip(parts, picked, strict=True):
                move(part, own)

        device.kernel(does, index, *layer, *rows, *where)

    def planes_joined(draft, residual, step, target):
        found = draft.tokens.new_empty(len(draft.tokens))
        records, shapes = (draft, residual, target), []
        for record in records:
            fields = record.__dataclass_fields__
            shapes.append([n for n in fields if is_tensor(getattr(record, n))])
        tensors = [
            getattr(record, name)
            for record, names in zip(records, shapes, strict=True)
            for name in names
        ]

        def does(found, *given):
            left = iter(given)
            own = [
                type(record)(
                    **{
                        name: next(left) if name in names else getattr(record, name)
                        for name in record.__dataclass_fields__
                    }
                )
                for record, names in zip(records, shapes, strict=True)
            ]
            found.copy_(planes.join_rows(own[0], own[1], step, own[2]))

        device.kernel(does, found, *tensors)
        return found

    return {
        "vericache_kernels.head_entries.triton_impl": SimpleNamespace(
            launch=put_or_pick
        ),
        "vericache_kernels.packed_attention.triton_impl": SimpleNamespace(
            launch=lambda q, *_: torch.zeros_like(q)  # it is timed at boot, no more
        ),
        "vericache_kernels.join_planes.triton_impl": SimpleNamespace(
            launch=planes_joined
        ),
    }
