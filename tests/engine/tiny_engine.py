"""Residence over a tiny pool, SGLang's own tree and allocator, and KV that is known.

Every token's KV is random bits, NaN payloads among them, so that one entry in the wrong
place shows. Nothing runs a model: prefills and decodes write what they are told.
"""

import time
from array import array
from types import SimpleNamespace

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from vericache_sglang.compression.about import About
from vericache_sglang.compression.base import Needs, Selector
from vericache_sglang.compression.codecs.catalog import create_codec
from vericache_sglang.compression.compressor import Compressor
from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.engine.figures import Figures
from vericache_sglang.engine.residence import Residence
from vericache_sglang.engine.row_edit import allocate
from vericache_sglang.engine.rows import MixedRows
from vericache_sglang.engine.sampling.profile import BARE
from vericache_sglang.engine.state import Layout, RequestState
from vericache_sglang.memory.paged_allocator import TorchPagedAllocator
from vericache_sglang.memory.sglang_pools import staged_pool_class
from vericache_sglang.memory.splitting import as_bits
from vericache_sglang.scheduling.estimates import Estimates
from vericache_sglang.scheduling.plan import Draft, Unsplit, Verify

LAYERS, HEADS, DIM = 2, 2, 8
LONGEST = 48
"""Tokens of the longest prompt; the width of SGLang's row table is twice that."""


class Noted(Selector):
    """Keeps the tokens with the highest score, which is its query's first element."""

    about = About(scenarios=("long-context",))
    needs = Needs(keys=False, q_stream=True)

    def __init__(self):
        super().__init__()
        self.calls = []

    def open(self, rid):
        self.calls.append(("open", rid))

    def close(self, rid):
        self.calls.append(("close", rid))

    def update(self, step):
        return step.queries[:HEADS, :, 0]

    def scores(self, rid, layer, keys, values, seen):
        return seen.noted


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
        return self.state.split.budget.offered


