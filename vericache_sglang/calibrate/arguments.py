"""The command line of ``python -m vericache_sglang.calibrate``."""

from __future__ import annotations

import argparse
from math import inf
from pathlib import Path

from vericache_sglang.errors import ConfigError

PROGRAM = "python -m vericache_sglang.calibrate"

LINK_GBPS = 64.0
"""PCIe 5 x16, one direction."""

MEMORY_GBPS = 4000.0
"""Memory bandwidth of one GPU, in GB/s; an H200 has 4800."""

BOUNDS = {
    "context": (2, inf),
    "samples": (1, inf),
    "rows": (1, inf),
    "sinks": (0, inf),
    "rotated_heads": (1, inf),
    "bits": (1, 8),
    "exponent_bits": (1, 7),
    "mantissa_bits": (0, 6),
    "block": (1, inf),
    "drafts": (1, inf),
    "answer": (2, inf),
}
"""Lowest and highest value of the integer flags."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of all sub-commands."""
    top = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Measure a model's KV offline: choose planes, write code tables.",
    )
    commands = top.add_subparsers(dest="command", required=True)
    _planes_flags(commands.add_parser("split-planes", help="choose the draft planes"))
    tables = commands.add_parser("kvquant", help="write KVQuant's tables")
    tables.add_argument("--bits", type=int, default=4, metavar="N", help="of a code")
    add = tables.add_argument
    add("--outliers", type=float, default=0.01, metavar="SHARE", help="kept exactly")
    add("--sinks", type=int, default=4, metavar="N", help="first tokens left out")
    add("--equal-weights", action="store_true", help="no gradients; plain k-means")
    orders = commands.add_parser("rotatekv", help="write RotateKV's channel orders")
    orders.add_argument("--rotated-heads", type=int, metavar="N", help="together")
    for sub in (tables, orders):
        _common_flags(sub, context=2048, samples=16)
        add = sub.add_argument
        add("--out", type=Path, required=True, metavar="FILE", help=".safetensors")
        add("--rows", type=int, default=16384, metavar="N", help="tokens looked at")
    return top


def _planes_flags(sub: argparse.ArgumentParser) -> None:
    _common_flags(sub, context=4096, samples=24)
    add = sub.add_argument
    add("--exponent-bits", type=int, nargs="+", default=[2, 3, 4], metavar="E")
    add("--mantissa-bits", type=int, nargs="+", default=[0, 1, 2, 3], metavar="M")
    add("--block", type=int, default=64, metavar="N", help="tokens sharing an exponent")
    add(
        "--compare",
        action="append",
        default=[],
        metavar="LINE",
        help="measure another codec too, such as kivi:bits=2; may be repeated",
    )
    add("--drafts", type=int, nargs="+", default=[16, 32, 64], metavar="X")
    add("--answer", type=int, default=192, metavar="N", help="most tokens of an answer")
    dtypes = ["bfloat16", "float16", "float32"]
    add("--kv-dtype", choices=dtypes, default="bfloat16", help="of the KV pool")
    add("--link-gbps", type=float, default=LINK_GBPS, metavar="G", help="host link")
    add("--memory-gbps", type=float, default=MEMORY_GBPS, metavar="G", help="the GPU's")
    add("--out", type=Path, metavar="FILE", help="save as JSON")
    add("--markdown", type=Path, metavar="FILE", help="save the table")


def _common_flags(sub: argparse.ArgumentParser, *, context: int, samples: int) -> None:
    add = sub.add_argument
    add("model", metavar="MODEL", help="folder or name of a Hugging Face model")
    add(
        "--text",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="prompts, UTF-8; may be repeated; the demo models bring their own",
    )
    add("--context", type=int, default=context, metavar="N", help="tokens of a prompt")
    add("--samples", type=int, default=samples, metavar="N", help="most prompts")
    add("--seed", type=int, default=1)
    add("--device", default="auto", help="of torch; auto: CUDA where present")
    add("--dtype", default="auto", help="of the computation; auto: float32 on a CPU")


def check(args: argparse.Namespace) -> None:
    """Refuse out-of-bounds values before anything is loaded.

    Args:
        args: Parsed command line.

    Raises:
        ConfigError: A value is out of bounds; the message names the flag, the bounds
            and the value.
    """
    for name, (low, high) in BOUNDS.items():
        given = getattr(args, name, None)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not low <= value <= high:
                wanted = f">= {low}" if high == inf else f"{low} to {high}"
                raise ConfigError(f"{_flag(name)} must be {wanted}, got {value}")
    if not 0 <= getattr(args, "outliers", 0) < 1:
        raise ConfigError(f"--outliers must be in [0, 1), got {args.outliers}")
    for name in ("link_gbps", "memory_gbps"):
        if not 0 < getattr(args, name, 1.0) < inf:
            raise ConfigError(f"{_flag(name)} must be > 0, got {getattr(args, name)}")
    for name in ("out", "markdown"):
        _check_file(_flag(name), getattr(args, name, None), Path(args.model))


def _check_file(flag: str, file: Path | None, model: Path) -> None:
    """Refuse an output path that cannot be written, or that a server would read.

    Raises:
        ConfigError: The path is refused; the message names the flag and the file.
    """
    if file is None:
        return
    folder = file.resolve().parent
    if not folder.is_dir() or file.is_dir():
        raise ConfigError(f"{flag} {file}: not a file in a folder that exists")
    if file.suffix == ".safetensors" and folder == model.resolve():
        raise ConfigError(
            f"{flag} {file}: servers read every *.safetensors beside MODEL's weights "
            "as weights; choose another folder"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
