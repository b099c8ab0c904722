"""Builds the prefix cache below SGLang's radix tree."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vericache_sglang.compression.about import UNKNOWN
from vericache_sglang.compression.base import SELECTORS
from vericache_sglang.compression.codecs.base import CODECS
from vericache_sglang.errors import StoreError
from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.prefix_cache.cached_segments import CachedSegments
from vericache_sglang.prefix_cache.segment_copies import SegmentCopies
from vericache_sglang.prefix_cache.segment_tiers import Identity
from vericache_sglang.prefix_cache.store.keys import codec_identity
from vericache_sglang.prefix_cache.store.opening import (
    fingerprint_of,
    identity_of,
    open_store,
)
from vericache_sglang.prefix_cache.store.segment_store import StoreCodec
from vericache_sglang.prefix_cache.store.stored_segments import StoredSegments

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from vericache_sglang.compression.base import Selector
    from vericache_sglang.compression.codecs.base import Codec
    from vericache_sglang.compression.compressor import Compressor
    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.prefix_cache.ranks import Ranks
    from vericache_sglang.prefix_cache.store.objects import Tensors

HEAD_TAIL = 64
"""Last tokens of a cached prompt that are computed again so that a head reads them: six
answers of 45 tokens behind cached prompts took 66 to 89 iterations without, 26 with."""


def open_segments(
    config: VeriCacheConfig,
    compressor: Compressor,
    handles: KVHandles,
    ranks: Ranks,
    free: Callable[[torch.Tensor], None],
    server_args: Any = None,
) -> CachedSegments:
    """Return an empty segment cache.

    Args:
        config: Frozen settings.
        compressor: Bound to the model.
        handles: Pool, block table, host memory.
        ranks: Agrees with other ranks, and prices moves and prefills.
        free: Frees slots in SGLang's allocator.
        server_args: SGLang's, for the model's identity and the store; None: segments
            are not shared with other servers.

    Raises:
        ConfigError: The store does not open.
    """
    geometry, host = handles.geometry, handles.host
    copies = SegmentCopies(handles)
    backend = getattr(server_args, "hicache_storage_backend", None)
    identity = Identity(
        fingerprint_of(geometry, host.dtype, config, server_args if backend else None),
        identity_of(config.compressor, config),
    )
    selector = compressor.selector
    seen = 0 if selector is None else selector.needs.q_tail
    tail = max(seen, HEAD_TAIL if config.inner_head else 0)
    segments = CachedSegments(copies, handles, identity, free, ranks, tail)
    if backend:
        # A segment has one name on all ranks, in the store one key for each.
        own = replace(identity.model, tp_rank=ranks.rank)
        store = open_store(server_args, config, own)
        segments.stored = StoredSegments(
            store,
            identity.compressor,
            segments.take_in,
            _better(config),
            kept=lambda: segments.kept,
        )
        segments.stored.alone = ranks.alone
        segments.stored.awaits_whole = config.decodes_locally
        segments.stored.prefill_s = lambda before, tokens: float(
            ranks.prices(segments.stored).prefill_s(np.array(before), np.array(tokens))
        )
        if compressor.codec is not None:
            store.codec = _store_codec(compressor.codec.without_tail(), copies)
    host.evictor = segments.make_room
    return segments


def _better(config: VeriCacheConfig) -> list[str]:
    """Return the compressors whose stored draft KV is preferred to this server's own.

    ``python -m vericache_sglang.compress`` runs them offline, with additional forwards;
    a prefix is upgraded when it is next fetched from the store.
    """
    own, plus, codec = config.compressor.partition("+")
    if _mode(own.partition(":")[0]) == "offline" or own.partition(":")[0] in CODECS:
        return []
    names = [name for name in SELECTORS.names() if _mode(name) == "offline"]
    return [identity_of(f"{name}{plus}{codec}", config) for name in names]


def _store_codec(codec: Codec, copies: SegmentCopies) -> StoreCodec:
    """Return what the store writes and reads packed draft KV with."""

    def check(draft: Tensors, rest: Tensors | None) -> None:
        if copies.codes is None:
            raise StoreError("codes", "are read before their codec is there")
        copies.codes.check(draft, rest, SEGMENT)

    return StoreCodec(codec_identity(codec.identity), SEGMENT, check)


def _mode(line: str) -> str:
    """Return the mode of a registered selector, ``online`` or ``offline``."""
    if line not in SELECTORS:
        return UNKNOWN.mode
    return getattr(SELECTORS[line], "about", UNKNOWN).mode


def may_be_shared(selector: Selector | None) -> bool:
    """Return whether a selection is valid for other prompts with the same prefix.

    It is not if it depends on the last queries, or if the prompt determines how many of
    its tokens are kept. Without a selector all are.
    """
    return selector is None or (selector.follows_keep and not selector.needs.q_tail)


def shares_draft_kv(compressor: Compressor, segments: CachedSegments) -> bool:
    """Return whether prompts share the draft KV of segments.

    Packed draft KV only on a server of one rank with a store.
    """
    if compressor.codec is not None and (
        segments.stored is None or not segments.stored.alone
    ):
        return False
    return may_be_shared(compressor.selector)
