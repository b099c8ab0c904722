"""Installs carried wheels beside the host's packages and checks that they load."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu.part import ROOT, Check, Step, Summary, Table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gpu.part import Context

IDENTITY = "vericache-site-id"
"""File of a site: another machine's site is another one, however it is called."""

SGLANG = "0.5.21"

ASKED = """
import json, platform, importlib.metadata as m
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return ""
names = ("torch", "triton", "sglang", "sglang-kernel", "transformers")
found = {"python": platform.python_version(), **{n: version(n) for n in names}}
points = m.entry_points(group="sglang.srt.plugins")
found["plugins"] = sorted({p.value for p in points})
try:
    import torch
    import sgl_kernel
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found["ops_on_cuda"] = bool(has("sgl_kernel::rmsnorm", "CUDA"))
    found["kernels_error"] = ""
except Exception as error:
    found["ops_on_cuda"] = False
    found["kernels_error"] = f"{type(error).__name__}: {error}"[:400]
try:
    import vericache_sglang.engine.torchvision_ops as ops
    ops.define_missing_ops()
    import sglang.srt.server_args
    found["sglang_error"] = ""
except Exception as error:
    found["sglang_error"] = f"{type(error).__name__}: {error}"[:400]
print("FOUND " + json.dumps(found))
"""
"""Run in a fresh process: what was just installed is imported there."""


def steps(context: Context) -> list[Step]:
    """See ``gpu.part.PartModule``; an install is a step of its folder and its site."""
    site = site_identity(context.site)
    folders = wheel_folders(context.wheels)
    named = {f"install {f.name} {_digest(f)} into {site}": f for f in folders}
    installs = [
        Step(name, partial(install, context, folder), 90)
        for name, folder in named.items()
    ]
    check = f"check of {site} with {', '.join(f.name for f in folders) or 'nothing'}"
    return [*installs, Step(check, partial(checked, context), 60)]


def wheel_folders(wheels: Path | None) -> list[Path]:
    """Return the folders with wheels: the one given, and those in it."""
    if wheels is None:
        return []
    return [f for f in (wheels, *sorted(wheels.iterdir())) if any(f.glob("*.whl"))]


def site_identity(site: Path) -> str:
    """Return the id of a site; a folder that is new gets one."""
    file = site / IDENTITY
    if not file.exists():
        site.mkdir(parents=True, exist_ok=True)
        file.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
    return file.read_text(encoding="utf-8")


def install(context: Context, folder: Path) -> dict[str, Any]:
    """Install the wheels of a folder, and copy its packages that are no wheels.

    Raises:
        RuntimeError: pip failed.
    """
    wheels = sorted(folder.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    command += ["--no-compile", "--no-cache-dir", "--upgrade", "--no-warn-conflicts"]
    command += ["--target", str(context.site), *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip: {done.stderr.strip()[-1500:]}")
    for package in folder.iterdir():
        if package.is_dir():  # a stub of a package nobody needs whole
            shutil.copytree(package, context.site / package.name, dirs_exist_ok=True)
    return {"wheels": [wheel.name for wheel in wheels]}


def register(site: Path) -> None:
    """Make this checkout a distribution, so that SGLang finds its entry points.

    There is no network to build it with: the two files are all an install would add.
    """
    import tomllib

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    folder = site / f"vericache_sglang-{project['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\n"
        f"Version: {project['version']}\n",
        encoding="utf-8",
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines.append(f"[{group}]")
        lines += [f"{name} = {value}" for name, value in points.items()]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def checked(context: Context) -> dict[str, Any]:
    """Register the checkout, and import SGLang and its kernels in a fresh process.

    Raises:
        RuntimeError: The process ended without a word.
    """
    register(context.site)
    done = subprocess.run(
        [sys.executable, "-c", ASKED],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **context.environment()},
    )
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
            return found
    raise RuntimeError(f"import check: {done.stderr.strip()[-1500:]}")


def conclude(context: Context, results: Mapping[str, Any]) -> Summary:
    """See ``gpu.part.PartModule``."""
    installed = [name for one in results.values() for name in one.get("wheels", ())]
    last: dict[str, Any] = next(
        (one for one in [*results.values()][::-1] if "plugins" in one), {}
    )
    ours = "vericache_sglang.plugin:register"
    checks = [
        _check("SGLang's version", SGLANG, last.get("sglang") or "not installed"),
        _check("SGLang imports", "", last.get("sglang_error", "not tried")),
        _check("our plugin is found", True, ours in last.get("plugins", ())),
    ]
    if not context.rehearsal:
        on_cuda = last.get("ops_on_cuda", False)
        checks.append(_check("its kernels have CUDA ops", True, on_cuda))
    versions = [
        (k, str(v))
        for k, v in last.items()
        if k not in ("seconds", "plugins") and v != ""
    ]
    return Summary(
        headline=f"{len(installed)} wheels, sglang {last.get('sglang') or 'missing'}",
        checks=tuple(checks),
        tables=(Table("What is there", ("what", "is"), tuple(versions)),),
    )


def _check(what: str, wanted: object, got: object) -> Check:
    return Check(what, str(wanted) or "no error", str(got) or "no error", wanted == got)


def _digest(folder: Path) -> str:
    """Return a digest of the wheels' names and sizes."""
    names = [f"{w.name} {w.stat().st_size}" for w in sorted(folder.glob("*.whl"))]
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
