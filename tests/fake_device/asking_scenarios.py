"""Requests whose next token the host has to know: an iteration waits once for them.

Two further requests are in the batch that ask for nothing.
"""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

from decoding_world import (
    LOOKED_AT,
    SAID,
    SETTLED,
    VOCABULARY,
    published_arguments,
    served,
    server,
)
from scenarios import engine, scenario
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

from vericache_sglang.engine.sampling.grammar import GrammarCursor
from vericache_sglang.engine.sampling.penalties import Penalties
from vericache_sglang.engine.sampling.profile import Profile, Rule
from vericache_sglang.evaluation.workload import load_tokenizer

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"
END = 6
"""The demo model's end token."""


def logprobs(state, batch):
    """Ask for log-probabilities, of the likeliest tokens and of some by name."""
    state.req.return_logprob = batch.return_logprob = True
    others = len(batch.reqs) - 1
    batch.top_logprobs_nums = [2] + [0] * others
    batch.token_ids_logprobs = [[1, 3]] + [None] * others


def penalties(state, batch):
    """Ask for penalties that leave the said token the likeliest."""
    params = SimpleNamespace(
        frequency_penalty=1e-4,
        presence_penalty=1e-4,
        repetition_penalty=1.0001,
        min_new_tokens=300,
    )
    state.penalties = Penalties(params, [END], VOCABULARY, "cuda", lagged=1)


def grammar(state, batch):
    """Ask for a text of one letter."""
    state.req.grammar = compiled().copy()
    state.req.grammar.accept_token(SAID)
    state.cursor = GrammarCursor(state.req.grammar)
    batch.has_grammar = True


@cache
def compiled():
    """Return the grammar of that text."""
    backend = XGrammarGrammarBackend(load_tokenizer(MODEL), VOCABULARY, [END])
    return backend.dispatch_regex("a+")


def asks(how):
    """Return what has a request ask so, and its tokens heard at once."""

    def ask(state, batch):
        how(state, batch)
        state.profile, state.late = Profile(Rule.GREEDY), False

    return ask


def drafting(how):
    """Return a scenario in which all requests draft and verify."""

    def run(device):
        with published_arguments(), engine(residency="device", slots=400) as made:
            return served(device, made, asks=asks(how))

    return run


for how in (logprobs, penalties, grammar):
    scenario(f"asking for {how.__name__}")(drafting(how))


@scenario("asking, decoded plainly")
def decoding_plainly(device):
    with server(device, slots=400) as made:
        made.admit("a", "b", "c", asks=asks(logprobs), eligible=False)
        made.run(SETTLED)
        return made.run(LOOKED_AT, most=1)
