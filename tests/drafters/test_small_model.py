"""The ring KV of a small model or a head, and what it reads, against whole texts.

``Recorder`` stands for the model: its KV of a slot is the token and the place that were
written there last, and a head's features. What it proposes depends on every token that
its rows list, so a wrong slot, order or length changes it.
"""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.drafters.base import Wanted
from vericache_sglang.drafters.features import Features
from vericache_sglang.drafters.model import (
    NOTHING,
    PIECE,
    ModelDrafter,
    ring_of,
)
from vericache_sglang.drafters.ring import SINKS, SlotRing
from vericache_sglang.drafters.texts import Texts

VOCABULARY = 97

RINGS = st.builds(
    SlotRing,
    st.integers(SINKS + 1, 40),
    st.integers(0, 30),
    st.sampled_from([SINKS, 0]),
)


@given(RINGS, st.integers(0, 3), st.data())
def test_the_last_tokens_of_a_text_are_listed_in_order(ring, row, data):
    """A token at a time into a ring; a list of every place is the oracle."""
    end = data.draw(st.integers(1, 5 * ring.capacity))
    beyond = data.draw(st.integers(0, ring.spare))
    held = {}
    for place in [*range(end), *range(end, end + beyond)]:
        held[ring.slots(torch.tensor(row), torch.tensor(place)).item()] = place
    assert all(row * ring.capacity <= slot < (row + 1) * ring.capacity for slot in held)
    listed = ring.listing(torch.tensor([row]), torch.tensor([end]))[0].tolist()
    assert len(listed) == ring.window
    places = list(range(end))
    wanted = places
    if end > ring.window:
        wanted = places[: ring.sinks] + places[end - (ring.window - ring.sinks) :]
    assert [held[slot] for slot in listed[: len(wanted)]] == wanted


def said_after(tokens):
    """Return a token that depends on all of ``tokens``, and on their order."""
    found = 0
    for token in tokens:
        found = (found * 31 + token + 1) % 1_000_003
    return found % VOCABULARY


def computed(token, position):
    """Return the feature of a token, a whole number."""
    return float(token * 1000 + position)


def read(token, feature):
    """Return what a head reads as one number, which is beyond any token."""
    return token + VOCABULARY * int(feature + 1)


def carried(token):
    """Return the hidden state of a head that proposes ``token``."""
    return float(10**6 + token)


class Recorder:
    """See the module.

    Args:
        ring: Layout of its KV.
        requests: Most running requests.
        context: Longest text, in tokens.
    """

    def __init__(self, ring, requests, context):
        self.table = torch.zeros(requests + 1, ring.window, dtype=torch.int32)
        self.context, self.ring = context, ring
        self.held, self.sizes = {}, []

    def next_tokens(self, rows):
        self.sizes.append(sum(rows.queries))
        tokens = rows.tokens.tolist()
        if rows.hidden is not None:
            tokens = list(map(read, tokens, rows.hidden[:, 0].tolist()))
        written = zip(rows.slots.tolist(), tokens, rows.places.tolist(), strict=True)
        places = []
        for slot, token, place in written:
            assert place < self.context
            self.held[slot] = token, place
            places.append(place)
        said, start = [], 0
        for row, queries, prefix in zip(
            rows.rows.tolist(), rows.queries, rows.prefixes.tolist(), strict=True
        ):
            listed = self.table[row, : prefix + queries].tolist()
            kept = [self.held[slot] for slot in listed]
            own = places[start : start + queries]
            assert [place for _, place in kept[prefix:]] == own
            assert sorted(place for _, place in kept) == [place for _, place in kept]
            said.append(said_after(token for token, _ in kept))
            start += queries
        hidden = torch.tensor([[carried(token)] for token in said], dtype=torch.float64)
        return torch.tensor(said), None if rows.hidden is None else hidden


def proposed(text, skipped, ring, depth, head=False):
    """Return what a model says that reads ``text`` anew for every token."""
    text, found, sinks = list(text), [], ring.sinks
    if head:
        told = zip(text[1:], map(computed, text, range(len(text))), strict=False)
        text = [read(*both) for both in told]
    text = text[:sinks] + text[sinks + skipped :]
    end = len(text) + depth - 1
    for _ in range(depth):
        first = max(0, end - ring.window)
        found.append(said_after(text[:sinks] + text[sinks + first :]))
        said = found[-1]
        text.append(read(said, carried(said)) if head else said)
    return found


