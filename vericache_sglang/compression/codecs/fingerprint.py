"""A short name for a model's weights, so that its calibration fits no other model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from vericache_sglang.errors import ConfigError

VOLATILE = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")
"""Keys of a config.json that say nothing about what the model computes."""

SAMPLES = 16
"""Places of a weight file that are read, evenly spaced."""

SAMPLE_BYTES = 4096


def model_fingerprint(folder: Path | str) -> str:
    """Name a model by its config and samples of its weights.

    Reading every weight of a large model takes minutes. Names, sizes, the heads of the
    files (where safetensors list their tensors) and a few places in each tell models,
    their fine-tunings and their quantizations apart; a hand-made change of a few
    weights may go unseen.

    Args:
        folder: With a ``config.json`` and weights, ``*.safetensors`` or ``*.bin``.

    Returns:
        12 hex digits, the same wherever the folder lies.

    Raises:
        ConfigError: The folder holds no such files; the message names it.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no readable config.json: {error}") from error
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not weights:
        raise ConfigError(f"{folder}: no weights, neither *.safetensors nor *.bin")
    kept = {key: value for key, value in config.items() if key not in VOLATILE}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for file in weights:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        for sample in _samples(file):
            digest.update(sample)
    return digest.hexdigest()[:12]


def _samples(file: Path) -> list[bytes]:
    """Read the head of a file and places up to its end."""
    last = max(0, file.stat().st_size - SAMPLE_BYTES)
    with file.open("rb") as content:
        found = []
        for number in range(SAMPLES):
            content.seek(last * number // (SAMPLES - 1))
            found.append(content.read(SAMPLE_BYTES))
    return found
