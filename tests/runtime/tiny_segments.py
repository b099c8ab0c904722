"""A tiny engine whose tree has segments below it, and texts with common prefixes."""

import zlib
from array import array
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from known_kv import DIM, HEADS, LAYERS, KnownKV
from segment_checks import SegmentChecks
from segment_world import SHORT
from sglang.srt.mem_cache.base_prefix_cache import (
    InitLoadBackParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from tiny_engine import TinyEngine

from vericache_sglang.prefix_cache.tiered_cache import TieredCache


class BranchedKV(KnownKV):
    """Texts may branch: ``x/16/y`` begins with 16 tokens of ``x``."""

    def truth(self, text):
        """Return a text's KV [L, 2, T, H, D] as integers, and scores [L, H, T]."""
        if text not in self._texts and "/" in text:
            base, start, _ = text.split("/")
            kv, scores = (each.clone() for each in super().truth(base))
            at = int(start)
            kv[:, :, at:] = self.drawn(kv.shape[2] - at)
            shape = scores[..., at:].shape
            scores[..., at:] = torch.randn(shape, generator=self._random)
            self._texts[text] = kv, scores
        return super().truth(text)


class TieredEngine(TinyEngine):
    """A ``TinyEngine`` with a ``TieredCache``.

    Attributes:
        segments: What is known of cached prefixes.
        truths: By name, the bits [L, 2, SHORT, H, D] a segment may have: those of the
            prompt, or of what some request decoded there.
    """

    def __init__(self, slots=160, host_segments=1000, **options):
        itemsize = options.get("dtype", torch.float32).itemsize
        token_bytes = LAYERS * 2 * HEADS * DIM * itemsize
        gib = host_segments * SHORT * token_bytes / 2**30
        super().__init__(slots=slots, host_gb=gib, **options)
        self.kv = BranchedKV(self.pool, self.dtype)
        self.truths = {}
        self.scarce = host_segments < 1000
        self._said = {}
        self.checks = SegmentChecks(self)

    @property
    def segments(self):
        return self.placement.segments

    def open_tree(self, params):
        return TieredCache(params, self.placement.segments)

    def ids(self, text, tokens):
        base, start, *_ = [*text.split("/"), 0]
        own = zlib.crc32(text.encode()) % 10**6 * 1000
        found = array("q", [own + i for i in range(tokens)])
        if "/" in text:
            shared = min(int(start), tokens)
            found[:shared] = self.ids(base, shared)
        return found

    def names(self, ids):
        """Return the names of the whole segments of a text."""
        return self.segments.names((None, None), ids)

    def match(self, rid, ids):
        """Match as SGLang's scheduler does, and bring the host's part back."""
        key = RadixKey(ids[:-1], None)
        req = SimpleNamespace(
            rid=rid,
            full_untruncated_fill_ids=ids,
            output_ids=[],
            kv=SimpleNamespace(holds_kv=False),
            sampling_params=SimpleNamespace(max_new_tokens=1000),
            extra_key=None,
            cache_salt=None,
            priority=0,
            session=None,
            session_id=None,
        )
        match = self.tree.match_prefix(MatchPrefixParams(key=key, req=req))
        cached, node = match.device_indices, match.last_device_node
        if not match.host_hit_length:
            return cached, node
        req.prefix_indices, req.last_node = cached, node
        receipt = self.tree.inc_lock_ref(node).to_dec_params()
        loaded = self.tree.init_load_back(
            InitLoadBackParams(
                best_match_node=node, host_hit_length=match.host_hit_length, req=req
            )
        )
        self.tree.dec_lock_ref(node, receipt)
        if loaded is None:  # damaged: SGLang asks again later
            return self.match(rid, ids)
        assert len(loaded[0]) in (0, match.host_hit_length), "all or nothing"
        return torch.cat([cached, loaded[0]]), loaded[1]

    def same_scores(self, cached, scores):
        """As above, or as nobody scored them where the host had no room for scores."""
        noted = self.placement.observer.noted(cached)
        if noted:
            found, wanted = torch.stack(noted).cpu(), scores[..., : len(cached)]
            own = found == wanted
            assert torch.all(own | found.isnan()), "the tree's scores"
            assert self.scarce or own.all(), "there was room for all scores"

    def exact(self, text, position, tokens):
        """Return the same for the same tokens: the tree may join what two decoded."""
        base, start, *_ = [*text.split("/"), 0]
        said = []
        for at in range(position, position + tokens):
            key = (base if at < int(start) else text), at
            if key not in self._said:
                self._said[key] = self.kv.drawn(1)
            said.append(self._said[key])
        return torch.cat(said, dim=2)

    def admit(self, rid, text, tokens, insertable=True):
        kv = self.kv.truth(text)[0]
        for at, name in enumerate(self.names(self.ids(text, tokens))):
            bits = kv[:, :, at * SHORT : (at + 1) * SHORT]
            self.truths.setdefault(name, [bits])
        return super().admit(rid, text, tokens, insertable)

    def finish(self, rid):
        self._note_decoded(self.requests[rid])
        super().finish(rid)

    def _note_decoded(self, request):
        """Note what a request may leave behind under a name."""
        state = request.state
        ids = state.req.origin_input_ids + state.req.output_ids
        kv = self.kv.truth(request.text)[0][:, :, : state.prompt]
        kv = torch.cat([kv, *request.decoded], dim=2)[:, :, : state.verified]
        for at, name in enumerate(self.names(ids[: kv.shape[2]])):
            bits = kv[:, :, at * SHORT : (at + 1) * SHORT]
            self.truths.setdefault(name, []).append(bits)

    def damage(self, name):
        """Flip a bit of what the host has of a segment."""
        rest = self.segments.residual(name)
        if rest is None:
            (rest,) = self.segments.copies.index.find(name).images.values()
        rest.tensors["keys"].raw(LAYERS - 1)[0][0] ^= 1


@contextmanager
def tiered(**options):
    """Open a ``TieredEngine`` and stop its threads afterwards."""
    engine = TieredEngine(**options)
    try:
        yield engine
    finally:
        engine.placement.close()
