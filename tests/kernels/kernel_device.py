"""Where kernels run in these tests: on a CUDA device if there is one, else interpreted.

With a device nothing is interpreted; without one Triton interprets them on the CPU.
``VERICACHE_KERNEL_DEVICE=cuda`` refuses to run without a device. Triton decides when it
is imported, so kernels run in processes of their own, see ``run``; what they are
compared with is always computed on the CPU.
"""

import dataclasses
import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

SWITCH = "VERICACHE_KERNEL_DEVICE"


def chosen(switch, available):
    """Return where kernels run.

    Args:
        switch: What ``SWITCH`` says; None: nothing.
        available: Whether there is a CUDA device.
    """
    if switch not in (None, "cuda") or (switch and not available):
        raise RuntimeError(
            f"{SWITCH} may only be cuda, and then there must be a device: is "
            f"{switch!r}, CUDA available: {available}"
        )
    return "cuda" if available else "cpu"


DEVICE = chosen(os.environ.get(SWITCH), torch.cuda.is_available())
INTERPRETED = DEVICE == "cpu"

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Error of a kernel over the largest number of a reference in float32, by dtype.

A few roundings of weights, of what is decoded and of the output: half a last place is
2**-12 in float16 and 2**-9 in bfloat16; float32 adds up some hundred products.
"""
CUT_TOLERANCE = 2e-2
"""As above where the interpreter decodes to bfloat16: it does not round but cuts."""


def needs_gpu(test):
    """Mark a test that has no meaning in the interpreter."""
    skip = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
    return pytest.mark.gpu(skip(test))


def cases(table, first):
    """Return a table's names as parameters; interpreted, others are extended tests."""
    more = pytest.mark.extended if INTERPRETED else ()
    return [pytest.param(name, marks=() if name in first else more) for name in table]


def asked(request):
    """Return the names among the parameters of the module's tests that will run."""
    items = [each for each in request.session.items if each.path == request.path]
    params = [each.callspec.params for each in items if hasattr(each, "callspec")]
    return [each["name"] for each in params if "name" in each]


def run(script, *arguments, timeout=420):
    """Run a file that uses ``DEVICE``; return the JSON it prints last.

    On a device most of the time goes into compiling: every shape is another kernel.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    strict = ()
    if INTERPRETED:
        environment["TRITON_INTERPRET"] = "1"
        # A warning of torch about the device would say nothing of ours.
        strict = ("-W", "error")
    done = subprocess.run(
        [sys.executable, *strict, str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen.pop("device") == DEVICE
    return seen


def report(seen):
    """Print what a script saw, as ``run`` reads it."""
    print(json.dumps({**seen, "device": DEVICE}))


def moved(thing, device=DEVICE):
    """Copy every tensor of a record, tuple or list to a device, strides and all."""
    if isinstance(thing, torch.Tensor):
        base = thing if thing._base is None else thing._base
        copy = base.detach().clone().to(device)
        if base is thing:
            return copy
        offset = thing.storage_offset() - base.storage_offset()
        return copy.as_strided(thing.shape, thing.stride(), offset)
    if dataclasses.is_dataclass(thing):
        names = [field.name for field in dataclasses.fields(thing)]
        parts = {name: moved(getattr(thing, name), device) for name in names}
        return dataclasses.replace(thing, **parts)
    if isinstance(thing, tuple | list):
        return type(thing)(moved(part, device) for part in thing)
    return thing


@contextmanager
def unsynced():
    """Fail where the host waits for the device inside; on a CPU it never does."""
    if INTERPRETED:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
