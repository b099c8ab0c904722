"""Fingerprint of a model's weights, to detect calibration files of other models."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from vericache_sglang.errors import ConfigError

VOLATILE = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")
"""Keys of a config.json that do not affect the model's computation."""

SAMPLES = 16
"""Number of evenly spaced samples read from a weight file."""

SAMPLE_BYTES = 4096


def model_fingerprint(folder: Path | str) -> str:
    """Return a fingerprint of a model's config and samples of its weights.

    Reading every weight of a large model takes minutes. Names, sizes, file headers
    (where safetensors list their tensors) and a few samples of each file distinguish
    models, their fine-tunings and their quantizations; a manual change of a few weights
    may not be detected.

    Args:
        folder: Folder with ``config.json`` and weights, ``*.safetensors`` or ``*.bin``.

    Returns:
        12 hex digits, independent of the folder's path.

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
    """Read the header of a file and samples up to its end."""
    last = max(0, file.stat().st_size - SAMPLE_BYTES)
    with file.open("rb") as content:
        found = []
        for number in range(SAMPLES):
            content.seek(last * number // (SAMPLES - 1))
            found.append(content.read(SAMPLE_BYTES))
    return found
