"""``python -m vericache_sglang.compress``: prepares prefixes in a store.

The server that reads the store then serves them without a prefill, and drafts on the
KV chosen here, whatever the method cost.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.errors import ConfigError, VeriCacheError
from vericache_sglang.kv.segment_length import SEGMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

PATIENCE_S = 600.0
"""Timeout for writing the last segment, in seconds."""

STEPS = 8
"""Tokens decoded after a prompt, beyond its probes, while it is compressed."""

PROBED = 1024
"""Minimum prompt tokens that one probe of an offline method covers."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vericache_sglang.compress", description=__doc__
    )
    add = parser.add_argument
    add("--model-path", required=True)
    add(
        "--prompts",
        required=True,
        type=Path,
        help='JSON lines, each {"text": ...}: prefixes as requests will begin',
    )
    add("--store", default="file", choices=("file", "mooncake", "dynamic"))
    add(
        "--store-config",
        default="{}",
        help="as --hicache-storage-backend-extra-config of the server",
    )
    for name in ("store_key", "store_shared_folder"):
        default = getattr(VeriCacheConfig(), name)
        flag = f"--{name.replace('_', '-')}"
        add(flag, default=default, help=f"as --vericache{flag[1:]} of the server")
    add("--compressor", default="kvzip")
    add("--keep", type=float, default=0.25)
    add(
        "--engine",
        default="{}",
        help="further arguments of sglang.Engine, a JSON object",
    )
    return parser.parse_args(argv)


def prompts_in(file: Path) -> list[str]:
    """Read the prompts.

    Raises:
        ConfigError: The file cannot be read, or a line is malformed.
    """
    try:
        lines = file.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--prompts {file}: {error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        where = f"--prompts {file}, line {number}"
        try:
            prompt = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        if not isinstance(prompt, dict) or not isinstance(prompt.get("text"), str):
            raise ConfigError(f'{where}: wanted {{"text": ...}}')
        unknown = sorted(prompt.keys() - {"text"})
        if unknown:
            raise ConfigError(f"{where}: unknown field {unknown[0]!r}")
        prompts.append(prompt["text"])
    return prompts


def open_engine(options: argparse.Namespace) -> Any:
    """Start an engine that compresses every prompt it gets and writes to the store.

    Raises:
        ConfigError: ``--engine`` is not a JSON object.
    """
    try:
        given = json.loads(options.engine)
    except ValueError as error:
        raise ConfigError(f"--engine: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"--engine: wanted a JSON object, got {options.engine}")
    os.environ["VERICACHE_CONFIG"] = json.dumps(
        {
            "compressor": options.compressor,
            "keep": options.keep,
            "residency": "host",
            "min_prompt": SEGMENT,
            "store_key": options.store_key,
            "store_shared_folder": options.store_shared_folder,
        }
    )
    from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

    define_missing_ops()
    refuse_unshared(options.compressor, int(given.get("tp_size", 1)))
    import sglang
    import torch

    from vericache_sglang.serving.launch import CPU_DEFAULTS

    defaults = (
        {}
        if torch.cuda.is_available()
        else {
            field: int(value) if value.isdigit() else value
            for field, (value, _) in CPU_DEFAULTS.items()
        }
    )
    return sglang.Engine(
        **{
            **defaults,
            "model_path": options.model_path,
            "speculative_algorithm": "VERICACHE",
            "hicache_storage_backend": options.store,
            "hicache_storage_backend_extra_config": options.store_config,
            "log_level": "warning",
            **given,
        }
    )


def refuse_unshared(line: str, ranks: int) -> None:
    """Refuse a compressor whose draft KV no other prompt can use.

    Raises:
        ConfigError: It cannot be stored; the message names the flag and the remedy.
    """
    from vericache_sglang.compression.catalog import create_compressor
    from vericache_sglang.prefix_cache.assembly import may_be_shared

    made = create_compressor(line, 0)
    if not may_be_shared(made.selector):
        raise ConfigError(
            f"--compressor {line}: which tokens it keeps depends on the question behind"
            " a prefix, or on its length: no other prompt can use them. Choose kvzip, "
            "kvzap without a threshold, keynorm or a codec"
        )
    if made.codec is not None and ranks > 1:
        raise ConfigError(
            f"--compressor {line}: draft KV that a codec packs is stored by a single "
            f"rank, and --engine asks for a tp_size of {ranks}. Leave the codec out"
        )


def counters(engine: Any) -> dict[str, Any]:
    """Return the engine's report of its prefix cache."""
    states = engine.get_server_info()["internal_states"]
    report: dict[str, Any] = states[0]["vericache"]
    return report


def compress(engine: Any, prompts: list[str]) -> dict[str, Any]:
    """Compress every prompt in order and wait until every segment is written.

    Prints a line per prompt, and while segments wait to be written.

    Returns:
        The engine's last report.

    Raises:
        VeriCacheError: Writing takes longer than ``PATIENCE_S``.
    """
    tokenizer = engine.tokenizer_manager.tokenizer
    for number, prompt in enumerate(prompts, 1):
        length = len(tokenizer.encode(prompt))
        steps = STEPS + length // PROBED
        params = {"temperature": 0.0, "max_new_tokens": steps, "ignore_eos": True}
        engine.generate(prompt, params)
        print(f"{number} of {len(prompts)}: {length // SEGMENT} segments", flush=True)
    deadline, printed = time.monotonic() + PATIENCE_S, 0
    while waiting := (report := counters(engine))["cache_store_waiting"]:
        if time.monotonic() > deadline:
            raise VeriCacheError("the store takes too long to write")
        if waiting != printed:
            print(f"{waiting} segments wait to be written", flush=True)
            printed = waiting
        time.sleep(0.1)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: compress every prompt, write to the store and report.

    Args:
        argv: The command line without the program; None takes the process's own.

    Returns:
        Exit status: 0, or 2 if a setting was refused or a segment was not stored.
    """
    options = arguments(argv)
    try:
        prompts = prompts_in(options.prompts)
        engine = open_engine(options)
        try:
            report = compress(engine, prompts)
        finally:
            engine.shutdown()
    except VeriCacheError as error:
        print(f"vericache: error: {error}", file=sys.stderr, flush=True)
        return 2
    names = ("written_bytes", "written_draft_bytes", "dropped_writes")
    written, draft, dropped = (report[f"cache_store_{name}"] for name in names)
    print(
        f"{written} bytes written, {draft} of them draft KV; "
        f"{dropped} segments not stored",
        flush=True,
    )
    return 2 if dropped else 0


if __name__ == "__main__":
    sys.exit(main())
