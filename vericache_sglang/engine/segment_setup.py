"""Puts together what keeps cached prefixes below SGLang's tree."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download

from vericache_sglang.compression.about import UNKNOWN
from vericache_sglang.compression.base import SELECTORS, Selector
from vericache_sglang.engine.cached_segments import CachedSegments
from vericache_sglang.engine.segment_copies import SegmentCopies
from vericache_sglang.engine.segment_room import Identity
from vericache_sglang.engine.segment_splitter import SegmentSplitter
from vericache_sglang.engine.stored_segments import StoredSegments
from vericache_sglang.errors import ConfigError
from vericache_sglang.memory.complement import RawComplement
from vericache_sglang.memory.segment_complements import SegmentComplements
from vericache_sglang.memory.segment_pool import SegmentPool
from vericache_sglang.store.backend import open_backend
from vericache_sglang.store.keys import (
    Fingerprint,
    compressor_identity,
    model_digest,
)
from vericache_sglang.store.segment_store import SegmentStore
from vericache_sglang.tiers.prices import Prices

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from vericache_sglang.compression.compressor import Compressor
    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.engine.places import Places
    from vericache_sglang.scheduling.estimates import Estimates
    from vericache_sglang.store.backend import Backend

DISTRIBUTION = "vericache-sglang"

FOLDER_VARIABLE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
"""Where SGLang's own ``file`` backend reads its folder."""

PRICED = 4 << 20
"""Bytes of a copy whose speed prices moves: about a segment of a large model."""


def open_segments(
    config: VeriCacheConfig,
    compressor: Compressor,
    places: Places,
    estimates: Estimates,
    free: Callable[[torch.Tensor], None],
    server_args: Any = None,
) -> tuple[CachedSegments, SegmentSplitter]:
    """Return what is cached, empty, and what splits prompts so that they share it.

    Args:
        config: Frozen settings.
        compressor: Bound to the model.
        places: Pool, row table, host memory.
        estimates: Price moves and prefills.
        free: Gives slots back to SGLang's allocator.
        server_args: SGLang's, for the model's identity and the store; None: segments
            are nobody else's.

    Raises:
        ConfigError: The store does not open.
    """
    geometry, host = places.geometry, places.host
    arena = host.arena

    def make(slots: int, kept: int) -> RawComplement:
        return RawComplement(geometry, slots, kept, host.dtype, arena)

    complements = SegmentComplements(make, RawComplement.free)
    copies = SegmentCopies(places, SegmentPool(arena), complements)
    backend = getattr(server_args, "hicache_storage_backend", None)
    identity = Identity(
        _fingerprint(places, server_args if backend else None),
        compressor_identity(config.compressor, config.keep, version(DISTRIBUTION)),
    )
    selector = compressor.selector
    tail = 0 if selector is None else selector.needs.q_tail
    segments = CachedSegments(
        copies, places, identity, free, lambda: _prices(estimates, segments), tail
    )
    shared = selector if compressor.codec is None and _may_be_shared(selector) else None
    if backend:
        store = SegmentStore(_open_backend(server_args, identity.model), identity.model)
        segments.stored = StoredSegments(
            store, identity.compressor, segments.take_in, _better(config)
        )
    host.evictor = segments.make_room
    return segments, SegmentSplitter(config, shared, places, segments)


def _better(config: VeriCacheConfig) -> list[str]:
    """Return whose parts are taken from a store before those made while requests run.

    ``python -m vericache_sglang.compress`` makes them with further forwards, whatever
    that costs: a prefix is upgraded when it next comes from the store.
    """
    lines = [name for name in SELECTORS.names() if _mode(name) == "offline"]
    return [
        compressor_identity(line, config.keep, version(DISTRIBUTION))
        for line in lines
        if _mode(config.compressor.partition(":")[0]) != "offline"
    ]


def _mode(line: str) -> str:
    """Return whether a selector of ours is chosen ``online`` or ``offline``."""
    if line not in SELECTORS:
        return UNKNOWN.mode
    return getattr(SELECTORS[line], "about", UNKNOWN).mode


def _fingerprint(places: Places, server_args: Any) -> Fingerprint:
    """Return what tells the KV of this model and rank from any other."""
    geometry = places.geometry
    anybody = Fingerprint(
        model="",
        weights="",
        dtype="",
        kv_dtype=str(places.host.dtype).removeprefix("torch."),
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        v_head_dim=geometry.v_head_dim,
    )
    if server_args is None:
        return anybody
    named = server_args.served_model_name
    return replace(
        anybody,
        # By default it is the path, which may differ between servers.
        model="" if named == server_args.model_path else str(named),
        weights=model_digest(_folder_of(server_args)),
        dtype=f"{server_args.dtype} on {server_args.device}",
        quantization=str(server_args.quantization or ""),
    )


def _folder_of(server_args: Any) -> Path:
    """Return the folder the weights were loaded from.

    Raises:
        ConfigError: There is none whose contents could be compared.
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


def _open_backend(server_args: Any, fingerprint: Fingerprint) -> Backend:
    """Open the storage backend that SGLang's own flags name.

    Raises:
        ConfigError: It does not open, or its configuration is not a JSON object.
    """
    name = server_args.hicache_storage_backend
    text = server_args.hicache_storage_backend_extra_config or "{}"
    try:
        given = Path(text[1:]).read_text() if text.startswith("@") else text
        extra = json.loads(given)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--hicache-storage-backend-extra-config: wanted a JSON object: {error}"
        ) from error
    if not isinstance(extra, dict):
        raise ConfigError(
            f"--hicache-storage-backend-extra-config: wanted a JSON object, got {text}"
        )
    folder = extra.pop("directory", None) or os.environ.get(FOLDER_VARIABLE, "")
    return open_backend(name, fingerprint, folder, extra)


def _may_be_shared(selector: Selector | None) -> bool:
    """Say whether a choice serves other prompts with the same prefix.

    Not so where it depends on the last queries, or where the prompt decides how much
    of it is kept.
    """
    if selector is None or selector.needs.q_tail:
        return False
    return type(selector).keep_share is Selector.keep_share


def _prices(estimates: Estimates, segments: CachedSegments) -> Prices:
    """Return what the server has measured."""
    stored = segments.stored
    iteration, link = estimates.iteration.coefficients, estimates.link
    return Prices(
        link_in_s_per_byte=1 / link.bytes_per_s(PRICED, "in"),
        link_out_s_per_byte=1 / link.bytes_per_s(PRICED, "out"),
        store_latency_s=0.0,
        store_s_per_byte=inf if stored is None else stored.s_per_byte,
        prefill_s_per_token=iteration.per_token_s,
        # Every token is multiplied with half of those before it.
        prefill_s_per_square=iteration.per_product_s / 2,
    )
