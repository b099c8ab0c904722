"""Triton kernels on a device that is not there: launches are checked, not run.

The launchers around them run as they are, so what they allocate, compute on the host or
wait for is seen. What a kernel would have written, the op's reference writes.
"""

import dataclasses
import importlib

import torch
from fake_tensor import DeviceTensor, held
from llguidance import torch as llguidance_torch
from sglang.kernels.ops.memory import small_copy
from sglang.kernels.ops.speculative.ragged_verify_kernels import (
    BuildQoIndptr,
    PaddedToBucket,
)
from sglang.srt.constrained import xgrammar_backend
from sglang.srt.layers import sampler
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.jit import JITFunction  # noqa: TID253

from vericache_kernels.head_entries.ref import pick_rows, put_rows
from vericache_kernels.join_planes.ref import join_rows
from vericache_kernels.ragged_attention.ref import ragged_attention_ref
from vericache_kernels.token_commit.ref import commit_rows
from vericache_sglang.platforms.cpu.murmur_hash import murmur_hash32


def move_entries(layer, index, rows, slots, *, put):
    """Do what ``head_entries.triton_impl.launch`` does."""
    if put:
        put_rows(layer, index, rows, slots)
        return
    for part, found in zip(rows, pick_rows(layer, index, slots), strict=True):
        part.copy_(found)


def mask_tokens(logits, bitmask, indices=None):
    """Do what ``apply_token_bitmask_inplace`` does, SGLang's or llguidance's.

    Args:
        logits: [n, V], written to.
        bitmask: [n, V / 32] int32, a bit for every token that is allowed.
        indices: None.
    """
    assert indices is None
    assert bitmask.is_cuda
    token = torch.arange(logits.shape[1], device=logits.device)
    logits.masked_fill_(bitmask[:, token // 32] >> token % 32 & 1 == 0, -torch.inf)


def ragged_bytes(q, kv, rows, *rest):
    """Return what ``ragged_attention`` reads of the pool."""
    return int((rows.end - rows.begin).sum()) * slot_bytes(kv)


def packed_bytes(q, packed, exact, *rest):
    """Return what ``packed_attention`` reads: images of codes, and exact slots."""
    slots = int(exact.first[-1] - exact.first[0])
    codes = packed.key_bytes.nbytes + packed.value_bytes.nbytes
    return codes + slots * slot_bytes((exact.k_buffer, exact.v_buffer))


def slot_bytes(kv):
    """Return the bytes of a slot in a layer."""
    return sum(buffer[0].nbytes for buffer in kv)


READ = {"ragged_attention": ragged_bytes, "packed_attention": packed_bytes}
"""By op, what it reads of tensors far larger; others read all they are given."""

REFERENCES = {
    ("token_commit", "launch"): commit_rows,
    ("head_entries", "launch"): move_entries,
    ("ragged_attention", "launch"): lambda q, kv, rows, scaling, *_: (
        ragged_attention_ref(q, kv, rows, scaling)
    ),
    ("join_planes", "launch"): join_rows,
    ("packed_attention", "launch"): lambda q, *_: torch.zeros_like(q),
}
"""By op and launcher, what computes the same; codes of ``packed_attention`` are decoded
by nobody, its result is zero."""


def replace_kernels(patch, device):
    """Have every Triton kernel counted instead of run, and its results made in torch.

    Of SGLang's kernels only those with a torch twin are known.

    Args:
        patch: A ``MonkeyPatch``.
        device: The ``FakeDevice``.
    """

    def run(kernel, *args, grid, warmup, **options):
        if not kernel.fn.__module__.startswith("vericache_kernels."):
            raise NotImplementedError(f"nothing does what {kernel.fn} does")
        for each in args:
            if isinstance(each, torch.Tensor) and not isinstance(each, DeviceTensor):
                raise ValueError(
                    f"{kernel.__name__}: pointer argument cannot be accessed from "
                    f"Triton ({each.device} tensor?)"
                )
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        op = kernel.fn.__module__.split(".")[1]
        read = 0 if op in READ else sum(each.nbytes for each in tensors)
        device.launch(kernel.__name__, read)

    patch.setattr(JITFunction, "run", run)
    for twins in (BuildQoIndptr, PaddedToBucket):
        patch.setattr(twins, "triton", twins.torch)
    grammars, name = xgrammar_backend, "apply_token_bitmask_inplace_triton"
    patch.setattr(grammars, name, mask_tokens, raising=False)
    # Compiled by torch, which would not see the device.
    compiled = "apply_token_bitmask_inplace_kernel"
    patch.setattr(llguidance_torch, compiled, mask_tokens)
    patch.setattr(sampler, "murmur_hash32", murmur_hash32)
    # Torch copies in a group what this would have.
    patch.setattr(small_copy, "try_small_copy", lambda *given: False)
    for (op, name), reference in REFERENCES.items():
        module = importlib.import_module(f"vericache_kernels.{op}.triton_impl")
        launch = _with_results(getattr(module, name), reference, device, READ.get(op))
        patch.setattr(module, name, launch)


def _with_results(launch, reference, device, read):
    def run(*args, **options):
        made = launch(*args, **options)
        with _disable_current_modes():
            if read is not None:
                device.touch(read(*_held(args)))
            found = reference(*_held(args), **_held(options))
            _fill(made, found)
        return made

    return run


def _held(given):
    """Replace device tensors in containers and records by what they hold."""
    if isinstance(given, dict):
        return {name: _held(each) for name, each in given.items()}
    if isinstance(given, (list, tuple)):
        return type(given)(_held(each) for each in given)
    if dataclasses.is_dataclass(given):
        fields = [field.name for field in dataclasses.fields(given)]
        changes = {name: _held(getattr(given, name)) for name in fields}
        return dataclasses.replace(given, **changes)
    return held(given)


def _fill(made, found):
    """Copy a reference's results into what the launcher allocated for them."""
    if isinstance(made, torch.Tensor):
        made.held.copy_(found)
    elif dataclasses.is_dataclass(made):
        for field in dataclasses.fields(made):
            _fill(getattr(made, field.name), getattr(found, field.name))
