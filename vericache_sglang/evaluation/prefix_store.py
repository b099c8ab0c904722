"""A store of prompts' KV in a folder, and links to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vericache_sglang.evaluation.fleet import ONE_THREAD

if TYPE_CHECKING:
    from collections.abc import Sequence


def write(model: Path, texts: Sequence[str], folder: str, compressor: str = "") -> None:
    """Prepare the KV of prompts in the store, as its users would.

    Args:
        model: Folder of the model.
        folder: Of the store; the prompts are left there too.
        compressor: Chooses the draft KV; "": as the command does.

    Raises:
        RuntimeError: The command failed.
    """
    Path(folder).mkdir(exist_ok=True)
    prompts = Path(folder, "prompts.jsonl")
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    written = subprocess.run(
        [
            *(sys.executable, "-m", "vericache_sglang.compress"),
            *("--model-path", str(model), "--prompts", str(prompts)),
            *("--store", "file", "--store-config", json.dumps({"directory": folder})),
            *(["--compressor", compressor] if compressor else []),
        ],
        env={**os.environ, **ONE_THREAD},
        capture_output=True,
        text=True,
        check=False,
    )
    if written.returncode:
        raise RuntimeError(f"the store was not written: {written.stderr[-2000:]}")


def link(folder: str, mb_per_s: float = 0.0) -> dict[str, str]:
    """Return SGLang's arguments that open a store.

    Args:
        mb_per_s: Reads are delayed as by a link of this bandwidth, and by 1 ms each
            (EMULATED); 0: as fast as they are.
    """
    where: dict[str, object] = {"directory": folder}
    if mb_per_s:
        where |= {"read_mb_per_s": mb_per_s, "latency_ms": 1}
    return {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": json.dumps(where),
    }
