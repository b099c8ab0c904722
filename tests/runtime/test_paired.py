"""A drafter's rows whose drafts a verifier verifies, without forwards or messages.

The verifier knows the text; the drafter's model is wrong now and then. Whatever the
verifier decides and whenever it comes, a draft attends to the KV of the text before it.
"""

import time
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest

from vericache_sglang.kv.request import RequestState
from vericache_sglang.observability.request_stats import RequestStats
from vericache_sglang.remote.messages import Logprobs, Measured
from vericache_sglang.runtime import paired
from vericache_sglang.runtime.early_starts import EarlyStarts
from vericache_sglang.runtime.forward.draft_tokens import DraftTokenBuffer
from vericache_sglang.runtime.paired import LONGEST_S, PairedStarts
from vericache_sglang.runtime.relay import PairedRequest, Relay
from vericache_sglang.runtime.request_logprobs import LISTS
from vericache_sglang.sampling.profile import GREEDY_FAST
from vericache_sglang.scheduling.ewma import Ewma
from vericache_sglang.scheduling.plan import (
    Deliver,
    Draft,
    RequestSpec,
    RowResult,
    SchedulerInput,
    Verify,
)
from vericache_sglang.scheduling.runtime import Runtime
from vericache_sglang.scheduling.settings import RuntimeSettings

PROMPT, MOST, TOKENS, OWN = 5, 4, 120, 2
GIVEN = SchedulerInput(free_slots=10**6, host_slots=10**6, rows=1)