class Machine:
    """A drafter and the texts of its requests, which grow and are rolled back."""

    def __init__(
        self, window=64, length=4, drafts=6, requests=3, context=None, inner="model"
    ):
        config = VeriCacheConfig(
            inner=inner, inner_window=window, inner_length=length, draft_length=drafts
        )
        self.config, self.ring = config, ring_of(config)
        self.model = Recorder(self.ring, requests, context or config.ring_reach + 7)
        self.texts = Texts(requests, 1000, "cpu")
        reach, self.features = config.ring_reach, None
        if config.inner_head:
            self.features = Features(requests, reach, 1, torch.float64, "cpu")
        self.drafter = ModelDrafter(
            self.texts, self.ring, self.model, length, self.features
        )
        self.text = {}

    def begin(self, request, text, first=0):
        self.text[request] = list(text)
        self.texts.put(request, text)
        self.compute(request, first)
        self.drafter.begin(request, len(text), first)

    def compute(self, request, first):
        """Write the features of a text from position ``first``, all but the last's."""
        text = self.text[request]
        if self.features is None or len(text) < 2:
            return
        first = max(first, len(text) - self.features.length)
        places = range(first, len(text) - 1)
        made = [[computed(text[i], i)] for i in places]
        self.features.write(
            torch.full([len(places)], request),
            torch.tensor(places, dtype=torch.int64),
            torch.tensor(made, dtype=torch.float64).view(-1, 1),
        )

    def change(self, request, keep, *tokens):
        """Replace the end of a text behind its first ``keep`` tokens."""
        self.text[request][keep:] = tokens
        self.texts.put(request, tokens, keep)
        self.compute(request, keep - 1)

    def ask(self, depth, *requests, late=0):
        """Ask for proposals; the host knows of all tokens but the last ``late``."""
        lengths = [len(self.text[request]) for request in requests]
        wanted = Wanted(
            torch.tensor(requests),
            torch.tensor(lengths),
            torch.zeros(len(requests), dtype=torch.int64),
            depth,
            requests=requests,
            certain=[length - late for length in lengths],
        )
        found = self.drafter.propose(wanted)
        assert found.shape == (len(requests), depth)
        return found.tolist()

    def right(self, request, depth):
        skipped = self.drafter._read[request].skipped
        head = self.features is not None
        return proposed(self.text[request], skipped, self.ring, depth, head)


@given(st.integers(0, 10**9))
def test_proposals_are_those_of_a_model_that_reads_everything_anew(seed):
    """Requests draft, are verified and are replaced; the host learns of it late."""
    draw = random.Random(seed)
    length = draw.randint(1, 5)
    inner = draw.choice(["model", "eagle3"])
    machine = Machine(
        draw.choice([64, 80, 200]), length, draw.randint(1, 12), inner=inner
    )

    def token():
        return draw.randrange(VOCABULARY)

    def begin(request):
        text = [token() for _ in range(draw.choice([1, 3, 20, 64, 150, 400]))]
        cached = inner == "eagle3" and draw.random() < 0.5
        machine.begin(request, text, draw.randrange(len(text)) if cached else 0)
        return len(text)

    verified = {request: begin(request) for request in (1, 2, 3)}
    while machine.drafter.prepare():
        pass
    for _ in range(draw.randint(5, 60)):
        if draw.random() < 0.05:
            request = draw.choice([1, 2, 3])
            verified[request] = begin(request)
        cold = machine.drafter.prepare()
        late = draw.choice([0, 0, 1])
        depth = draw.randint(1, length)
        asked = [r for r in (1, 2, 3) if r not in cold]
        found = machine.ask(depth, *asked, late=late) if asked else []
        for request, tokens in zip(asked, found, strict=True):
            text = machine.text[request]
            seen = len(text) - late - machine.drafter._read[request].skipped
            if seen - (inner == "eagle3") > length:
                assert tokens == machine.right(request, depth)
            if len(text) - verified[request] >= machine.config.draft_length:
                keep = draw.randint(verified[request], len(text))
                machine.change(request, keep, token())
                verified[request] = keep + 1
            else:
                more = [token() for _ in range(draw.randint(1, 1 + depth))]
                machine.change(request, len(text), *more)
        if max(map(len, machine.text.values())) > 980:
            break


def test_a_text_is_read_in_pieces_before_anything_is_proposed():
    machine = Machine(window=400)
    for request in (1, 2, 3):
        machine.begin(request, [request] * 450)
    assert set(machine.drafter.prepare()) == {2, 3}
    assert machine.ask(2, 1, 3)[1] != [NOTHING] * 2
    sizes = machine.model.sizes
    assert sizes[0] == PIECE
    while machine.drafter.prepare():
        pass
    assert max(sizes) == PIECE
    assert machine.ask(4, 1, 2, 3) == [machine.right(r, 4) for r in (1, 2, 3)]


def test_a_text_that_was_left_alone_is_read_before_proposals():
    machine = Machine()
    machine.begin(1, range(50))
    assert not machine.drafter.prepare()
    machine.ask(3, 1)
    for gap in (20, 300):  # within the window, and beyond it
        machine.change(1, len(machine.text[1]), *[7] * gap)
        assert machine.ask(3, 1) == [machine.right(1, 3)]


def test_a_text_longer_than_the_models_context_is_begun_anew():
    machine = Machine()
    machine.model.context = machine.config.ring_reach
    machine.begin(1, range(60))
    machine.drafter.prepare()
    for _ in range(200):
        assert machine.ask(4, 1) == [machine.right(1, 4)]
        machine.change(1, len(machine.text[1]), 5, 9)
    assert machine.drafter._read[1].skipped > 0


@pytest.mark.parametrize("length", [1, 4])
def test_nothing_is_proposed_for_a_text_shorter_than_what_is_run(length):
    machine = Machine(length=4)
    machine.begin(1, [3] * length)
    assert not machine.drafter.prepare()
    assert machine.ask(2, 1) == [[NOTHING] * 2]
