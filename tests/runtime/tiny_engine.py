"""Residence over a tiny pool, SGLang's own tree and allocator, and KV that is known.

Nothing runs a model: prefills and decodes write what they are told.
"""

import time
from array import array
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import torch
from known_kv import DIM, HEADS, LAYERS, LONGEST, KnownKV, in_order, parted
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from tiny_checks import TinyChecks
from tiny_selector import Noted, OfKeys, of_one_prompt
from tiny_streams import Streams

from vericache_sglang.compression.codecs.catalog import create_codec
from vericache_sglang.compression.compressor import Compressor
from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.kv import host_pages
from vericache_sglang.kv.request import RequestState
from vericache_sglang.kv.row_edit import allocate, room
from vericache_sglang.kv.sglang_pools import staged_pool_class
from vericache_sglang.observability.request_stats import RequestStats
from vericache_sglang.planning.block_table import block_table_shape
from vericache_sglang.platforms.cpu.paged_allocator import TorchPagedAllocator
from vericache_sglang.runtime import placement
from vericache_sglang.runtime.block_table import BlockTablePool
from vericache_sglang.runtime.forward.rows import MixedRows
from vericache_sglang.runtime.placement import KVPlacement
from vericache_sglang.runtime.tp_sync import TensorParallelSync
from vericache_sglang.sampling.profile import GREEDY_FAST
from vericache_sglang.scheduling.estimates import Estimates
from vericache_sglang.scheduling.plan import Draft, Plain, Residency, Restore, Verify


class Request:
    """One request: the state, and what its KV has to be.

    Attributes:
        text: Name of its prompt's content; equal texts share KV and tokens.
        decoded: Bits [L, 2, H, D] of every decode slot in order, drafts at the end.
    """

    def __init__(self, state, text):
        self.state, self.text, self.decoded = state, text, []

    @property
    def body(self):
        """Prompt tokens in whole pages, once it was split."""
        return self.state.split.budget.offered

    @property
    def tail(self):
        """Prompt tokens in its last broken page, which count as decode slots."""
        return self.state.prompt - self.body


class LastFirst(TokenToKVPoolAllocator):
    """Hands out the slots first that were freed last: what may go wrong does so."""

    def free(self, free_index):
        self.free_pages, before = self.free_pages[:0], self.free_pages
        super().free(free_index)
        self.free_pages = torch.cat([self.free_pages, before])