class Drafter:
    """One paired request, and its verifier.

    Attributes:
        kv: Position -> the token whose KV is there.
        late: What the draft rows of the iterations have drafted whose results are not
            recorded yet, in order: tokens, ``drafts`` at the launch and queries.
    """

    def __init__(self, seed, wrong, overlap, proposals):
        self.dice, self.wrong, self.overlap = Random(seed), wrong, overlap
        self.truth = [self.dice.randrange(50) for _ in range(PROMPT + 2 * TOKENS)]
        self.runtime = Runtime(
            RuntimeSettings(
                pacing="staggered",
                residency="host",
                draft_length=MOST,
                max_verifies=1,
                staging_slots=1000,
                token_bytes=1000,
                proposals=proposals,
            )
        )
        params = SimpleNamespace(max_new_tokens=TOKENS)
        kv = SimpleNamespace(req_pool_idx=OWN)
        known = self.truth[PROMPT : PROMPT + 3]
        self.req = SimpleNamespace(
            rid="r",
            kv=kv,
            sampling_params=params,
            origin_input_ids=self.truth[:PROMPT],
            output_ids=known[:],
        )
        self.state = RequestState(
            req=self.req,
            prompt=PROMPT + 2,
            verified=PROMPT + 2,
            outputs=known[:],
            profile=GREEDY_FAST,
            stops=frozenset({49}),
            stats=RequestStats(True, MOST, proposals=proposals),
            planned=True,
        )
        self.kv = dict(enumerate(self.truth[: PROMPT + 2]))
        self.pair = PairedRequest(self.req, 1, known[:])
        self.starts = PairedStarts.__new__(PairedStarts)
        self.starts._placement = SimpleNamespace(
            counters=SimpleNamespace(note_cycle=lambda *counts: None, remote_p2=0)
        )
        self.starts._draft_tokens = DraftTokenBuffer(4, MOST + proposals, "cpu")
        self.starts._config = SimpleNamespace(
            remote_path="p1", draft_length=MOST, keep=0.25
        )
        self.proposals = proposals
        relay = SimpleNamespace(
            count=1,
            paired={"r": self.pair},
            verify=self.verify,
            prepare=self.prepare,
            unpair=lambda rid: relay.paired.pop(rid),
            now=time.monotonic,
            token_s=[Ewma(0.0, least=0.0, most=1.0)] * 2,
            first_s=[Ewma(0.0, least=0.0, most=1.0)] * 2,
        )
        self.starts.attach(relay, self.runtime, {"r": self.state})
        self.runtime.arrive_early(
            RequestSpec(
                rid="r",
                prompt=7,
                kept=4,
                dropped=3,
                remaining=TOKENS - 3,
                proposals=proposals,
            )
        )
        self.starts._rests = {}
        self.starts._segments = SimpleNamespace(stored=None)
        self.arrived = ()
        self.asked, self.announced, self.late = None, None, []
        self.verify(self.pair, ())

    def verify(self, pair, drafts):
        pair.asked, pair.sent = True, len(drafts)
        self.asked = (len(pair.tokens), list(drafts))
        assert not drafts or self.announced == len(pair.tokens)

    def prepare(self, pair, eta_s):
        assert not pair.asked
        assert 0.0 <= eta_s < LONGEST_S
        self.announced = len(pair.tokens)

    def answer(self):
        """Decide what was asked for, or tokens that were not."""
        begin = PROMPT + len(self.pair.tokens)
        if self.asked is None or self.dice.random() < 0.03:
            if self.dice.random() < 0.03:  # a verifier that decodes by itself
                count = self.dice.choice((1, 3, 3 * MOST))
                self.pair.tokens += self.truth[begin : begin + count]
            return
        base, drafts = self.asked
        if base == len(self.pair.tokens):
            text = self.truth[begin : begin + len(drafts)]
            right = [a == b for a, b in zip(drafts, text, strict=True)]
            count = 1 + (*right, False).index(False)
            self.pair.tokens += self.truth[begin : begin + count]
        self.asked = None

    def iterate(self, complete=()):
        """Run one iteration; return the tokens that it emitted.

        Args:
            complete: "r" if its residual KV has come.
        """
        self.record(all_but=1)
        given = replace(
            GIVEN,
            complete=complete,
            arrived=self.arrived,
            proposals=self.proposals,
        )
        plan = self.runtime.plan(given)
        self.arrived = tuple(each.rid for each in plan.stage_ins)
        launched = len(self.late)
        emitted = self.run(plan)
        if len(self.late) == launched:
            self.late.append(())
        for move in plan.moves:
            self.record()
            self.starts.completed(self.state)
            self.runtime.moved(move)
        return emitted

    def record(self, all_but=0):
        while len(self.late) > all_but:
            late = self.late.pop(0)
            if late:
                self.report(*late)

    def run(self, plan):
        state = self.state
        action = self.starts.actions({0: state}, 0).get(0) or plan.rows["r"]
        if isinstance(action, Deliver):
            assert len(action.tokens) <= MOST + self.proposals + 1
            return action.tokens
        if isinstance(action, Verify):
            return self.verified(action.proposals)
        if isinstance(action, Draft):
            for position in range(state.verified - state.behind, state.verified):
                self.kv[position] = self.truth[position]
            state.behind = 0
            self.draft(action.proposals)
        return ()

    def verified(self, proposals):
        """Verify what is drafted over the full KV; proposals behind it are wrong."""
        state, drafts = self.state, self.state.drafts
        most = state.drafted_max
        self.record()
        assert len(drafts) <= MOST + self.proposals
        text = self.truth[state.verified + 1 :]
        right = [a == b for a, b in zip(drafts, text, strict=False)]
        tokens = text[: 1 + (*right, False).index(False)]
        self.kv |= dict(enumerate(self.truth[: state.verified + len(tokens)]))
        state.accept(tokens)
        state.inexact = state.behind = 0
        result = RowResult(
            "r",
            drafted=len(drafts),
            emitted=len(tokens),
            proposed=most - len(drafts) + proposals,
        )
        self.runtime.report([result])
        return tokens

    def draft(self, proposals):
        """Draft one token, and the proposals that agree; these have KV in any case."""
        state = self.state
        made = state.drafts + [token for late in self.late if late for token in late[0]]
        at = state.verified + len(made)
        self.kv[at] = made[-1] if made else state.pending
        text = [*self.truth[: state.verified], state.pending, *made]
        assert [self.kv[p] for p in range(at + 1)] == text, "KV of another text"
        run = []
        for place in range(at + 1, at + 2 + proposals):
            run.append(self.truth[place] + (self.dice.random() < self.wrong))
            self.kv[place] = self.truth[place] + (self.dice.random() < 0.3)
            if run[-1] != self.kv[place]:
                break
        late = run, state.drafts, 1 + proposals
        state.launch_draft(late[2])
        if self.overlap:
            self.late.append(late)
        else:
            self.report(*late)

    def report(self, tokens, drafts, queries):
        current = drafts is self.state.drafts
        ended = self.state.record_draft(tokens, drafts, queries)
        if current and (ended or queries > 1):
            result = RowResult(
                "r", drafted=len(tokens), proposed=queries - 1, ended=ended
            )
            self.runtime.report([result])


