"""Requests whose next token the host has to know: an iteration waits once for them.

Two further requests are in the batch that ask for nothing. Beside them those that are
sampled with noise, for which nothing waits.
"""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

from decoding_world import (
    LOOKED_AT,
    SAID,
    SETTLED,
    VOCABULARY,
    Server,
    published_arguments,
    served,
    server,
)
from scenarios import engine, scenario
from sglang.srt.constrained.llguidance_backend import GuidanceBackend
from sglang.srt.constrained.outlines_backend import OutlinesGrammar
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang.srt.managers.schedule_batch import ReqLogprob
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry

from vericache_sglang.evaluation.workload import load_tokenizer
from vericache_sglang.observability.request_stats import RequestStats
from vericache_sglang.sampling.grammar import GrammarCursor
from vericache_sglang.sampling.penalties import Penalties
from vericache_sglang.sampling.profile import Profile, SamplingRule

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"
END = 6
"""The demo model's end token."""


def logprobs(state, batch):
    """Ask for log-probabilities, of the likeliest tokens and of some by name."""
    state.req.return_logprob = batch.return_logprob = True
    state.req.logprob = ReqLogprob(top_logprobs_num=2, token_ids_logprob=[1, 3])
    mine = [req is state.req for req in batch.reqs]
    batch.top_logprobs_nums = [2 * asks for asks in mine]
    batch.token_ids_logprobs = [[1, 3] if asks else None for asks in mine]


def penalties(state, batch):
    """Ask for penalties that leave the said token the likeliest."""
    params = SimpleNamespace(
        frequency_penalty=1e-4,
        presence_penalty=1e-4,
        repetition_penalty=1.0001,
        min_new_tokens=300,
    )
    state.penalties = Penalties(params, [END], VOCABULARY, "cuda", lagged=1)


def processor(state, batch):
    """Ask for a custom logit processor, which changes nothing."""
    rows = [i for i, req in enumerate(batch.reqs) if req is state.req]
    state.req.sampling_params.custom_params = {}
    info = batch.sampling_info
    info.has_custom_logit_processor, info.custom_params = True, [{}] * len(batch.reqs)
    for req in batch.reqs:
        req.sampling_params.custom_params = {}
    same = ProcessorEntry(lambda logits, params: logits + 0, rows, None)
    info.custom_logit_processor = {1: same}


def rejection(state, batch):
    """Have drafts verified by rejection sampling."""
    state.profile = Profile(SamplingRule.REJECTION, filtered=True)


def grammar(backend):
    """Return what asks a backend for a text of one letter."""

    def ask(state, batch):
        state.req.grammar = compiled(backend).copy()
        state.req.grammar.accept_token(SAID)
        state.cursor = GrammarCursor(state.req.grammar)
        state.stats.enabled = backend != "outlines"  # which takes no draft back
        batch.has_grammar = True

    return ask


@cache
def compiled(backend):
    """Return the grammar of that text."""
    tokenizer = load_tokenizer(MODEL)
    if backend == "xgrammar":
        made = XGrammarGrammarBackend(tokenizer, VOCABULARY, [END])
        return made.dispatch_regex("a+")
    if backend == "llguidance":
        return GuidanceBackend(tokenizer, n_vocab=VOCABULARY).dispatch_regex("a+")
    # What compiles a text for outlines needs further packages.
    allowed = SimpleNamespace(tokens=[SAID, END])
    guide = SimpleNamespace(
        initial_state=0,
        get_next_state=lambda state, token: state,
        get_next_instruction=lambda state: allowed,
    )
    return OutlinesGrammar(guide, None)


ASKED = {how.__name__: how for how in (logprobs, penalties, processor, rejection)}
ASKED |= {name: grammar(name) for name in ("xgrammar", "llguidance", "outlines")}


def asks(how):
    """Return what has a request ask so, and its tokens heard at once."""

    def ask(state, batch):
        state.profile, state.asynchronous = Profile(SamplingRule.GREEDY), False
        how(state, batch)

    return ask


def drafting(how, graphs=False):
    """Return a scenario in which all requests draft and verify."""

    def run(device):
        with published_arguments(), engine(residency="device", slots=400) as made:
            return served(device, made, graphs, asks=asks(how))

    return run


def joining(how):
    """Return a scenario in which the one that asks joins two that draft."""

    def run(device):
        with published_arguments(), engine(residency="device", slots=400) as made:
            found = Server(device, made)
            found.admit("a", "b")
            found.run(LOOKED_AT)
            waits = found.join("c", asks=asks(how))
            assert waits.total() <= 1
            return waits + found.run(LOOKED_AT, most=1)

    return run


for name, how in ASKED.items():
    scenario(f"asking for {name}")(drafting(how))
    scenario(f"asking for {name}, joining")(joining(how))
scenario("asking for logprobs, in graphs")(drafting(logprobs, graphs=True))


@scenario("asking for logprobs, joined")
def joined(device):
    """One that asks for nothing joins one that asks."""
    with published_arguments(), engine(residency="device", slots=400) as made:
        found = Server(device, made)
        found.admit("a", "b", asks=asks(logprobs))
        found.run(LOOKED_AT)
        waits = found.join("c")
        assert not waits
        return found.run(LOOKED_AT, most=1)


@scenario("asking, decoded plainly")
def decoding_plainly(device):
    with server(device, slots=400) as made:
        made.admit("a", "b", "c", asks=asks(logprobs), stats=RequestStats(False, 8))
        made.run(SETTLED)
        waits = made.join("d")
        return waits + made.run(LOOKED_AT, most=1)


def sampled(rule):
    """Return a scenario of requests whose tokens are drawn with noise of their own."""
    profile = Profile(rule, filtered=rule is SamplingRule.COUPLED, seed=5)

    def run(device):
        with published_arguments(), engine(residency="device", slots=400) as made:
            return served(device, made, profile=profile)

    return run


scenario("loop: sample without a seed")(sampled(SamplingRule.COUPLED))
scenario("loop: sample with a seed")(sampled(SamplingRule.SEEDED))
