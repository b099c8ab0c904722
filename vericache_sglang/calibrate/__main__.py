"""The command: ``python -m vericache_sglang.calibrate split-planes MODEL ...``."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from vericache_sglang.calibrate.arguments import PROGRAM, check, parser
from vericache_sglang.errors import ConfigError, VeriCacheError
from vericache_sglang.provenance import provenance

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; 2 for a wrong flag, file or model.

    Args:
        argv: Command-line arguments; None takes the process's own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(words)
    try:
        check(args)
        _COMMANDS[args.command](args, words)
    except VeriCacheError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _split_planes(args: argparse.Namespace, argv: list[str]) -> None:
    """Measure, print, save."""
    # What needs torch and transformers is imported once the flags are known good.
    import torch

    from vericache_sglang.calibrate import acceptance, planes, report, subject, texts
    from vericache_sglang.compression.codecs.catalog import create_codec

    lines = planes.grid(args.exponent_bits, args.mantissa_bits, args.block)
    codecs = [create_codec(line) for line in [*lines, *args.compare]]
    if not lines:
        raise ConfigError("--exponent-bits and --mantissa-bits: no pair fits a byte")
    measured, tokenizer = subject.load(args.model, args.device, args.dtype)
    for codec in codecs:
        codec.check_model(measured.spec())
    model, sinks = measured.model(), any(codec.needs.resid_in for codec in codecs)
    dtype, lengths = getattr(torch, args.kv_dtype), sorted(set(args.drafts))
    readings = []
    for prompt in texts.prompts(tokenizer, measured.folder, args.text, **_drawn(args)):
        found = acceptance.read(measured, prompt, args.answer, dtype, sinks=sinks)
        if len(found.answer) > 1:
            readings.append(found)
    if not readings:
        raise ConfigError("--text: the model ends every answer at once, no drafts")
    points = []
    for line in [*lines, *args.compare]:
        points.append(planes.measure(measured, line, readings, lengths))
        print(f"measured {line}", file=sys.stderr, flush=True)
    ratio = args.link_gbps / args.memory_gbps
    choice = planes.choose(points[: len(lines)], ratio)
    setting = report.Setting(
        origin=provenance(argv, PROGRAM),
        model=model,
        device=str(measured.like.device),
        dtype=args.kv_dtype,
        ratio=ratio,
        prompts=len(readings),
        prompt_tokens=sum(r.prompt for r in readings) / len(readings),
        answer_tokens=sum(len(r.answer) for r in readings) / len(readings),
        limit=report.limits(readings, lengths),
    )
    page = report.markdown(setting, points, choice)
    print(page, end="")
    if args.out is not None:
        whole = report.as_json(setting, points, choice)
        _write("--out", args.out, json.dumps(whole, indent=2) + "\n")
    if args.markdown is not None:
        _write("--markdown", args.markdown, page)


def _kvquant(args: argparse.Namespace, argv: list[str]) -> None:
    """Calibrate and write."""
    from vericache_sglang.calibrate import subject, tables, texts

    measured, tokenizer = subject.load(args.model, args.device, args.dtype)
    prompts = texts.prompts(tokenizer, measured.folder, args.text, **_drawn(args))
    sampling = tables.Sampling(
        rows=args.rows,
        sinks=args.sinks,
        gradients=not args.equal_weights,
        seed=args.seed,
    )
    # Gradients need a next token, rows one that is no sink.
    prompts = [prompt for prompt in prompts if len(prompt) > args.sinks + 1]
    if not prompts:
        raise ConfigError(f"--sinks {args.sinks}: no prompt has more tokens")
    made = tables.kvquant(
        measured,
        prompts,
        args.out,
        sampling,
        bits=args.bits,
        outliers=args.outliers,
    )
    _wrote(args, f"{made.bits} bits, {made.columns} columns")


def _rotatekv(args: argparse.Namespace, argv: list[str]) -> None:
    """Calibrate and write."""
    from vericache_sglang.calibrate import subject, tables, texts

    measured, tokenizer = subject.load(args.model, args.device, args.dtype)
    prompts = texts.prompts(tokenizer, measured.folder, args.text, **_drawn(args))
    sampling = tables.Sampling(rows=args.rows, massive=True, seed=args.seed)
    made = tables.rotatekv(measured, prompts, args.out, sampling, args.rotated_heads)
    _wrote(args, f"{made.rotated_heads} heads rotated together")


def _drawn(args: argparse.Namespace) -> dict[str, int]:
    return {"context": args.context, "count": args.samples, "seed": args.seed}


def _wrote(args: argparse.Namespace, what: str) -> None:
    size = args.out.stat().st_size
    print(f"{args.out}: {what}, {size} bytes; use `{args.command}:tables={args.out}`")


def _write(flag: str, file: Path, text: str) -> None:
    """Write a text file.

    Raises:
        ConfigError: It cannot be written; the message names the flag.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag}: {file} cannot be written: {error}") from error


_COMMANDS: dict[str, Callable[[argparse.Namespace, list[str]], None]] = {
    "split-planes": _split_planes,
    "kvquant": _kvquant,
    "rotatekv": _rotatekv,
}

if __name__ == "__main__":
    sys.exit(main())
