"""What has to hold of cached segments between any two steps, counted in loops."""

from itertools import chain

import torch
from arriving import until
from known_kv import HEADS, LAYERS, in_order
from segment_world import SHORT, tiers_of
from tiny_checks import TinyChecks

from vericache_sglang.kv.picked_residual import PickedResidual
from vericache_sglang.kv.split_layers import as_bits
from vericache_sglang.prefix_cache.segment import Form, Tier, Use
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
        self.draft_part(request, parts.shared_slots)
        drafts = [engine.segments.draft(name) for name in parts.segments]
        listed = [draft.slots.tolist() for draft in drafts]
        assert list(chain(*listed)) == parts.shared_slots.tolist(), (
            "as the shelf has it"
        )

    def draft_pool(self):
        """Every slot of the shelf is nobody else's; users are those who list it."""
        engine, segments = self._engine, self._engine.segments
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
            part = segments.draft(name)
            count = users.count(name)
            if part is None:
                assert not count, "a row lists what is not on the shelf"
                continue
            users_here = segments.copies.index.find(name).users.values()
            assert sum(bool(use & Use.DRAFT) for use in users_here) == count
            pages = {slot // engine.page for slot in part.slots.tolist()}
            assert not pages & others, "slots of the shelf are somebody else's"
            others |= pages
            used += len(part.slots) if count else 0
            idle += 0 if count else len(part.slots)
        assert (used, idle) == (segments.used_slots, segments.idle_slots)

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
            part, rest = segments.draft(name), segments.residual(name)
            if rest is not None and engine.placement.codes is not None:
                yield from self._packed(name, rest)
            elif part is not None and part.coded is None:
                yield name, engine.kv.at(part.slots), part.kept.cpu()
            if rest is not None and engine.placement.codes is None:
                until(lambda rest=rest: rest.sealed)  # by the copy's thread, on a GPU
                for layer in range(LAYERS):
                    rest.verify(layer)
                away = _others(rest.kept, rest.slots + rest.kept.shape[2])
                yield name, _stacked(rest.keys, rest.values), away
                assert part is None or torch.equal(part.kept.cpu(), rest.kept)
            for form in (Form.WHOLE, Form.DRAFT):
                copy = segments.copies.images_of(name, form)
                if copy is not None and "coded" not in copy:
                    copy = {field: found.read() for field, found in copy.items()}
                    where = copy.get("kept", _every(copy["keys"].shape[1]))
                    yield name, _stacked(copy["keys"], copy["values"]), where
                    if form is Form.DRAFT:
                        assert torch.equal(where, rest.kept), "of one split"

    def _packed(self, name, rest):
        """Yield the full KV that packed draft KV, wherever it lies, is joined to."""
        copies = self._engine.segments.copies
        until(lambda: rest.sealed)
        segment = copies.index.find(name)
        if segment.draft is None and not segment.has(Form.DRAFT):
            return
        pairs = zip(*copies._joined(name), strict=True)
        keys, values = (torch.stack(each) for each in pairs)
        yield name, _stacked(keys, values), _every(SHORT)

    def host_bytes(self):
        """Every page in use is a request's, a complement's or a copy's."""
        engine, segments = self._engine, self._engine.segments
        segments.check()
        index = segments.copies.index
        found = [index.find(name) for name in engine.truths]
        held = sum(segment.host_bytes for segment in found)
        total = engine.placement.host.held_bytes + held
        page_pool = engine.placement.page_pool
        assert total == page_pool.used_bytes - page_pool.leaving_bytes
        states = [request.state for request in engine.requests.values()]
        referring = {
            name
            for state in states
            if self._refers(state)
            for name in state.parts.segments
        }
        assert set(index.users()) <= set(engine.requests)
        picking = {
            state.rid: state.parts.segments for state in states if self._picks(state)
        }
        for segment in found:
            assert segment.is_used(Use.RESIDUAL) == (segment.name in referring)
            readers = {user for user, use in segment.users.items() if use & Use.IMAGES}
            names = {rid for rid, names in picking.items() if segment.name in names}
            assert readers == names, "those who read a copy"

    def _refers(self, state):
        """Say whether a request's complement is that of its segments."""
        if state.residency not in (Residency.HOST, Residency.SWAPPED):
            return False
        return self._engine.placement.host.group_of(state.rid).startswith("segments-")

    def _picks(self, state):
        """Say whether a request's complement is picked from copies of its segments."""
        if state.residency not in (Residency.HOST, Residency.SWAPPED):
            return False
        residual = self._engine.placement.host.residual(state.rid)
        return isinstance(residual, PickedResidual)

    def index(self):
        """What nobody holds on the host can be found by whoever needs the room."""
        engine, segments = self._engine, self._engine.segments
        for name in engine.truths:
            known = segments._index.get(name)
            rest = segments.residual(name) is not None
            whole = segments.copies.index.find(name).has(Form.WHOLE)
            held = rest and segments.copies.index.find(name).is_used(Use.RESIDUAL)
            pending_max = rest and not held
            if pending_max or whole:
                assert known is not None, "bytes of the host that nobody finds"
                assert Tier.HOST in tiers_of(known), known
            if known is not None and known.content.draft is not None:
                assert rest, "a split segment without a complement"
                host = segments.copies.index.find(name).has(Form.DRAFT)
                below = Tier.HOST if host else Tier.GONE
                where = Tier.DEVICE if segments.draft(name) is not None else below
                assert known.content.draft.tier is where, "a draft part elsewhere"
            elif known is not None and Tier.HOST in tiers_of(known):
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
