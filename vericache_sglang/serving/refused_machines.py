"""The GPUs, drivers and packages that VeriCache refuses to start on, one row each.

The checks run before SGLang is imported: on a GPU its imports need the kernel packages,
and SGLang only logs a plugin that could not be loaded.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from vericache_sglang.serving.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LEAST_CAPABILITY = (8, 0)
"""Lowest compute capability with bfloat16 tensor cores."""

KERNEL_PACKAGES = ("sglang-kernel", "flashinfer-python", "triton")
"""Distributions that the CUDA path always imports, whatever the flags are."""

PINNED_PACKAGES = ("sglang-kernel", "flashinfer-python")
"""Distributions with a version that SGLang requires; torch determines triton's."""

SKIP_VERSIONS = "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"
"""SGLang's variable that allows versions other than the required ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMachine:
    """GPU, driver and packages of this machine.

    Attributes:
        gpu: Name of the first GPU torch sees; "" if it sees none.
        capability: Its compute capability.
        driver: Newest CUDA version the driver supports, as "13.0"; "" without a driver.
        torch: Version of torch.
        torch_cuda: CUDA version torch was built for; "" if it was built without.
        torch_archs: Architectures torch was built for, as sm_90 or compute_90; empty:
            unknown.
        versions: Installed version by distribution; missing ones are left out.
        required: Version specifiers of SGLang's requirements by distribution.
        sglang_cuda: Major CUDA version of the packages SGLang requires; 0: any.
        has_fa3: Whether the kernels of FlashAttention 3 are installed.
        backend: ``--attention-backend``; None: left to SGLang.
        checks_versions: False where ``SKIP_VERSIONS`` is set.
    """

    gpu: str
    capability: tuple[int, int] = (0, 0)
    driver: str = ""
    torch: str
    torch_cuda: str = ""
    torch_archs: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, str] = field(default_factory=dict)
    sglang_cuda: int = 0
    has_fa3: bool = True
    backend: str | None = None
    checks_versions: bool = True

    @property
    def arch(self) -> str:
        """The GPU's architecture in torch's notation."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def least(self) -> str:
        """The lowest supported compute capability, for messages."""
        return ".".join(map(str, LEAST_CAPABILITY))


def _major(cuda: str) -> int:
    return int(cuda.partition(".")[0] or 0)


def _no_gpu(machine: LocalMachine, *, driver: bool, built: bool = True) -> bool:
    """Return whether no GPU is visible and driver and CUDA build are as given."""
    found = bool(machine.driver), bool(machine.torch_cuda)
    return not machine.gpu and found == (driver, built)


def _old_driver(machine: LocalMachine) -> bool:
    return 0 < _major(machine.driver) < _major(machine.torch_cuda)


def _not_visible(machine: LocalMachine) -> bool:
    return _no_gpu(machine, driver=True) and not _old_driver(machine)


def _without_kernels(machine: LocalMachine) -> bool:
    """Return whether torch has neither binaries nor PTX for the GPU."""
    major, minor = machine.capability
    found = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(machine.torch_archs))
    known = [(kind, int(high), int(low)) for kind, high, low in found]
    fits = any(
        (high == major and low <= minor)
        if kind == "sm"
        else (high, low) <= (major, minor)
        for kind, high, low in known
    )
    return bool(machine.gpu and known) and not fits


def _other_cuda(machine: LocalMachine) -> bool:
    built = _major(machine.torch_cuda)
    return bool(built and machine.sglang_cuda) and built != machine.sglang_cuda


def _no_fa3(machine: LocalMachine) -> bool:
    hopper = machine.capability[0] == 9 and machine.backend is None
    installed = "sglang-kernel" in machine.versions
    return (hopper or machine.backend == "fa3") and installed and not machine.has_fa3


def _missing(name: str) -> Rule:
    return Rule(
        name,
        lambda machine: bool(machine.gpu) and name not in machine.versions,
        "it is not installed, and a GPU server imports it",
        f'pip install "{name}{{0.required[{name}]}}"',
    )


def _wrong_version(name: str) -> Rule:
    def broken(machine: LocalMachine) -> bool:
        installed = machine.versions.get(name)
        if not machine.gpu or installed is None or not machine.checks_versions:
            return False
        allowed = SpecifierSet(machine.required.get(name, ""))
        return not allowed.contains(installed, prereleases=True)

    return Rule(
        name,
        broken,
        f"{{0.versions[{name}]}} is installed, SGLang requires {{0.required[{name}]}}",
        f'pip install "{name}{{0.required[{name}]}}", or set {SKIP_VERSIONS}=1',
    )


