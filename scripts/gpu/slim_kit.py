"""Deletes from a folder of packages what a text server on a Hopper GPU never loads.

``slim_kit.py FOLDER``. SGLang's FlashAttention 3 is one library of 1.1 GB: it stays,
without the kernels that a bf16 model with heads of 64 or 128 never runs, which are
zeros then and take no room in an archive.
"""

from __future__ import annotations

import re
import shutil
import struct
import sys
from pathlib import Path

UNUSED = (
    *("sglang/multimodal_gen", "sglang/test", "sglang/eval", "sglang/benchmark"),
    *("sglang/bench_*.py", "sglang/srt/*/_*.so"),
    *("sgl_kernel/sm100", "sgl_kernel/infllm_ops*", "sgl_kernel/flashmla_ops*"),
    *("triton_kernels", "xgrammar/lib/*.a"),
    *("flashinfer/data/cutlass", "flashinfer/data/cccl", "flashinfer/data/spdlog"),
)
"""Patterns of files and folders: other models, other GPUs, tests, and what kernels are
compiled from that these servers never ask for."""

FLASH_ATTENTION = "sgl_kernel/flash_ops.abi3.so"

FATBIN = b"\x50\xed\x55\xba\x01\x00\x10\x00"
"""How a module of device code begins: magic, version 1, 16 bytes of header, of which
the other 8 are the size of what follows."""

HOPPER = 90
"""Compute capability times ten of the code that stays."""

FORWARD = re.compile(
    rb"CollectiveMainloopFwdSm(?P<arch>\d+)ILi\d+E\w*?E"
    rb"Li(?P<dim>\d+)ENS\d*_\d+(?P<dtype>bfloat16_t|half_t|float_e4m3_t)"
    rb"\w*?Sm90ELb\dELb\dELb(?P<softcap>\d)E"
)
"""A kernel's mangled name: head dimension of V, dtype, whether logits are capped."""


def slim(folder: Path) -> None:
    """Delete what ``UNUSED`` names, and blank the device code that is not needed."""
    for pattern in UNUSED:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    library = folder / FLASH_ATTENTION
    content = bytearray(library.read_bytes())
    print(f"{FLASH_ATTENTION}: {trim(content)} modules of kernels kept")
    library.write_bytes(content)


def trim(library: bytearray) -> int:
    """Blank the device code that is not needed; no module moves, so the library loads.

    A module without code for its GPU is an error where one of its kernels is launched,
    and nowhere else: that is how a library of another architecture behaves.

    Args:
        library: An ELF file with fat binaries, changed in place.

    Returns:
        How many modules kept their code for Hopper.
    """
    kept = 0
    at = library.find(FATBIN)
    while at >= 0:
        size = struct.unpack_from("<Q", library, at + 8)[0]
        module = bytes(library[at + 16 : at + 16 + size])
        stays = hopper_code(module) if is_needed(module) else b""
        library[at + 8 : at + 16 + size] = struct.pack("<Q", len(stays)) + stays.ljust(
            size, b"\0"
        )
        kept += bool(stays)
        at = library.find(FATBIN, at + 16 + size)
    return kept


def is_needed(module: bytes) -> bool:
    """Return whether a module has kernels a server launches.

    Args:
        module: Code of all architectures; some of it names the kernels in plain text.
            A module that names no attention plans or combines, and is needed.
    """
    found = list(FORWARD.finditer(module))
    return (bool(found) or b"MainloopFwd" not in module) and all(
        match["arch"] == b"90"
        and match["dim"] in (b"64", b"128")
        and match["dtype"] == b"bfloat16_t"
        and match["softcap"] == b"0"
        for match in found
    )


def hopper_code(module: bytes) -> bytes:
    """Return the entries of a module, header and code, that are for Hopper GPUs."""
    at, found = 0, b""
    while at < len(module):
        header, length = struct.unpack_from("<IQ", module, at + 4)
        end = at + header + length
        if struct.unpack_from("<I", module, at + 28)[0] == HOPPER:
            found += module[at:end]
        at = end
    return found


if __name__ == "__main__":
    slim(Path(sys.argv[1]))
