"""SGLang's radix cache with segments on the host and in a store below it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    create_unified_radix_cache,
    default_radix_cache_factory,
    register_radix_cache_backend,
    registered_radix_cache_backends,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from vericache_sglang.errors import InvariantError
from vericache_sglang.kv.row_edit import allocate, free
from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.observability.consistency_check import is_replay

if TYPE_CHECKING:
    from array import array

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import (
        BasePrefixCache,
        CacheRequestHandle,
        InitLoadBackParams,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from vericache_sglang.prefix_cache.cached_segments import CachedSegments

NAME = "vericache"
"""Value of ``--radix-cache-backend`` that selects this cache."""

SHORT_ANSWER = 24
"""Tokens; compressing pays for no answer of at most so many. The throughput model chose
it for no request of 20 tokens behind 3,000 or 8,000 (``bench hardest``)."""


class TieredCache(UnifiedRadixCache):
    """SGLang's radix tree on the device, with evicted segments on lower tiers.

    The tree holds full KV in slots. Whole segments that it evicts move to the host
    (``CachedSegments``) and are restored when a prompt begins with them: the match
    reports a host hit, and SGLang requests the load when it admits the request. Tokens
    that cannot be restored are prefilled.

    Args:
        params: SGLang's parameters of the cache.
        segments: Cached segments below the tree.
    """

    def __init__(self, params: CacheInitParams, segments: CachedSegments) -> None:
        self.segments = segments
        super().__init__(params)
        fits = SEGMENT % self.page_size == 0
        segments.active = fits and not self.disable

    # -- what SGLang calls ----------------------------------------------------------

    def reset(self) -> None:
        """See ``BasePrefixCache``; the host tier is cleared too, the store is not."""
        super().reset()
        self.segments.clear()

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """See ``BasePrefixCache``; a request's match continues on the lower tiers.

        It leaves out the last tokens that a compressor or an inner drafter's head has
        to see: a prompt that is cached as a whole would run one token, whose query
        alone would select the kept tokens. Short answers are exempt: unless the
        residency is forced they are not drafted.
        """
        req, key = params.req, params.key
        if req is not None and not req.kv.holds_kv and not ends_early(req):
            most = max(0, len(key.token_ids) - self.segments.reprefill_tail)
            key = _key_of(req, key.token_ids, min(len(key), most))
            params = replace(params, key=key)
        result = super().match_prefix(params)
        if req is None or not self.segments.active:
            return result
        stop = found = len(result.device_indices)
        with self.segments.cache_only():
            stop = self.segments.reach(self._names(req, key), found)
        return (
            result if stop <= found else result._replace(host_hit_length=stop - found)
        )

    def init_load_back(
        self, params: InitLoadBackParams
    ) -> tuple[torch.Tensor, Any] | None:
        """See ``BasePrefixCache``; loads a match's segments on the host into slots.

        Returns:
            The new slots and the node that ends with them; an empty tensor without free
            slots; None if a segment is corrupt, so that SGLang matches again.
        """
        req = params.req
        if req is None:
            raise InvariantError("SGLang restores a prefix for no request")
        begin = len(req.prefix_indices)
        stop = begin + params.host_hit_length
        key = _key_of(req, req.full_untruncated_fill_ids[:stop])
        if not self.segments.active:
            return None
        slots: torch.Tensor | None = None
        whole = False
        with self.segments.cache_only():
            names = self._names(req, key)
            with self.segments.kept_back(names[begin // SEGMENT :]):
                slots = allocate(self, stop - begin)
                if slots is None:
                    nothing = self.tree_core.empty_match_result.device_indices
                    return nothing, req.last_node
                damaged = self.segments.restore(names, begin, slots)
            for name in damaged:
                self.segments.forget(name)
            whole = not damaged
        if slots is not None and not whole:
            free(self, slots)
        if slots is None or not whole:
            return None
        self.insert(
            InsertParams(
                key=key,
                value=torch.cat([req.prefix_indices.to(torch.int64), slots]),
                prev_prefix_len=begin,
                chunked=True,
                priority=req.priority or 0,
            )
        )
        match = super().match_prefix(MatchPrefixParams(key=key))
        self._register(req, key, match.device_indices)
        return match.device_indices[begin:], match.last_device_node

    def insert_req(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """See ``BasePrefixCache``; also registers the whole segments by name."""
        super().insert_req(req, up_to=up_to, **kwargs)
        if not self.segments.active or up_to < SEGMENT:
            return
        key = _key_of(req, (req.origin_input_ids + req.output_ids)[:up_to])
        match = super().match_prefix(MatchPrefixParams(key=key))
        self._register(req, key, match.device_indices)

    def cache_unfinished_req(
        self, req: Req, chunked: bool = False, **kwargs: Any
    ) -> None:
        """See ``BasePrefixCache``; also registers the whole segments by name.

        The prompt of a consistency check is not inserted, as if there were no cache.
        """
        if is_replay(req.rid):
            row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
            req.prefix_indices = row[: len(req.get_fill_ids())].long()
            return
        super().cache_unfinished_req(req, chunked=chunked, **kwargs)
        owned = req.kv.cache_protected_len
        if self.segments.active and owned >= SEGMENT:
            key = _key_of(req, req.get_fill_ids()[:owned])
            self._register(req, key, req.prefix_indices[:owned])

    # -- draft-segment slots in SGLang's accounting ---------------------------------

    def evictable_size(self) -> int:
        """See ``BasePrefixCache``; includes draft KV that no request uses."""
        own: int = super().evictable_size()
        return own + self.segments.idle_slots

    def full_evictable_size(self) -> int:
        """See ``evictable_size``."""
        own: int = super().full_evictable_size()
        return own + self.segments.idle_slots

    def protected_size(self) -> int:
        """See ``BasePrefixCache``; includes draft KV that requests use."""
        own: int = super().protected_size()
        return own + self.segments.used_slots

    def full_protected_size(self) -> int:
        """See ``protected_size``."""
        own: int = super().full_protected_size()
        return own + self.segments.used_slots

    def _evict(
        self, params: EvictParams, available_size_targets: Any = None
    ) -> EvictResult:
        """See ``UnifiedRadixCache``; draft KV is evicted after all full KV."""
        result = super()._evict(params, available_size_targets)
        missing = params.num_tokens - result.num_tokens_evicted
        if missing > 0 and self.segments.idle_slots:
            with self.segments.cache_only():
                result.num_tokens_evicted += self.segments.evict_drafts(missing)
        return result

    def _free_values(
        self,
        device_frees: dict[ComponentType, list[torch.Tensor]],
        host_frees: dict[ComponentType, list[torch.Tensor]],
    ) -> None:
        """Save the segments that lose slots to an eviction, before these are freed."""
        leaving = device_frees.get(ComponentType.FULL)
        if leaving and self.segments.active:
            with self.segments.cache_only():
                self.segments.leaving(torch.cat(leaving))
        super()._free_values(device_frees, host_frees)

    # -- the store; SGLang calls these while a request waits --------------------------

    def is_backuped(self, node_id: Any) -> bool:
        """Return True: segment names follow from tokens, so any node may be stored."""
        return True

    def get_last_hash_value(self, node_id: Any) -> str | None:
        """Return None: segment names follow from tokens, not from node hashes."""
        return None

    def prefetch_from_storage(
        self,
        request: CacheRequestHandle,
        last_host_node: Any,
        new_input_tokens: array[int],
        *hashes: Any,
        matched_prefix_tokens: array[int] | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        **more: Any,
    ) -> None:
        """Start to fetch the segments that follow the matched prefix from the store."""
        before = matched_prefix_tokens
        tokens = new_input_tokens if before is None else before + new_input_tokens
        if self.segments.stored is not None and self.segments.active:
            with self.segments.cache_only():
                names = self.segments.names((extra_key, cache_salt or None), tokens)
                there = len(tokens) - len(new_input_tokens)
                self.segments.stored.fetch(request.rid, names, there)

    def check_prefetch_progress(self, request: CacheRequestHandle) -> bool:
        """Return whether a request no longer has to wait for the store."""
        stored = self.segments.stored
        if stored is None:
            return True
        waits = False
        with self.segments.cache_only():
            found = stored.found(request.rid)
            waits = found is None or not stored.take(request.rid, found)
        return not waits

    def pop_prefetch_loaded_span(
        self, handle: CacheRequestHandle
    ) -> tuple[int, int | None]:
        """Return the number of tokens fetched from the store, and where they begin."""
        stored = self.segments.stored
        return (0, None) if stored is None else stored.pop(handle.rid)

    def release_aborted_request(self, request: CacheRequestHandle) -> None:
        """Cancel the store fetch of an aborted request."""
        if self.segments.stored is not None:
            self.segments.stored.pop(request.rid)
        super().release_aborted_request(request)

    # -- names -----------------------------------------------------------------

    def _register(self, req: Req, key: RadixKey, slots: torch.Tensor) -> None:
        """Register the segments of a prefix that the tree owns by name."""
        with self.segments.cache_only():
            names = self._names(req, key)[: len(slots) // SEGMENT]
            self.segments.register(names, slots)

    def release_host_resources(self) -> None:
        """See ``BasePrefixCache``; writes segments to the store that it lacks first."""
        self.segments.close()
        super().release_host_resources()

    def _names(self, req: Req, key: RadixKey) -> list[str]:
        """Return the names of a key's whole segments; cached on the request."""
        known: list[str] = getattr(req, "vericache_names", [])
        count = len(key) // SEGMENT
        if len(known) < count:
            namespace = (key.extra_key, key.cache_salt)
            known = self.segments.names(namespace, key.raw_token_ids())
            req.vericache_names = known
        return known[:count]


def ends_early(req: Req) -> bool:
    """Return whether a request is over before compressing its prompt has paid back."""
    most = req.sampling_params.max_new_tokens
    return most is not None and most - len(req.output_ids) <= SHORT_ANSWER


def _key_of(req: Req, tokens: array[int], limit: int | None = None) -> RadixKey:
    return RadixKey(tokens, req.extra_key, limit=limit, cache_salt=req.cache_salt)


def register() -> None:
    """Register the cache with SGLang, once per process."""
    if NAME not in registered_radix_cache_backends():
        register_radix_cache_backend(NAME, _create)


def _create(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    """Return SGLang's default cache, with cached segments below a radix tree."""
    segments = getattr(ctx.params.req_to_token_pool, "segments", None)
    if ctx.disable_radix_cache or segments is None:
        return default_radix_cache_factory(ctx)

    def build(params: CacheInitParams) -> TieredCache:
        return TieredCache(params, segments)

    return create_unified_radix_cache(ctx, cache_class=build)
