"""What has to hold of cached segments between any two steps, counted in loops."""

from itertools import chain

import torch
from arriving import until
from known_kv import HEADS, LAYERS, in_order
from segment_world import SHORT
from tiny_checks import TinyChecks

from vericache_sglang.kv.split_layers import as_bits
from vericache_sglang.prefix_cache.segment import Tier
from vericache_sglang.scheduling.plan import Residency


class SegmentChecks(TinyChecks):
    """Recounts shelf, complements, copies and index; compares them with the truth.

    Args:
        engine: The ``TieredEngine``.
    """

    def all(self):
        super().all()
        self.draft_pool()
        self.contents()
        self.host_bytes()
        self.index()

    def row(self, request):
        """A row's own slots, and behind them the shelf's where it borrows."""
        state, engine = request.state, self._engine
        parts = state.parts
        if parts is None or parts.shared_slots is None:
            super().row(request)
            return
        row = engine.table[state.req.kv.req_pool_idx]
        body, text, kv = request.body, request.text, engine.kv
        if state.residency is Residency.DEVICE:
            kv.holds(row[:body], text, in_order(body))
            self.behind(request, row[body : body + len(request.decoded) + request.tail])
        else:
            assert parts.shared_count == len(parts.shared_slots)
            assert row[: parts.shared_count].tolist() == parts.shared_slots.tolist()
            super().row(request)
        kv.holds(parts.shared_slots, text, parts.kept)
        draft_pool = engine.segments.draft_pool
        listed = [draft_pool.get(name).slots.tolist() for name in parts.segments]
        assert list(chain(*listed)) == parts.shared_slots.tolist(), (
            "as the shelf has it"
        )

    def draft_pool(self):
        """Every slot of the shelf is nobody else's; users are those who list it."""
        engine, draft_pool = self._engine, self._engine.segments.draft_pool
        states = [request.state for request in engine.requests.values()]
        users = [
            name
            for state in states
            if state.parts is not None and state.parts.shared_slots is not None
            for name in state.parts.segments
        ]
        free = set(engine.allocator.get_all_free_pages().tolist())
        others = set(free)
        for state in states:
            record = state.req.kv
            row = engine.table[record.req_pool_idx]
            mine = row[record.cache_protected_len : record.kv_allocated_len]
            others |= {slot // engine.page for slot in mine.tolist()}
        for each in engine.segments._slots.all():
            pages = {slot // engine.page for slot in each.slots.tolist()}
            assert not pages & free, "a slot of the tree is free"
            assert len(each.slots) == SHORT
            others |= pages
        used = idle = 0
        for name in engine.truths:
            part = draft_pool.get(name)
            count = users.count(name)
            if part is None:
                assert not count, "a row lists what is not on the shelf"
                continue
            assert part.users == count
            pages = {slot // engine.page for slot in part.slots.tolist()}
            assert not pages & others, "slots of the shelf are somebody else's"
            others |= pages
            used += len(part.slots) if count else 0
            idle += 0 if count else len(part.slots)
        assert (used, idle) == (draft_pool.used_slots, draft_pool.idle_slots)

    def contents(self):
        """Every part of a segment is what it should be, wherever it lies."""
        for name, found, where in self._found():
            truths = self._engine.truths[name]
            assert any(_holds(found, kv, where) for kv in truths), name

    def _found(self):
        """Yield all there is: name, bits [L, 2, n, H, D], tokens [L, H, n] of it."""
        engine, segments = self._engine, self._engine.segments
        for each in segments._slots.all():
            yield each.name, engine.kv.at(each.slots), _every(len(each.slots))
        for name in engine.truths:
            part, rest = segments.draft_pool.get(name), segments.residuals.get(name)
            if part is not None:
                yield name, engine.kv.at(part.slots), part.kept.cpu()
            if rest is not None:
                until(lambda rest=rest: rest.sealed)  # by the copy's thread, on a GPU
                for layer in range(LAYERS):
                    rest.verify(layer)
                away = _others(rest.kept, rest.slots + rest.kept.shape[2])
                yield name, _stacked(rest.keys, rest.values), away
                assert part is None or torch.equal(part.kept.cpu(), rest.kept)
            for form in ("whole", "draft"):
                copy = engine.pool_of_host.get(f"{name}.{form}")
                if copy is not None:
                    copy = {field: found.read() for field, found in copy.items()}
                    where = copy.get("kept", _every(copy["keys"].shape[1]))
                    yield name, _stacked(copy["keys"], copy["values"]), where
                    if form == "draft":
                        assert torch.equal(where, rest.kept), "of one split"

    def host_bytes(self):
        """Every page in use is a request's, a complement's or a copy's."""
        engine, segments = self._engine, self._engine.segments
        engine.pool_of_host.check()
        found = [segments.residuals.get(name) for name in engine.truths]
        held = sum(each.held_bytes for each in found if each is not None)
        total = engine.placement.host.held_bytes + held + engine.pool_of_host.used_bytes
        page_pool = engine.placement.page_pool
        assert total == page_pool.used_bytes - page_pool.leaving_bytes
        states = [request.state for request in engine.requests.values()]
        referring = {
            name
            for state in states
            if self._refers(state)
            for name in state.parts.segments
        }
        assert set(segments._referring) <= set(engine.requests)
        assert set(segments._listing) <= set(engine.requests)
        for name in engine.truths:
            assert segments.residuals.is_held(name) == (name in referring)

    def _refers(self, state):
        """Say whether a request's complement is that of its segments."""
        if state.residency not in (Residency.HOST, Residency.SWAPPED):
            return False
        return self._engine.placement.host.group_of(state.rid).startswith("segments-")

    def index(self):
        """What nobody holds on the host can be found by whoever needs the room."""
        engine, segments = self._engine, self._engine.segments
        for name in engine.truths:
            known = segments._index.get(name)
            rest = name in segments.residuals
            whole = segments.copies.has_whole(name)
            pending_max = rest and not segments.residuals.is_held(name)
            if pending_max or whole:
                assert known is not None, "bytes of the host that nobody finds"
                assert known.content.is_in(Tier.HOST), known
            if known is not None and known.content.draft is not None:
                assert rest, "a split segment without a complement"
                host = segments.copies.has_draft_on_host(name)
                below = Tier.HOST if host else Tier.GONE
                where = Tier.DEVICE if name in segments.draft_pool else below
                assert known.content.draft.tier is where, "a draft part elsewhere"
            elif known is not None and known.content.is_in(Tier.HOST):
                assert whole, "a copy that is not there"


def _stacked(keys, values):
    return torch.stack([as_bits(keys), as_bits(values)], dim=1)


def _every(tokens):
    return torch.arange(tokens).expand(LAYERS, HEADS, -1)


def _others(kept, tokens):
    """Return the tokens [L, H, m] that are not among ``kept`` [L, H, n]."""
    every = range(tokens)
    layers = kept.tolist()
    return torch.tensor(
        [[[i for i in every if i not in row] for row in rows] for rows in layers]
    )


def _holds(found, kv, where):
    """Say whether bits are, in each head, a segment's tokens ``where``."""
    return all(
        torch.equal(found[layer, :, :, head], kv[layer][:, tokens[head].long(), head])
        for layer, tokens in enumerate(where)
        for head in range(HEADS)
    )
