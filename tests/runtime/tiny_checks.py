"""What has to hold of a tiny engine between any two steps."""

import torch
from known_kv import LAYERS, in_order

from vericache_sglang.kv.split_layers import as_bits
from vericache_sglang.scheduling.plan import Residency


class TinyChecks:
    """Recounts slots and compares rows with what they were written.

    Args:
        engine: The ``TinyEngine``.
    """

    def __init__(self, engine):
        self._engine = engine

    def all(self):
        """No slot leaked, none held twice, every row's content is its own."""
        engine = self._engine
        with engine.launched():
            self._all()

    def _all(self):
        engine = self._engine
        engine.placement.check(engine.requests)
        free = engine.allocator.get_all_free_pages().tolist()
        assert len(set(free)) == len(free), "a page was freed twice"
        held = []
        for request in engine.requests.values():
            record = request.state.req.kv
            row = engine.table[record.req_pool_idx]
            mine = row[record.cache_protected_len : record.kv_allocated_len]
            held += sorted({slot // engine.page for slot in mine.tolist()})
            self.row(request)
        assert len(set(held)) == len(held), "two rows hold a page"
        assert not set(held) & set(free), "a row holds a free page"
        tree = engine.tree.evictable_size() + engine.tree.protected_size()
        pages = len(free) + len(held) + tree // engine.page
        assert pages == engine.pool.size // engine.page, "pages leaked"

    def row(self, request):
        """A request's row lists what its layout says."""
        state, engine = request.state, self._engine
        row = engine.table[state.req.kv.req_pool_idx]
        if state.residency is Residency.SWAPPED:
            return
        assert state.row_length <= state.req.kv.kv_allocated_len
        if state.residency is None:
            self.whole(request, row[: state.verified])
            return
        parts, body = state.split, request.body
        count = len(request.decoded) + request.tail
        self.behind(request, row[parts.head : parts.head + count])
        if state.residency is Residency.DEVICE:
            engine.kv.holds(row[:body], request.text, in_order(body))
        draft = body if state.residency is Residency.DEVICE else 0
        self.draft_part(request, row[draft : draft + parts.budget.slots])

    def held(self):
        """Return all that a move which is refused must leave as it is."""
        pool = [*self._engine.pool.k_buffer, *self._engine.pool.v_buffer]
        bits = [buffer.view(torch.uint8).tolist() for buffer in pool]
        return bits, self.books()

    def books(self):
        """Return who holds what; as ``held``, for a move that fails half way."""
        engine = self._engine
        requests = engine.requests.values()
        rows = [request.state.req.kv for request in requests]
        return (
            engine.table.tolist(),
            [(r.kv_committed_len, r.kv_allocated_len) for r in rows],
            [(r.cache_protected_len, r.req_pool_idx) for r in rows],
            [request.state.residency for request in requests],
            sorted(engine.allocator.get_all_free_pages().tolist()),
            (engine.tree.evictable_size(), engine.tree.protected_size()),
            engine.placement.host.used_bytes,
        )

    def whole(self, request, row):
        """A row is the prompt in order, then the decoded tokens."""
        prompt, kv = request.state.prompt, self._engine.kv
        kv.holds(row[:prompt], request.text, in_order(prompt))
        if request.decoded:
            committed = torch.cat(request.decoded, dim=2)[:, :, : len(row) - prompt]
            assert torch.equal(kv.at(row[prompt:]), committed)

    def draft_part(self, request, slots):
        """Slots of a draft part: codes that decode as they should, exact entries."""
        parts = request.state.split
        exact = slots[parts.budget.code_slots :]
        self._engine.kv.holds(exact, request.text, parts.kept)
        self._codes(request)

    def behind(self, request, slots, count=None):
        """Slots behind the body: the prompt's broken page, then decoded tokens."""
        kv, _ = self._engine.kv.truth(request.text)
        state = request.state
        wanted = [kv[:, :, request.body : state.prompt], *request.decoded]
        wanted = torch.cat(wanted, dim=2)[:, :, :count]
        found = self._engine.kv.at(slots[: wanted.shape[2]])
        assert torch.equal(found, wanted)

    def _codes(self, request):
        codes, state = self._engine.placement.codes, request.state
        if codes is None:
            return
        read = codes.segments(state)
        for layer in range(LAYERS):
            where, at = state.split.coded[layer], 0
            for segment in read(layer):
                found = segment()
                tokens = where[:, at : at + found[0].shape[1]]
                at += tokens.shape[1]
                near = self._engine.kv.decoded(codes.codec, request.text, layer, tokens)
                for entries, wanted in zip(found, near, strict=True):
                    # What is made of a NaN is a NaN, with whatever payload.
                    entries, wanted = entries.cpu(), wanted.view(entries.dtype)
                    assert torch.equal(entries.isnan(), wanted.isnan())
                    own, wanted = (as_bits(t[~t.isnan()]) for t in (entries, wanted))
                    assert torch.equal(own, wanted)
            assert at == where.shape[1], "every packed token is read"