@pytest.mark.parametrize("proposals", [0, 3])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wrong", [0.0, 0.2, 1.0])
def test_every_draft_attends_to_the_text_before_it(wrong, overlap, proposals):
    for seed in range(30):
        drafter = Drafter(seed, wrong, overlap, proposals)
        emitted = []
        for _ in range(3000):
            drafter.answer()
            emitted += drafter.iterate()
            if len(emitted) >= TOKENS - 3:
                break
        begin = PROMPT + 3
        assert emitted == drafter.truth[begin : begin + len(emitted)]
        assert len(emitted) >= TOKENS - 3, "nothing waits for ever"
        assert drafter.state.inexact == len(emitted), "all are over draft KV"
        stats = drafter.state.stats
        if wrong == 0.0:
            assert stats.accepted > 0.9 * stats.drafted > 0
        if wrong == 1.0:
            assert stats.accepted < 0.2 * stats.drafted


@pytest.mark.parametrize("proposals", [0, 3])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wrong", [0.0, 0.2, 1.0])
def test_one_whose_residual_kv_comes_goes_on_here(wrong, overlap, proposals):
    """Whenever it comes: what is planned is what there is, and nothing waits."""
    for seed in range(100):
        drafter = Drafter(seed, wrong, overlap, proposals)
        emitted, comes = [], drafter.dice.randrange(60)
        for i in range(3000):
            if "r" in drafter.starts._relay.paired:
                drafter.answer()
            emitted += drafter.iterate(("r",) if i >= comes else ())
            if len(emitted) >= TOKENS - 3:
                break
        begin = PROMPT + 3
        assert emitted == drafter.truth[begin : begin + len(emitted)]
        assert len(emitted) == TOKENS - 3, seed


def test_residual_kv_is_read_as_soon_as_it_would_come_in_time(monkeypatch):
    monkeypatch.setattr(EarlyStarts, "_fits", lambda *_: True)
    drafter, rest_s, asked = Drafter(0, 0.0, False, 0), 1e9, []
    starts, relay = drafter.starts, drafter.starts._relay
    starts._config.remote_path = "auto"
    relay.token_s = [Ewma(0.1, least=0.0, most=1.0)] * 2
    starts.attach(relay, drafter.runtime, {"r": drafter.state})
    starts._segments.stored = SimpleNamespace(
        rest_s=lambda _: rest_s,
        start_early=lambda *given: asked.append(given),
        pop=lambda _: None,
    )
    starts._unread["r"] = ["found"]
    monkeypatch.setattr(drafter.state.__class__, "split", SimpleNamespace(budget=None))

    def emit(tokens):
        begin = len(drafter.state.outputs)
        for _ in range(1000):
            drafter.answer()
            drafter.iterate()
            if len(drafter.state.outputs) >= begin + tokens:
                return

    emit(30)
    assert asked == []
    rest_s = 0.0
    emit(60)
    assert asked == [("r", ["found"])]
    assert "r" in starts._rests


