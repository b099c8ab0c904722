"""Unpacks carried packages and probes the software stack in a separate process.

``python -m gpu.stack SITE DEVICE`` prints the result of ``probe``.
"""

from __future__ import annotations

import compileall
import json
import lzma
import os
import platform
import subprocess
import sys
import tarfile
import traceback
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gpu.check import ROOT, environment

if TYPE_CHECKING:
    from pathlib import Path

PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python")


class StackError(Exception):
    """The carried packages do not unpack or load; the message has the reason."""


def install(kit: Path, site: Path) -> None:
    """Unpack an archive of packages outside the repository, and compile their modules.

    Raises:
        StackError: It is no archive of ``scripts/gpu/carry.sh``.
    """
    print(f"unpacking {kit} into {site} ...", flush=True)
    try:
        with tarfile.open(kit, "r:xz") as archive:
            archive.extractall(site, filter="data")
    except FileNotFoundError as error:
        why = f"--kit {kit} is no file; scripts/gpu/carry.sh writes one"
        raise StackError(why) from error
    except (tarfile.TarError, OSError, EOFError, lzma.LZMAError) as error:
        raise StackError(f"--kit {kit}: {error}") from error
    # Servers that start at the same time would each compile all that they import.
    compileall.compile_dir(site, quiet=2, workers=0)


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
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n"
    head += f"Requires-Python: {project['requires-python']}"
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
