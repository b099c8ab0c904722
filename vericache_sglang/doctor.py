"""Return whether this machine can serve: ``python -m vericache_sglang.doctor``.

Reads the installed packages' metadata, so it needs neither torch nor SGLang to say that
one of them is missing; torch is imported only to look at a GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vericache_sglang.serving.refused_machines import MACHINE_RULES, this_machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.metadata import Distribution

PACKAGE = "vericache-sglang"
PLUGINS = "sglang.srt.plugins"
TORCH_FOR_CPUS = "https://download.pytorch.org/whl/cpu"
DRIVER = Path("/proc/driver/nvidia/version")
SHOWN = ("python", PACKAGE, "sglang", "torch", "GPU")
"""Items that are printed even if nothing is wrong with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One requirement of a server.

    Attributes:
        name: Name of the package, or ``python``, or a property of the GPU.
        status: ``ok``, ``missing``, or ``wrong`` if present but unsuitable.
        found: Its version, or the reason it is wrong; "" if it is missing.
        wanted: Version specifier; "" for any version.
        remedy: The command that fixes it; "" if it is ``ok``.
    """

    name: str
    status: str = "ok"
    found: str = ""
    wanted: str = ""
    remedy: str = ""


def examine(device: str) -> list[Check]:
    """Check the interpreter, the installed packages and the GPU.

    Args:
        device: Device to serve on, ``cpu`` or ``cuda``.
    """
    try:
        own = distribution(PACKAGE)
    except PackageNotFoundError:
        # Imported from a checkout: SGLang finds the plugin by the metadata alone.
        remedy = "pip install --no-deps -e CHECKOUT, or pip install WHEEL"
        return [Check(name=PACKAGE, status="missing", remedy=remedy)]
    packages = [_package(needed, device) for needed in _needed(own, device)]
    checks = [_python(own), _plugin(own), *packages]
    if device == "cuda" and any(c.name == "torch" and c.found for c in packages):
        checks += _gpu()
    return checks


def _python(own: Distribution) -> Check:
    found, wanted = platform.python_version(), own.metadata["Requires-Python"]
    if SpecifierSet(wanted).contains(found, prereleases=True):
        return Check(name="python", found=found, wanted=wanted)
    remedy = f"make the virtual environment with a Python {wanted}"
    return Check(
        name="python", status="wrong", found=found, wanted=wanted, remedy=remedy
    )


def _plugin(own: Distribution) -> Check:
    if any(point.group == PLUGINS for point in own.entry_points):
        return Check(name=PACKAGE, found=own.version)
    remedy = f"pip install --force-reinstall --no-deps {PACKAGE}"
    found = f"{own.version} without its entry points"
    return Check(name=PACKAGE, status="wrong", found=found, remedy=remedy)


def _needed(own: Distribution, device: str) -> Iterator[Requirement]:
    """Yield the packages that a server on ``device`` needs, torch first."""
    found = [Requirement(line) for line in own.requires or ()]
    for needed in sorted(found, key=lambda each: each.name != "torch"):
        # A CPU has the same SGLang, but its extra cannot name it (pyproject.toml).
        extra = "cuda" if needed.name == "sglang" else device
        if needed.marker is None or needed.marker.evaluate({"extra": extra}):
            yield needed


def _package(needed: Requirement, device: str) -> Check:
    name, wanted = needed.name, str(needed.specifier)
    try:
        found = version(name)
    except PackageNotFoundError:
        found = ""
    if found and needed.specifier.contains(found, prereleases=True):
        return Check(name=name, found=found, wanted=wanted)
    remedy = f'pip install "{PACKAGE}[{device}]"'
    if device == "cpu" and name == "torch":
        remedy = f'pip install "torch{wanted}" --index-url {TORCH_FOR_CPUS}'
    elif device == "cpu" and name == "sglang":
        remedy = f'pip install --no-deps "sglang{wanted}"'
    status = "wrong" if found else "missing"
    return Check(name=name, status=status, found=found, wanted=wanted, remedy=remedy)


def _gpu() -> Iterator[Check]:
    """Yield the faults of the GPU and its packages that the launcher refuses."""
    machine = this_machine(None)
    broken = [rule for rule in MACHINE_RULES if rule.broken(machine)]
    for rule in broken:
        yield Check(
            name=rule.what,
            status="wrong",
            found=rule.reason.format(machine),
            remedy=rule.remedy.format(machine),
        )
    if not broken:
        yield Check(name="GPU", found=machine.gpu)


def as_lines(checks: Sequence[Check], device: str) -> Iterator[str]:
    """Yield the lines of a readable report: faults, versions and remedies."""
    yield f"VeriCache on {device}, {sys.executable}"
    width = max(len(check.name) for check in checks)
    for check in checks:
        if check.status != "ok" or check.name in SHOWN:
            state = f"{check.found or '-'} {check.wanted and f'({check.wanted})'}"
            yield f"  {check.status:7}  {check.name:{width}}  {state.rstrip()}"
    others = [c for c in checks if c.status == "ok" and c.name not in SHOWN]
    yield f"  ok       {len(others)} other packages"
    remedies = dict.fromkeys(check.remedy for check in checks if check.remedy)
    yield "to do:" if remedies else "ready to serve"
    yield from (f"  {remedy}" for remedy in remedies)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report.

    Returns:
        Exit status: 0 if a server can start, otherwise 1.
    """
    parser = argparse.ArgumentParser(
        prog="python -m vericache_sglang.doctor",
        description="Say what is installed, what fits, and how to get what is missing.",
    )
    has_driver = DRIVER.exists() or shutil.which("nvidia-smi") is not None
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if has_driver else "cpu",
        help="to serve on; default: cuda where there is an NVIDIA driver",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(argv)
    checks = examine(given.device)
    ready = all(check.status == "ok" for check in checks)
    if given.json:
        found = {"device": given.device, "ready": ready, "python": sys.executable}
        print(json.dumps({**found, "checks": [asdict(c) for c in checks]}, indent=1))
    else:
        print("\n".join(as_lines(checks, given.device)))
    return 0 if ready else 1


if __name__ == "__main__":
    sys.exit(main())