def test_paths_have_the_shares_of_the_program(monkeypatch):
    """Its two rows by hand are those of ``test_path_mix``, a verifier for each."""
    monkeypatch.setattr(paired, "travels", lambda _: True)
    starts, runtime = (
        Drafter(0, 0.0, False, 0).starts,
        Drafter(0, 0.0, False, 0).runtime,
    )
    starts._config.remote_path, starts._drafts = "auto", lambda *_: True
    relay = starts._relay
    relay.token_s, relay.first_s = ([Ewma(0.1, least=0.0, most=1.0)] * 2,) * 2
    relay.count = 2
    starts.attach(relay, runtime, {})
    read_s = 1e-6
    relay.measured = [Measured(1, 10**9, *(0.0, 0.0, read_s, 0.0), 0.0, 0.0)]
    runtime.estimates.iteration._values = (0.0, 0.0, read_s, 0.0)
    waits = []
    starts._segments.kept = 1
    starts._segments.stored = SimpleNamespace(
        token_s=0.0,
        whole_s=lambda segments: 1e-3 * segments,
        draft_s=lambda segments, part: 1e-3 * segments * part,
        await_whole=lambda *told: waits.append(told),
        pop=lambda _: None,
    )
    scheduler = SimpleNamespace(tree_cache=None, max_total_num_tokens=10**9)
    prompt, output = 9500, 1000

    def arrive(i):
        req = SimpleNamespace(
            rid=f"r{i}",
            origin_input_ids=[1] * prompt,
            output_ids=[1] * output,
            prefix_indices=[],
            host_hit_length=0,
            sampling_params=SimpleNamespace(max_new_tokens=output),
            init_next_round_input=lambda *_, **__: None,
        )
        if starts.here(scheduler, req):
            return "local"
        drafts = starts.suit(req)
        starts.forget(req.rid)
        starts.ended(req)
        return "p1" if drafts else "b1"

    assert [arrive(i) for i in range(4)] == ["b1", "p1"] * 2, "before the program"
    starts._mix.note_cycle(10, 10)
    starts._mix.note_drafting(0, 0.25)
    every = [arrive(i) for i in range(400)]
    taken = every[80:]
    # 100 rows near of B1; 10 near and 25 far of P1, the drafts a quarter each.
    expected = (1 / 25) / (1 / 25 + 0.6 / 100)
    assert taken.count("p1") / len(taken) == pytest.approx(expected, abs=0.1)
    assert 0 < every.count("local") == len(waits) <= len(every) / 16, "tries"
    assert starts.figures()["remote_share_p1"] == pytest.approx(expected, abs=0.02)


def test_a_request_that_loses_its_row_has_all_its_log_probabilities():
    """SGLang streams the batch it was in before the relay's next exchange."""
    emitted, decided, first = 5, 8, 3
    values = [-0.5 * i for i in range(decided)]
    lists = {name: [] for name in LISTS}
    lists |= {"output_token_logprobs_val": values[:emitted]}
    lists |= {"output_token_logprobs_idx": [*range(emitted)]}
    asked = SimpleNamespace(top_logprobs_num=0, token_ids_logprob=None, **lists)
    req = SimpleNamespace(
        rid="r", output_ids=[*range(emitted)], return_logprob=True, logprob=asked
    )
    owner = SimpleNamespace(committed={}, returned=[], tokens=lambda _: None)
    owner.relay = lambda *_: None
    transport = SimpleNamespace(now=lambda: 0.0)
    relay = Relay(None, None, owner, transport, None)
    relay.paired["r"] = PairedRequest(
        *(req, 1, [*range(decided)]),
        first=first,
        logprobs=[Logprobs(value) for value in values[first:]],
    )
    assert relay.take(None, req, is_retracted=True)
    assert [*req.output_ids] == asked.output_token_logprobs_idx == [*range(decided)]
    assert asked.output_token_logprobs_val == values
