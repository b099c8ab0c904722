"""Installs carried wheels and probes the software stack in a separate process.

``python -m gpu.stack SITE DEVICE`` prints the result of ``probe``.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import traceback
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gpu.check import ROOT, environment

if TYPE_CHECKING:
    from pathlib import Path

PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python")


class StackError(Exception):
    """The carried wheels do not install or load; the message has the reason."""


def install(wheels: Path, site: Path) -> None:
    """Install the wheels of a folder, and of those in it, outside the repository.

    Raises:
        StackError: There are no wheels, or pip refuses one.
    """
    found = [*map(str, [*wheels.glob("*.whl"), *wheels.glob("*/*.whl")])]
    if not found:
        why = "has no wheels" if wheels.is_dir() else "is no folder"
        raise StackError(f"--wheels {wheels} {why}; scripts/gpu/carry.sh fills one")
    print(f"installing {len(found)} wheels into {site} ...", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    pip += ["--no-compile", "--no-cache-dir", "--upgrade", "--no-warn-conflicts"]
    pip += ["--target", str(site), *found]
    ran = subprocess.run(pip, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise StackError(f"pip: {ran.stderr.strip()[-1500:]}")


def complete(site: Path) -> None:
    """Write what a site lacks: this checkout's entry points, names of IPython.

    There is no network to build the checkout with, and an install would add no more.
    SGLang imports two names of IPython, which would bring twelve packages.
    """
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {at}" for name, at in points.items())]
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0"
    info = f"vericache_sglang-{project['version']}.dist-info"
    files = {} if _version(project["name"]) else {f"{info}/METADATA": head}
    files |= {f"{info}/entry_points.txt": "\n".join(lines)} if files else {}
    if find_spec("IPython") is None:
        files["IPython/__init__.py"] = "def get_ipython():\n    return None"
        files["IPython/display.py"] = "HTML = str\ndisplay = clear_output = print"
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(f"{text}\n", encoding="utf-8")


def describe(site: Path, device: str) -> dict[str, Any]:
    """Return what ``probe`` finds.

    Raises:
        StackError: It ended without a word, or there is no such device.
    """
    ran = subprocess.run(
        [sys.executable, "-m", "gpu.stack", str(site), device],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment(str(site))},
    )
    if ran.returncode:
        raise StackError(f"gpu.stack: {ran.stderr.strip()[-1500:]}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    if not found["device"]:
        raise StackError("torch sees no CUDA device; --device cpu rehearses")
    return found


def probe(site: str, device: str) -> dict[str, Any]:
    """Return what is there.

    Returns:
        ``device`` (its name; "" for none), ``carried`` (SGLang is from the site),
        ``fa3_error`` (end of a traceback, "" for none) and ``name``: what serves, in a
        line.
    """
    import torch

    versions = {name: _version(name) for name in PACKAGES}
    at = str(distribution("sglang").locate_file("")) if versions["sglang"] else ""
    found: dict[str, Any] = {"carried": at.startswith(site), "fa3_error": "not tried"}
    found["device"] = f"CPU {platform.machine()}" if device == "cpu" else ""
    if device == "cuda" and torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        try:
            run_fa3()
            found["fa3_error"] = ""
        except Exception:  # noqa: BLE001 - whatever it is, it is told
            found["fa3_error"] = traceback.format_exc()[-1500:]
    kind = "carried kit" if found["carried"] else "installed packages"
    known = ", ".join(f"{k} {v or 'missing'}" for k, v in versions.items())
    attention = "no FA3" if found["fa3_error"] else "FA3"
    return found | {"name": f"{kind}: {known}; {attention}"}


def run_fa3() -> None:
    """Run SGLang's default attention on Hopper GPUs: paged, two head sizes, bf16.

    Raises:
        Exception: It does not load, or has no kernel for this GPU.
    """
    import torch
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    for dim, count in ((64, 1), (64, 300), (128, 1), (128, 300)):
        q = torch.randn(count, 4, dim, dtype=torch.bfloat16, device="cuda")
        k, v = torch.randn(2, 300, 1, 2, dim, dtype=torch.bfloat16, device="cuda")
        got = flash_attn_with_kvcache(
            q=q,
            k_cache=k,
            v_cache=v,
            page_table=torch.arange(300, dtype=torch.int32, device="cuda")[None],
            cache_seqlens=torch.tensor([300], dtype=torch.int32, device="cuda"),
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device="cuda"),
            max_seqlen_q=count,
            causal=True,
        )
        # The first query of a prefill sees the first key only.
        if count > 1:
            torch.testing.assert_close(got[0], v[0, 0].repeat_interleave(2, 0))
        torch.cuda.synchronize()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1], sys.argv[2])))
