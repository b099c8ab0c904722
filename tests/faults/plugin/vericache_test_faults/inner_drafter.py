"""An inner drafter that knows the answers, or none, or fails.

``VERICACHE_TEST_DRAFTER`` names it: ``oracle`` and ``stale`` read whole texts (lists of
token ids) from the JSON file that ``VERICACHE_TEST_TEXTS`` names; ``ngram`` is the
server's own, and ``nan`` is the server's own head, which reads features that are no
numbers.
Where ``VERICACHE_TEST_PROPOSALS`` names a file, a head's proposals are written to it, a
line each: the text, how many of its first tokens the head has not read, the proposals.
Every row asks it for as many tokens as may be proposed, whether that pays or not. With
``VERICACHE_TEST_RESTLESS`` requests are moved all the time, too.
"""

import json
import os

import torch

from vericache_sglang.drafters.base import Drafter
from vericache_sglang.drafters.features import Features
from vericache_sglang.drafters.model import ModelDrafter
from vericache_sglang.runtime import worker
from vericache_sglang.scheduling.proposals import Proposals
from vericache_test_faults import restless

KIND, TEXTS = "VERICACHE_TEST_DRAFTER", "VERICACHE_TEST_TEXTS"
RESTLESS = "VERICACHE_TEST_RESTLESS"
PROPOSALS = "VERICACHE_TEST_PROPOSALS"


class Informed(Drafter):
    """Proposes nothing and learns nothing.

    Args:
        texts: Texts of the running requests.
    """

    def __init__(self, texts):
        self.texts, self.calls = texts, 0

    def propose(self, wanted):
        self.calls += 1
        return self.proposed(wanted)


class Oracle(Informed):
    """Proposes what plain SGLang said, as long as the text is part of that."""

    def __init__(self, texts):
        super().__init__(texts)
        with open(os.environ[TEXTS], encoding="utf-8") as file:
            self.known = json.load(file)

    def proposed(self, wanted):
        found = []
        for row, length in zip(
            wanted.pool_idx.tolist(), wanted.length.tolist(), strict=True
        ):
            text = self.texts.tokens[row, :length].tolist()
            after = next((k[length:] for k in self.known if k[:length] == text), [])
            found.append([*after[: wanted.depth], *[-1] * wanted.depth][: wanted.depth])
        return torch.tensor(found)


class Stale(Oracle):
    """Proposes what was right one forward earlier, also for another request's text."""

    def __init__(self, texts):
        super().__init__(texts)
        self.last = {}

    def proposed(self, wanted):
        late = self.last
        found = super().proposed(wanted).tolist()
        self.last = dict(zip(wanted.requests, found, strict=True))
        rows = [late.get(request, []) for request in wanted.requests]
        nothing = [-1] * wanted.depth
        return torch.tensor([[*row, *nothing][: wanted.depth] for row in rows])


class Random(Informed):
    """Proposes anything, also what is no token id."""

    def proposed(self, wanted):
        random = torch.Generator().manual_seed(self.calls)
        shape = len(wanted.pool_idx), wanted.depth
        return torch.randint(-5, 2000, shape, generator=random)


class Raising(Random):
    """Raises after a while."""

    def proposed(self, wanted):
        if self.calls > 20:
            raise RuntimeError("this drafter fails")
        return super().proposed(wanted)


def no_numbers(features, pool_idx, position):
    """Return features of the right shape that are no numbers."""
    shape = *position.shape, features.states.shape[-1]
    return torch.full(shape, float("nan"), dtype=features.states.dtype)


def choose_most(proposals, cost):
    """Choose as many proposals as there may be, whatever they cost."""
    proposals.count = proposals.most


def written(propose, file):
    """Return ``ModelDrafter.propose``, which writes what it returns to a file."""

    def proposed(drafter, wanted):
        found = propose(drafter, wanted)
        for i, (request, length) in enumerate(
            zip(wanted.requests, wanted.length.tolist(), strict=True)
        ):
            if found[i, 0] >= 0:
                text = drafter._texts.tokens[request, :length].tolist()
                skipped = drafter._read[request].skipped
                file.write(json.dumps([text, skipped, found[i].tolist()]) + "\n")
        file.flush()
        return found

    return proposed


def install():
    """Open the named drafter in place of the server's."""
    kinds = {kind.__name__.lower(): kind for kind in (Oracle, Stale, Random, Raising)}
    kind = kinds.get(os.environ[KIND])
    if kind is not None:
        worker.open_drafter = lambda config, texts, model, features: kind(texts)
    if os.environ[KIND] == "nan":
        Features.read = no_numbers
    if PROPOSALS in os.environ:
        file = open(os.environ[PROPOSALS], "w", encoding="utf-8")  # noqa: SIM115
        ModelDrafter.propose = written(ModelDrafter.propose, file)
    Proposals.choose = choose_most
    if RESTLESS in os.environ:
        restless.install()