class TinyEngine:
    """A residence, the tree and the rows around it.

    Args:
        page: Slots of a page.
        codec: Line of a codec; "" packs nothing.
        selects: A selector drops tokens; otherwise every token is packed.
        cached: There is a prefix tree.
        slots: Size of the pool.
        dtype: Of the KV.
        config: Further settings; ``cuda`` is a simulated device on which the pool and
            its tables lie, instead of ``device``; without ``shares`` a selection is
            never that of another prompt; with ``stores`` packed draft KV is shared, as
            on a server with a store.

    Attributes:
        device: Of pool and row table.
    """

    device = "cpu"

    def __init__(
        self,
        page=1,
        codec="",
        selects=True,
        cached=True,
        slots=160,
        dtype=torch.float32,
        **config,
    ):
        self.page, self.dtype = page, dtype
        self.cuda = cuda = config.pop("cuda", None)
        shares = config.pop("shares", True)
        stores = config.pop("stores", False)
        where = self.device if cuda is None else "cuda:0"
        self.streams = None if cuda is None else Streams(cuda)
        config = {"keep": 0.5, "sink_tokens": 2, "recent_tokens": 3} | config
        config = {"host_gb": 2**-10} | config
        self.config = VeriCacheConfig(
            min_prompt=4, draft_length=4, max_verifies=1, **config
        )
        self.pool = staged_pool_class(LONGEST)(
            slots,
            page_size=page,
            dtype=dtype,
            head_num=HEADS,
            head_dim=DIM,
            layer_num=LAYERS,
            device=self.device,
            enable_memory_saver=False,
        )
        if cuda is not None:
            self.pool.k_buffer = [cuda.put(each) for each in self.pool.k_buffer]
            self.pool.v_buffer = [cuda.put(each) for each in self.pool.v_buffer]
        options = {
            "dtype": dtype,
            "device": where,
            "kvcache": self.pool,
            "need_sort": False,
        }
        self.allocator = (
            (TokenToKVPoolAllocator if cuda is None else LastFirst)(slots, **options)
            if page == 1
            else TorchPagedAllocator(slots, page_size=page, **options)
        )
        shape = block_table_shape(self.config, 5, 2 * LONGEST, page, kept=1.0)
        self.rows = BlockTablePool(shape, 2 * LONGEST, where, enable_memory_saver=False)
        compressor = self.open_compressor(codec, selects, shares)
        self.selector, self.codec = compressor.selector, compressor.codec
        with ExitStack() as stack:
            # Pages as small as can be: most tensors lie in several.
            stack.enter_context(patch.object(host_pages, "PAGE_TOKENS", 1))
            if cuda is not None:
                # Heads are narrower than the kernel takes; ``fake_device`` times it.
                weigh = patch.object(KVPlacement, "_weigh_codes", lambda placement: 1.0)
                stack.enter_context(weigh)
            if stores:
                shared = patch.object(placement, "shares_draft_kv", lambda *_: True)
                stack.enter_context(shared)
            self.placement = KVPlacement(
                self.config,
                TensorParallelSync(self.estimates()),
                self.rows,
                self.allocator,
                compressor,
                self.streams,
            )
        if self.placement.codes is not None:
            self.codec = self.placement.codes.codec
        self.tree = self.open_tree(
            CacheInitParams(
                disable=not cached,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.table = self.placement.table
        self.kv = KnownKV(self.pool, dtype)
        self.checks = TinyChecks(self)
        self.requests = {}
        self._flying = False
        self.free_rows = self.rows.free_slots

    def estimates(self):
        """Return what the engine starts to measure from."""
        return Estimates()

    def open_compressor(self, codec, selects, shares):
        """Make what compresses."""
        selector = None
        if selects:
            kind = Noted if self.cuda is None else OfKeys
            selector = kind() if shares else of_one_prompt(kind)()
        codec = create_codec(codec) if codec else None
        return Compressor(line="x", selector=selector, codec=codec)

    def open_tree(self, params):
        """Open the prefix tree."""
        return UnifiedRadixCache(params)

    def ids(self, text, tokens):
        """Return the first token ids of a text."""
        return array("q", [1000 * sum(map(ord, text)) + i for i in range(tokens)])

    def match(self, rid, ids):
        """Return the tree's slots of a prompt's beginning, and the node they end at."""
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(ids[:-1], None)))
        return match.device_indices, match.last_device_node

    def same_scores(self, cached, scores):
        """Tokens found in the tree still have their own scores [L, H, T]."""
        noted = self.placement.observer.noted(cached)
        if noted:
            wanted = scores[..., : len(cached)]
            assert torch.equal(torch.stack(noted).cpu(), wanted), "the tree's scores"

    def admit(self, rid, text, tokens, insertable=True):
        """Prefill a prompt; returns None where there is no room."""
        kv, scores = self.kv.truth(text)
        ids = self.ids(text, tokens)
        cached, node = self.match(rid, ids)
        assert torch.equal(self.kv.at(cached), kv[:, :, : len(cached)]), "the tree's KV"
        self.same_scores(cached, scores)
        receipt = self.tree.inc_lock_ref(node).to_dec_params()
        length = -(-tokens // self.page) * self.page
        fresh = allocate(self.tree, length - len(cached))
        if fresh is None:
            self.tree.dec_lock_ref(node, receipt)
            return None
        row = self.free_rows.pop()
        self.table[row, :length] = torch.cat([cached, fresh]).to(torch.int32)
        record = ReqKvInfo(
            req_pool_idx=row,
            cache_protected_len=len(cached),
            kv_committed_len=tokens,
            kv_allocated_len=length,
        )
        req = SimpleNamespace(
            rid=rid,
            kv=record,
            origin_input_ids=ids,
            output_ids=array("q", [7]),
            get_fill_ids=lambda: ids,
            extra_key=None,
            cache_salt=None,
            last_node=node,
            lock_receipt=receipt,
            swa_prefix_lock_released=False,
            priority=0,
            session=None,
            session_id=None,
            kv_rotation_base=None,
            prefix_indices=cached,
            skip_radix_cache_insert=not insertable,
            sampling_params=SamplingParams(max_new_tokens=1000),
            custom_logit_processor=None,
        )
        with self.launched():
            new = self.table[row, len(cached) : tokens].to(torch.int64)
            self.kv.put(new, kv[:, :, len(cached) : tokens])
        self.show(req, new, scores[..., len(cached) : tokens], len(cached), "EXTEND")
        if insertable:
            self.tree.cache_unfinished_req(req)
        state = RequestState(
            req=req,
            prompt=tokens,
            verified=tokens,
            outputs=[7],
            profile=GREEDY_FAST,
            stops=frozenset(),
            stats=RequestStats(True, 8),
        )
        self.requests[rid] = Request(state, text)
        return state

    def show(self, req, slots, scores, start, mode):
        """Have the watch see new tokens, their scores [L, H, n] as queries."""
        batch = SimpleNamespace(
            rids=[req.rid],
            forward_mode=ForwardMode[mode],
            extend_seq_lens_cpu=[len(slots)],
            extend_prefix_lens_cpu=[start],
            positions=torch.arange(start, start + len(slots), device=self.device),
            out_cache_loc=slots,
        )
        scores = scores.to(self.device)
        if not self.placement.observer.observes(batch):
            return
        for layer in range(LAYERS):
            queries = scores[layer].t()[..., None]
            self.placement.observer.observe(layer, queries, queries, batch)

    def grow(self, request, tokens):
        """Give a row slots for so many more tokens; False where there are none."""
        state, record = request.state, request.state.req.kv
        missing = state.row_length + len(state.drafts) + tokens
        missing -= record.kv_allocated_len
        if missing <= 0:
            return True
        fresh = allocate(self.tree, -(-missing // self.page) * self.page)
        if fresh is None:
            return False
        end = record.kv_allocated_len + len(fresh)
        row = self.table[record.req_pool_idx]
        row[record.kv_allocated_len : end] = fresh.to(torch.int32)
        record.kv_allocated_len = end
        return True

    def draft(self, rid):
        """Write one drafted token where the draft row says; check what it reads."""
        request = self.requests[rid]
        state = request.state
        if not self.grow(request, 2):
            return
        bits = self.kv.drawn(1)
        with self.launched() as forward:
            row, slots = self._only_row(state, Draft(rid))
            listed = self.table[row.table_row, : row.prefix]
            budget = state.split.budget
            assert row.prefix == budget.slots + request.tail + len(request.decoded)
            assert (row.packed is state) is (budget.coded > 0)
            self.checks.draft_part(request, listed[: budget.slots])
            self.checks.behind(request, listed[budget.slots :])
            own = self.table[row.table_row, row.prefix].item()
            assert own == slots.item(), "the draft's slot is the row's next"
            forward.read_done()
            self.kv.put(slots, bits)
        request.decoded.append(bits)
        state.draft(5)

    def verify(self, rid, accepted):
        """Verify what is drafted: every prompt token is listed once, with its bits."""
        request = self.requests[rid]
        state, prefetches = request.state, self.placement.prefetches
        if not self.grow(request, 2):
            return
        with self.launched() as forward:
            if state.residency is Residency.HOST:
                self.placement.start_prefetch(state)
                assert wait_for(prefetches) == ([rid], [])
            row, slots = self._only_row(state, Verify(rid))
            body, length = request.body, row.prefix + len(slots)
            listed = self.table[row.table_row, :length]
            assert len(set(listed.tolist())) == length, "a slot is listed twice"
            beside = state.residency is Residency.DEVICE
            order = in_order(body) if beside else parted(state.split.kept, body)
            self.kv.holds(listed[:body], request.text, order)
            committed = state.verified - body
            self.checks.behind(request, listed[body:], committed)
            assert listed[row.prefix :].tolist() == slots.tolist()
            prefetches.end(rid)
            new = min(accepted, len(state.drafts)) + 1
            bits = self.exact(request.text, state.verified, len(slots))
            forward.read_done()
            self.kv.put(slots, bits)
        del request.decoded[committed - request.tail :]
        request.decoded += bits[:, :, :new].split(1, dim=2)
        self._accept(state, new)

    def plain(self, rid):
        """Decode one token on the request's own row, which lists every token."""
        request = self.requests[rid]
        state = request.state
        if not self.grow(request, 1):
            return
        with self.launched() as forward:
            row, slots = self._only_row(state, Plain(rid))
            assert (row.table_row, row.packed) == (state.req.kv.req_pool_idx, None)
            assert row.prefix == row.position == state.verified
            bits = self.exact(request.text, state.verified, 1)
            forward.read_done()
            self.kv.put(slots, bits)
        request.decoded.append(bits)
        self._accept(state, 1)

    def exact(self, text, position, tokens):
        """Return what a forward over the full KV writes, from a position on."""
        return self.kv.drawn(tokens)

    def _only_row(self, state, action):
        rows = MixedRows(self.placement)
        assert rows.add(0, state, action)
        (row,) = rows.rows
        slots = self.table[row.own, row.at : row.at + len(row.columns)]
        return row, slots.to(torch.int64)

    def _accept(self, state, tokens):
        state.req.output_ids.extend([5] * tokens)
        state.accept([5] * tokens)
        state.req.kv.kv_committed_len += tokens

    def move(self, move, rid):
        request = self.requests[rid]
        with self.launched():
            made = self.placement.make(move, request.state, self.tree)
        self.placement.poll_outgoing()
        if made and isinstance(move, Restore):  # drafts are given up
            del request.decoded[request.state.verified - request.state.prompt :]
        return made

    def launched(self):
        """Run a forward, or what a worker does beside it, as SGLang does."""
        self._flying = False
        return nullcontext(self) if self.streams is None else self.streams.launched()

    def read_done(self):
        """Say nothing: without a device a forward has ended."""

    def fly(self):
        """Have one more forward in flight, of all requests, while some of them end.

        The host waits for the one before it alone, and knows now which have ended.
        """
        if self.streams is None or self._flying:
            return
        before = self.streams.forward_stream.record_event()
        running = [
            request.state
            for request in self.requests.values()
            if request.state.residency is not Residency.SWAPPED
            and self.grow(request, 1)
        ]
        with self.launched() as forward:
            rows = [self._only_row(state, _next(state)) for state in running]
            forward.read_done()
            for _, slots in rows:
                self.kv.put(slots, self.kv.drawn(1))
        self._flying = True
        before.synchronize()

    def evict(self):
        """Have the tree give up every prefix that nobody uses."""
        slots = allocate(self.tree, room(self.tree))
        self.allocator.free(slots)

    def finish(self, rid):
        """End a request: its row is joined, released, and maybe cached."""
        self.fly()
        request = self.requests.pop(rid)
        state, req = request.state, request.state.req
        if state.parts is not None:
            self.placement.restore(state, self.tree)
        if state.residency is None:
            tokens = state.verified
            row = self.table[req.kv.req_pool_idx, :tokens]
            self.checks.whole(request, row)
        self._release(req, insert=not req.skip_radix_cache_insert)
        self.placement.observer.forget(rid)
        if state.parts is not None:
            self.placement.release(state)

    def abort(self, rid):
        """End a request whose row is not to be cached."""
        self.fly()
        state = self.requests.pop(rid).state
        self._release(state.req, insert=False)
        self.placement.observer.forget(rid)
        if state.parts is not None:
            self.placement.release(state)

    def _release(self, req, insert):
        record = req.kv
        end = record.kv_committed_len
        if insert:
            self.tree.insert_req(req, up_to=end)
        self.tree.free_kv_row(record, [(record.cache_protected_len, end)])
        self.tree.unpin(req)
        start = -(-end // self.page) * self.page
        if start < record.kv_allocated_len:
            self.tree.free_kv_row(record, [(start, record.kv_allocated_len)])
        self.tree.on_release(req, inserted=insert)
        self.free_rows.append(record.req_pool_idx)


def _next(state):
    """Return what a request does next that stores one token."""
    drafts = state.residency is Residency.HOST or (
        state.parts and state.parts.draft_row >= 0
    )
    return Draft(state.rid) if drafts else Plain(state.rid)


def wait_for(prefetches):
    """Poll until a copy has ended; returns (arrived, failed)."""
    until = time.perf_counter() + 120
    while time.perf_counter() < until:
        arrived, failed = prefetches.poll()
        if arrived or failed:
            return arrived, failed
        time.sleep(1e-4)  # The thread that copies needs the interpreter's lock.
    raise AssertionError("a copy never ended")


@contextmanager
def opened(**options):
    """Open a ``TinyEngine`` and stop its threads afterwards."""
    engine = TinyEngine(**options)
    try:
        yield engine
    finally:
        engine.placement.close()
