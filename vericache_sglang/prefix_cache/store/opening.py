"""Opens the store that SGLang's own flags select, for the model of a server."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download

from vericache_sglang.errors import ConfigError
from vericache_sglang.prefix_cache.store.backend import open_backend
from vericache_sglang.prefix_cache.store.keys import (
    Fingerprint,
    compressor_identity,
    model_digest,
    read_key,
)
from vericache_sglang.prefix_cache.store.segment_store import SegmentStore

if TYPE_CHECKING:
    import torch

    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.kv.geometry import KVGeometry

DISTRIBUTION = "vericache-sglang"

FOLDER_VARIABLE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
"""Environment variable with the folder of SGLang's own ``file`` backend."""


def identity_of(line: str, config: VeriCacheConfig) -> str:
    """Return the identity of a compressor's draft KV in this version."""
    return compressor_identity(line, config.keep, version(DISTRIBUTION))


def fingerprint_of(
    geometry: KVGeometry,
    kv_dtype: torch.dtype,
    config: VeriCacheConfig,
    server_args: Any = None,
) -> Fingerprint:
    """Return the identity of the KV of a model; that of rank 0 if there are several.

    Args:
        geometry: Geometry of the rank's KV.
        kv_dtype: Dtype of the KV pool.
        config: Names the file with the key of the seals.
        server_args: SGLang's; None: segments are never shared with another server.

    Raises:
        ConfigError: The weights or the key cannot be read.
    """
    shape: dict[str, Any] = {
        "kv_dtype": str(kv_dtype).removeprefix("torch."),
        "layers": geometry.layers,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "v_head_dim": geometry.v_head_dim,
    }
    if server_args is None:
        return Fingerprint(model="", weights="", dtype="", **shape)
    named = server_args.served_model_name
    return Fingerprint(
        # The default name is the path, which may differ between servers.
        model="" if named == server_args.model_path else str(named),
        weights=model_digest(_folder_of(server_args)),
        dtype=f"{server_args.dtype} on {server_args.device}",
        quantization=str(server_args.quantization or ""),
        tp_size=server_args.tp_size,
        key=b"" if config.store_key == "off" else read_key(config.store_key),
        **shape,
    )


def open_store(
    server_args: Any, config: VeriCacheConfig, fingerprint: Fingerprint
) -> SegmentStore:
    """Open the storage backend that SGLang's own flags select.

    Raises:
        ConfigError: It does not open, or its configuration is not a JSON object.
    """
    text = server_args.hicache_storage_backend_extra_config or "{}"
    try:
        extra = json.loads(Path(text[1:]).read_text() if text[0] == "@" else text)
        if not isinstance(extra, dict):
            raise ValueError(f"got {text}")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--hicache-storage-backend-extra-config: wanted a JSON object: {error}"
        ) from error
    name = server_args.hicache_storage_backend
    if name == "file":
        extra.setdefault("directory", os.environ.get(FOLDER_VARIABLE))
    shared = config.store_shared_folder == "on"
    return SegmentStore(open_backend(name, fingerprint, extra, shared), fingerprint)


def _folder_of(server_args: Any) -> Path:
    """Return the folder the weights were loaded from.

    Raises:
        ConfigError: The weights are not in a local folder.
    """
    folder = Path(server_args.model_path)
    if folder.is_dir():
        return folder
    try:
        found = snapshot_download(
            server_args.model_path, revision=server_args.revision, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            "--hicache-storage-backend: wanted a local folder or a downloaded "
            f"repository as --model-path, to tell its KV from others: {error}"
        ) from error
    return Path(found)