def _wrong_build(name: str) -> Rule:
    def broken(machine: LocalMachine) -> bool:
        tag = re.search(r"\+cu(\d+)\d$", machine.versions.get(name, ""))
        built = int(tag[1]) if tag else 0
        return bool(machine.gpu and built) and built != _major(machine.torch_cuda)

    return Rule(
        name,
        broken,
        f"{{0.versions[{name}]}} is a build for another CUDA than torch's "
        "{0.torch_cuda}",
        f'pip install --force-reinstall "{name}{{0.required[{name}]}}"',
    )


MACHINE_RULES: tuple[Rule, ...] = (
    Rule(
        "torch without CUDA",
        lambda machine: not machine.torch_cuda,
        "torch {0.torch} was built without CUDA",
        "VERICACHE_DEVICE=cuda bash scripts/setup_env.sh",
    ),
    Rule(
        "no driver",
        lambda machine: _no_gpu(machine, driver=False),
        "there is no NVIDIA driver on this machine",
        "install one; nvidia-smi must list the GPU",
    ),
    Rule(
        "old driver",
        _old_driver,
        "the NVIDIA driver supports CUDA {0.driver}, torch {0.torch} needs "
        "{0.torch_cuda}",
        "install a newer driver",
    ),
    Rule(
        "no GPU",
        _not_visible,
        "torch sees no GPU, although there is a driver",
        "look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    ),
    Rule(
        "compute capability",
        lambda machine: bool(machine.gpu) and machine.capability < LEAST_CAPABILITY,
        "{0.gpu} is {0.arch}, the kernels need compute capability {0.least} or newer",
        "use an Ampere GPU or a newer one",
    ),
    Rule(
        "torch without kernels for the GPU",
        _without_kernels,
        "torch {0.torch} has no code for {0.gpu} ({0.arch})",
        'pip install --force-reinstall "torch{0.required[torch]}"',
    ),
    Rule(
        "torch for another CUDA",
        _other_cuda,
        "torch {0.torch} was built for CUDA {0.torch_cuda}, the kernel packages that "
        "SGLang requires for CUDA {0.sglang_cuda}",
        'pip install --force-reinstall "torch{0.required[torch]}"',
    ),
    *map(_missing, KERNEL_PACKAGES),
    *map(_wrong_version, PINNED_PACKAGES),
    *map(_wrong_build, PINNED_PACKAGES),
    Rule(
        "FlashAttention 3",
        _no_fa3,
        "sglang-kernel {0.versions[sglang-kernel]} is a build without its kernels "
        "(sgl_kernel/flash_ops)",
        'pip install --force-reinstall "sglang-kernel{0.required[sglang-kernel]}", or '
        "--attention-backend vericache",
    ),
)


def this_machine(backend: str | None) -> LocalMachine:
    """Inspect the first GPU, its driver and the installed packages; allocates nothing.

    Args:
        backend: ``--attention-backend`` as the user gave it.
    """
    import torch

    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    seen = torch.cuda.is_available()
    names = (*KERNEL_PACKAGES, "torch")
    pins = [Requirement(line) for line in requires("sglang") or ()]
    wanted: dict[str, Requirement] = {
        canonicalize_name(pin.name): pin for pin in pins if pin.marker is None
    }
    extras = " ".join(extra for pin in wanted.values() for extra in pin.extras)
    cuda = re.search(r"\bcu(\d+)\b", extras)
    return LocalMachine(
        gpu=torch.cuda.get_device_name(0) if seen else "",
        capability=torch.cuda.get_device_capability(0) if seen else (0, 0),
        driver=f"{driver // 1000}.{driver % 1000 // 10}" if driver else "",
        torch=torch.__version__,
        torch_cuda=torch.version.cuda or "",
        torch_archs=tuple(torch.cuda.get_arch_list()),
        versions=_installed(names),
        required={
            name: str(wanted[name].specifier) if name in wanted else ""
            for name in names
        },
        sglang_cuda=int(cuda[1]) if cuda else 0,
        has_fa3=_has_file("sgl_kernel", "flash_ops*"),
        backend=backend,
        checks_versions=os.environ.get(SKIP_VERSIONS, "").lower() not in ("1", "true"),
    )


def _installed(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _has_file(package: str, pattern: str) -> bool:
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    return any(any(Path(folder).glob(pattern)) for folder in folders or ())
