"""What the device is, and how fast it copies: inside itself and over the link."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gpu import stamp
from gpu.part import Step, Summary, Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu.part import Context

CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,driver_version"

PIECES_MIB = (0.5, 2, 8)
"""Pieces in which KV crosses the link."""


def steps(context: Context) -> list[Step]:
    """See ``gpu.part.PartModule``."""
    found = [
        Step("facts", partial(facts, context.device), 20),
        Step("copy", partial(copy, context.device), 20),
    ]
    if not context.rehearsal:
        found += [Step(f"link {mib} MiB", partial(link, mib), 20) for mib in PIECES_MIB]
    return found


def facts(device: str) -> dict[str, Any]:
    """Return what torch says of the device."""
    import torch

    told = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    if device == "cpu":
        return told
    own = torch.cuda.get_device_properties(0)
    return told | {
        "name": own.name,
        "capability": f"{own.major}.{own.minor}",
        "memory_gib": round(own.total_memory / 2**30, 1),
        "multiprocessors": own.multi_processor_count,
        "cache_mib": round(own.L2_cache_size / 2**20, 1),
        "cuda": torch.version.cuda,
        CLOCKS: "; ".join(stamp.gpus(CLOCKS)),
        "free_gib": round(torch.cuda.mem_get_info()[0] / 2**30, 1),
    }


def copy(device: str) -> dict[str, Any]:
    """Measure the device's own copies."""
    from gpu.timing import copy_rate

    mib = 1024 if device == "cuda" else 64
    return {"bytes_per_s": copy_rate(device, mib, 20 if device == "cuda" else 5)}


def link(mib: float) -> dict[str, Any]:
    """Measure copies in pieces of ``mib`` MiB, both ways, from pinned memory."""
    from gpu.timing import MIB, link_rate

    piece = int(mib * MIB)
    return {
        "in_bytes_per_s": link_rate(piece, to_device=True),
        "out_bytes_per_s": link_rate(piece, to_device=False),
    }


def conclude(context: Context, results: Mapping[str, Any]) -> Summary:
    """See ``gpu.part.PartModule``."""
    told = {k: v for k, v in results.get("facts", {}).items() if k != "seconds"}
    rate = results.get("copy", {}).get("bytes_per_s", 0.0)
    rows = [("copies in the device, read + write", f"{rate / 1e9:.0f} GB/s")]
    links = {mib: results.get(f"link {mib} MiB", {}) for mib in PIECES_MIB}
    for mib, one in links.items():
        for way, words in (("in", "host to device"), ("out", "device to host")):
            if one.get(f"{way}_bytes_per_s"):
                shown = f"{one[f'{way}_bytes_per_s'] / 1e9:.1f} GB/s"
                rows.append((f"{words}, pieces of {mib} MiB", shown))
    inward = links[2].get("in_bytes_per_s", 0.0)
    headline = f"{told.get('name', 'CPU')}, copies {rate / 1e9:.0f} GB/s"
    if inward:
        headline += f", link in {inward / 1e9:.1f} GB/s, 1 : {rate / inward:.0f}"
    return Summary(
        headline=headline,
        tables=(
            Table("Rates", ("copy", "measured"), tuple(rows)),
            Table("Facts", ("what", "is"), tuple((k, str(v)) for k, v in told.items())),
        ),
    )