class TinyEngine:
    """A residence, the tree and the rows around it.

    Args:
        page: Slots of a page.
        codec: Line of a codec; "" packs nothing.
        selects: A selector drops tokens; otherwise every token is packed.
        cached: There is a prefix tree.
        slots: Size of the pool.
        dtype: Of the KV.
        config: Further settings.
    """

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
        config = {"keep": 0.5, "sink_tokens": 2, "recent_tokens": 3} | config
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
            device="cpu",
            enable_memory_saver=False,
        )
        options = {
            "dtype": dtype,
            "device": "cpu",
            "kvcache": self.pool,
            "need_sort": False,
        }
        self.allocator = (
            TokenToKVPoolAllocator(slots, **options)
            if page == 1
            else TorchPagedAllocator(slots, page_size=page, **options)
        )
        self.rows = SimpleNamespace(
            req_to_token=torch.zeros(6, 2 * LONGEST, dtype=torch.int32)
        )
        self.rows.write = lambda at, new: self.rows.req_to_token.__setitem__(at, new)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=not cached,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.selector = Noted() if selects else None
        self.codec = create_codec(codec) if codec else None
        compressor = Compressor(line="x", selector=self.selector, codec=self.codec)
        self.residence = Residence(
            self.config, Estimates(), self.rows, self.allocator, compressor
        )
        if self.residence.codes is not None:
            self.codec = self.residence.codes.codec
        self.table = self.residence.table
        self.texts, self.requests = {}, {}
        self.free_rows = list(range(6))
        self.random = torch.Generator().manual_seed(0)

    def close(self):
        self.residence.places.transfers.close()

    # -- what the KV is ---------------------------------------------------------

    def bits(self, *shape):
        """Return random bits of the pool's dtype, as integers."""
        raw = torch.randint(
            0,
            256,
            (*shape, self.dtype.itemsize),
            generator=self.random,
            dtype=torch.uint8,
        )
        return as_bits(raw.view(self.dtype)).squeeze(-1)

    def truth(self, text):
        """Return a text's KV [L, 2, T, H, D] bits and scores [L, H, T]."""
        if text not in self.texts:
            kv = self.bits(LAYERS, 2, LONGEST, HEADS, DIM)
            scores = torch.randn(LAYERS, HEADS, LONGEST, generator=self.random)
            self.texts[text] = kv, scores
        return self.texts[text]

    def at(self, slots):
        """Return the pool's bits [L, 2, n, H, D] in these slots."""
        slots = slots.to(torch.int64)
        buffers = zip(self.pool.k_buffer, self.pool.v_buffer, strict=True)
        return torch.stack(
            [torch.stack([as_bits(b)[slots] for b in pair]) for pair in buffers]
        )

    def put(self, slots, bits):
        for layer in range(LAYERS):
            as_bits(self.pool.k_buffer[layer])[slots] = bits[layer, 0]
            as_bits(self.pool.v_buffer[layer])[slots] = bits[layer, 1]

    # -- requests ---------------------------------------------------------------

    def admit(self, rid, text, tokens, insertable=True):
        """Prefill a prompt; returns None where there is no room."""
        kv, scores = self.truth(text)
        ids = array("q", [1000 * sum(map(ord, text)) + i for i in range(tokens)])
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(ids[:-1], None)))
        cached = match.device_indices
        assert torch.equal(self.at(cached), kv[:, :, : len(cached)]), "the tree's KV"
        if len(cached):
            noted = torch.stack(self.residence.watch.noted(cached))
            assert torch.equal(noted, scores[..., : len(cached)]), "the tree's scores"
        node = match.last_device_node
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
            kv_rotation_base=0,
            prefix_indices=cached,
            skip_radix_cache_insert=not insertable,
            sampling_params=SimpleNamespace(max_new_tokens=1000),
        )
        new = self.table[row, len(cached) : tokens].to(torch.int64)
        self.put(new, kv[:, :, len(cached) : tokens])
        self.show(req, new, scores[..., len(cached) : tokens], len(cached), "EXTEND")
        if insertable:
            self.tree.cache_unfinished_req(req)
        state = RequestState(
            req=req,
            prompt=tokens,
            verified=tokens,
            pending=7,
            outputs=[7],
            profile=BARE,
            eligible=True,
            stops=frozenset(),
            longest=8,
            figures=Figures(True, 8),
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
            positions=torch.arange(start, start + len(slots)),
            out_cache_loc=slots,
        )
        for layer in range(LAYERS):
            queries = scores[layer].t()[..., None]
            self.residence.watch.observe(layer, queries, queries, batch)

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
        rows = MixedRows(self.residence)
        assert rows.add(0, state, Draft(rid))
        (row,) = rows.rows
        listed = self.table[row.table_row, : row.prefix]
        budget = state.split.budget
        behind = body_tail(request) + len(request.decoded)
        assert row.prefix == budget.slots + behind
        exact = self.at(listed[budget.code_slots : budget.slots])
        self._equal_at(request, exact, state.split.kept)
        self._decoded_equal(request, listed[budget.slots :])
        self._codes_decode(request)
        own = self.table[row.table_row, row.prefix].item()
        assert own == row.slots.item(), "the draft's slot is the row's next"
        bits = self.bits(LAYERS, 2, 1, HEADS, DIM)
        self.put(row.slots, bits)
        request.decoded.append(bits)
        state.draft(5)

    def verify(self, rid, accepted):
        """Verify what is drafted: every prompt token is listed once, with its bits."""
        request = self.requests[rid]
        state, reloads = request.state, self.residence.reloads
        if not self.grow(request, 2):
            return
        if state.layout is Layout.KEPT:
            self.residence.start_reload(state)
            arrived, failed = wait_for(reloads)
            assert (arrived, failed) == ([rid], [])
        rows = MixedRows(self.residence)
        assert rows.add(0, state, Verify(rid))
        (row,) = rows.rows
        body = request.body
        listed = self.table[row.table_row, : row.prefix + len(row.tokens)]
        assert len(set(listed.tolist())) == len(listed), "a slot is listed twice"
        kept = state.split.kept
        order = [every(LONGEST)[:, :body]] * LAYERS
        if state.layout is not Layout.BESIDE:
            order = [
                torch.cat([own.long(), others(own, body)], dim=1) for own in kept
            ]
        self._equal_at(request, self.at(listed[:body]), order)
        committed = state.verified - body
        self._decoded_equal(request, listed[body:], committed)
        assert listed[row.prefix :].tolist() == row.slots.tolist()
        reloads.end(rid)
        new = min(accepted, len(state.drafts)) + 1
        bits = self.bits(LAYERS, 2, len(row.tokens), HEADS, DIM)
        self.put(row.slots, bits)
        start = state.verified - body
        tail = body_tail(request)
        del request.decoded[start - tail :]
        request.decoded += bits[:, :, :new].split(1, dim=2)
        state.req.output_ids.extend([5] * new)
        state.accept([5] * new)
        state.req.kv.kv_committed_len += new

    def plain(self, rid):
        """Decode one token on a whole row."""
        request = self.requests[rid]
        state = request.state
        if not self.grow(request, 1):
            return
        at = state.row_length
        slot = self.table[state.req.kv.req_pool_idx, at : at + 1].to(torch.int64)
        bits = self.bits(LAYERS, 2, 1, HEADS, DIM)
        self.put(slot, bits)
        request.decoded.append(bits)
        state.req.output_ids.append(5)
        state.accept([5])
        state.req.kv.kv_committed_len += 1

    def move(self, move, rid):
        request = self.requests[rid]
        made = self.residence.make(move, request.state, self.tree)
        if made and isinstance(move, Unsplit):  # drafts are given up
            del request.decoded[request.state.verified - request.state.prompt :]
        return made

    def finish(self, rid):
        """End a request: its row is joined, released, and maybe cached."""
        request = self.requests.pop(rid)
        state, req = request.state, request.state.req
        if state.parts is not None:
            self.residence.join(state, self.tree)
        if state.layout is Layout.WHOLE:
            tokens = state.verified
            row = self.table[req.kv.req_pool_idx, :tokens]
            self._row_is_whole(request, row)
        self._release(req, insert=not req.skip_radix_cache_insert)
        self.residence.watch.forget(rid)
        if state.parts is not None:
            self.residence.release(state)

    def abort(self, rid):
        """End a request whose row is not to be cached."""
        state = self.requests.pop(rid).state
        self._release(state.req, insert=False)
        self.residence.watch.forget(rid)
        if state.parts is not None:
            self.residence.release(state)

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

    # -- what has to hold -------------------------------------------------------

    def check(self):
        """No slot leaked, none held twice, every row's content is its own."""
        self.residence.check(self.requests)
        free = self.allocator.get_all_free_pages().tolist()
        assert len(set(free)) == len(free), "a page was freed twice"
        held = []
        for request in self.requests.values():
            record = request.state.req.kv
            row = self.table[record.req_pool_idx]
            mine = row[record.cache_protected_len : record.kv_allocated_len]
            held += sorted({slot // self.page for slot in mine.tolist()})
            self.check_row(request)
        assert len(set(held)) == len(held), "two rows hold a page"
        assert not set(held) & set(free), "a row holds a free page"
        tree = self.tree.evictable_size() + self.tree.protected_size()
        pages = len(free) + len(held) + tree // self.page
        assert pages == self.pool.size // self.page, "pages leaked"

    def check_row(self, request):
        state = request.state
        row = self.table[state.req.kv.req_pool_idx]
        if state.layout is Layout.PARKED:
            return
        assert state.row_length <= state.req.kv.kv_allocated_len
        if state.layout is Layout.WHOLE:
            self._row_is_whole(request, row[: state.verified])
            return
        head, parts = state.split.head, state.split
        count = len(request.decoded) + body_tail(request)
        self._decoded_equal(request, row[head : head + count])
        if state.layout is Layout.BESIDE:
            whole = self.at(row[: request.body])
            self._equal_at(request, whole, [every(request.body)] * LAYERS)
        draft = parts.budget.offered if state.layout is Layout.BESIDE else 0
        first = draft + parts.budget.code_slots
        exact = self.at(row[first : first + parts.budget.exact])
        self._equal_at(request, exact, parts.kept)
        self._codes_decode(request)

    def _row_is_whole(self, request, row):
        kv, _ = self.truth(request.text)
        prompt = request.state.prompt
        assert torch.equal(self.at(row[:prompt]), kv[:, :, :prompt])
        if request.decoded:
            committed = torch.cat(request.decoded, dim=2)[:, :, : len(row) - prompt]
            assert torch.equal(self.at(row[prompt:]), committed)

    def _equal_at(self, request, found, positions):
        """Entries [L, 2, n, H, D] are those of prompt ``positions`` [L][H, n]."""
        kv, _ = self.truth(request.text)
        for layer, where in enumerate(positions):
            for head in range(HEADS):
                wanted = kv[layer, :, where[head].long(), head]
                assert torch.equal(found[layer, :, :, head], wanted)

    def _decoded_equal(self, request, slots, count=None):
        """Slots behind the body: the prompt's broken page, then decoded tokens."""
        kv, _ = self.truth(request.text)
        state = request.state
        wanted = [kv[:, :, request.body : state.prompt], *request.decoded]
        wanted = torch.cat(wanted, dim=2)[:, :, :count]
        assert torch.equal(self.at(slots)[:, :, : wanted.shape[2]], wanted)

    def _codes_decode(self, request):
        """What is packed decodes to what the codec makes of the tokens themselves."""
        codes, state = self.residence.codes, request.state
        if codes is None:
            return
        kv, _ = self.truth(request.text)
        read = codes.segments(state)
        for layer in range(LAYERS):
            where = state.split.coded[layer]
            found = [segment() for segment in read(layer)]
            at = 0
            for keys, values in found:
                part = where[:, at : at + keys.shape[1]]
                at += keys.shape[1]
                packed = [
                    torch.stack(
                        [kv[layer, i, part[h].long(), h] for h in range(HEADS)]
                    ).view(self.dtype)
                    for i in range(2)
                ]
                none = torch.empty(0, dtype=torch.int64)
                draft, _ = self.codec.encode(
                    *packed, layer=layer, positions=part, sinks=none
                )
                near = self.codec.decode(draft)
                assert torch.equal(as_bits(keys), as_bits(near[0]))
                assert torch.equal(as_bits(values), as_bits(near[1]))
            assert at == where.shape[1]


def body_tail(request):
    """Prompt tokens in its last broken page, which count as decode slots."""
    return request.state.prompt - request.body


def every(tokens):
    return torch.arange(tokens).expand(HEADS, -1)


def others(kept, tokens):
    """Positions [H, m] that are not among ``kept`` [H, n]."""
    return torch.tensor(
        [
            [i for i in range(tokens) if i not in set(row)]
            for row in kept.tolist()
        ]
    ).view(len(kept), -1)


def wait_for(reloads):
    """Poll until a copy has ended; returns (arrived, failed)."""
    until = time.perf_counter() + 10
    while time.perf_counter() < until:
        arrived, failed = reloads.poll()
        if arrived or failed:
            return arrived, failed
    raise AssertionError("a copy never ended")
