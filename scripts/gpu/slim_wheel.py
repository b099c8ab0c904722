"""Rewrites a wheel without the files that match a pattern: ``IN.whl FOLDER REGEX``.

SGLang's FlashAttention 3 is one library of 1.1 GB. It stays, without the kernels that a
text server of a bf16 model with heads of 64 or 128 never runs on a Hopper GPU.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
import sys
import zipfile
from pathlib import Path

RECORD = ".dist-info/RECORD"

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


def slim(source: Path, target: Path, drop: re.Pattern[str]) -> None:
    """Copy a wheel, leaving files and kernels out; its list of files stays right.

    Args:
        target: Written; keeps the name, so that pip takes it.
        drop: Files whose name it finds are left out.

    Raises:
        ValueError: It has no list of files, so it is no wheel.
    """
    rows: list[str] = []
    with (
        zipfile.ZipFile(source) as old,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new,
    ):
        records = [name for name in old.namelist() if name.endswith(RECORD)]
        if not records:
            raise ValueError(f"{source} has no {RECORD}")
        for name in old.namelist():
            if name in records or drop.search(name):
                continue
            content = bytearray(old.read(name))
            if name == FLASH_ATTENTION:
                print(f"{name}: {trim(content)} modules of kernels kept")
            new.writestr(old.getinfo(name), content, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
            rows.append(f"{name},sha256={digest.rstrip(b'=').decode()},{len(content)}")
        new.writestr(records[0], "\n".join([*rows, f"{records[0]},,"]) + "\n")


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
    wheel, folder, pattern = sys.argv[1:]
    made = Path(folder, Path(wheel).name)
    slim(Path(wheel), made, re.compile(pattern))
    print(f"{made.name} {made.stat().st_size / 2**20:.1f} MiB")
