"""Rows launched before earlier results are known, against a synchronous replay.

A request drafts, is verified, falls back to full KV and decodes, with proposals of an
inner drafter. A forward's results reach the host when the next one has been launched,
or at once; what a forward runs must not depend on it. Both models say one token per
position, whatever they have read.
"""

from types import SimpleNamespace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vericache_kernels.token_commit import DRAFT, EMIT, DraftTokenRows
from vericache_sglang.compression.budget import Budget
from vericache_sglang.kv.request import Parts, RequestState
from vericache_sglang.observability.request_stats import RequestStats
from vericache_sglang.runtime.forward.draft_tokens import DraftTokenBuffer
from vericache_sglang.runtime.forward.rows import MixedRows
from vericache_sglang.runtime.result_recorder import ResultRecorder
from vericache_sglang.sampling.profile import GREEDY_FAST
from vericache_sglang.scheduling.plan import Draft, Plain, Residency, Verify

PROMPT, KEPT, MOST = 8, 3, 12
"""Tokens of the prompt and of its draft KV; most drafts of a verification."""
OWN, DRAFT_ROW, VERIFY_ROW = 2, 7, 4
DECODE = 1000
"""First decode slot."""
TEXT = 600
"""Tokens that are known; no history is longer."""
LONGEST = PROMPT + KEPT + TEXT
"""Length of a row of the block table."""


class Proposer:
    """Proposes the given tokens, behind the text's end."""

    def __init__(self, replay, proposed):
        self.replay, self.proposed = replay, torch.tensor(proposed, dtype=torch.int64)

    def propose(self, rows, own, last, position):
        replay = self.replay
        text = replay.verified + len(replay.drafts)
        assert position.tolist() == [text]
        assert rows[0].text <= text + 1
        columns = torch.arange(len(self.proposed)) + last + 1
        replay.buffer.propose(own.expand_as(columns), columns, self.proposed)


class Replay:
    """One request whose results are recorded late, beside what truly happened.

    Args:
        residency: Where its residual KV is before the fall back.
        models: By position, what the full KV says and what the draft KV says.
    """

    def __init__(self, residency, models):
        self.truth, self.guesses = models
        self.placement = SimpleNamespace(
            table=torch.zeros(8, LONGEST, dtype=torch.int32),
            verify_rows=range(VERIFY_ROW, VERIFY_ROW + 1),
            prefetches=SimpleNamespace(spans=lambda rid: (), end=lambda rid: None),
            counters=SimpleNamespace(note_cycle=lambda *counts: None),
        )
        self._list(KEPT if residency is Residency.HOST else PROMPT + KEPT)
        kv = SimpleNamespace(req_pool_idx=OWN, kv_allocated_len=LONGEST)
        req = SimpleNamespace(rid="r", kv=kv, extra_key=None)
        self.state = RequestState(
            req=req,
            prompt=PROMPT,
            verified=PROMPT,
            outputs=[self.truth[PROMPT]],
            profile=GREEDY_FAST,
            stops=frozenset(),
            stats=RequestStats(True, MOST),
        )
        none = torch.zeros(1, 1, 0, dtype=torch.int32)
        budget = Budget(PROMPT, KEPT, 0, 0)
        self.state.parts = Parts(budget, none, none, residency, True)
        self.state.parts.draft_row = DRAFT_ROW
        self.buffer = DraftTokenBuffer(8, MOST, "cpu")
        self.buffer.put([self.state])
        self.results = []
        self.recorder = ResultRecorder(
            self.placement,
            SimpleNamespace(report=self.results.extend),
            {"r": self.state},
        )
        self.verified, self.drafts, self.late = PROMPT, [], None

    def _list(self, head):
        """List the decode slots behind ``head`` slots of the prompt."""
        self.placement.table[OWN] = torch.arange(LONGEST) + DECODE - head

    def fall_back(self):
        """Drop the drafts and list full KV, as ``KVPlacement`` does on ``Restore``."""
        self.state.parts = None
        self.state.drop_drafts()
        self.drafts = []
        self._list(PROMPT)

    def run(self, action, proposed, at_once):
        """Run one forward; its result is recorded now, or after the next one's launch.

        Args:
            action: Of the request.
            proposed: Tokens of the inner drafter, as many as the action asks for.
            at_once: The result is recorded now.
        """
        rows = MixedRows(self.placement)
        rows.add(0, self.state, action)
        (row,) = rows.rows
        queries, drafts = len(row.columns), isinstance(action, Draft)
        exact = len(self.drafts)
        inputs = rows.inputs(self.buffer, Proposer(self, proposed))
        first = exact if drafts else 0
        places = [self.verified + first + i for i in range(queries)]
        assert inputs.positions.tolist() == places
        slots = [DECODE + place - PROMPT for place in places]
        assert inputs.slots.tolist() == slots
        known = [self.truth[self.verified], *self.drafts, *proposed][first:]
        assert inputs.tokens.tolist()[: len(known)] == known[:queries]
        self._check_listed(row, inputs, slots, drafts)
        says = self.guesses if drafts else self.truth
        target = torch.tensor([says[place + 1] for place in places])
        emission = self.buffer.commit(
            DraftTokenRows(
                torch.tensor([OWN]),
                torch.tensor([0, queries]),
                torch.tensor([DRAFT if drafts else EMIT]),
            ),
            target,
        )
        new = [token for token in emission.tokens[0].tolist() if token >= 0]
        assert new == [says[place + 1] for place in places[: len(new)]]
        if drafts:
            self.drafts += new
        else:
            self.verified, self.drafts = self.verified + len(new), []
        launched = self.recorder.launch(
            self.state,
            0,
            queries=queries,
            verifies=isinstance(action, Verify),
            emits=not drafts,
        )
        self.record()
        self.late = launched, new
        if at_once:
            self.record()

    def _check_listed(self, row, inputs, slots, drafts):
        """A row ends with the decode slots up to its queries; bounds are no smaller."""
        (prefix,) = inputs.prefixes.tolist()
        (bound,) = inputs.bounds
        assert bound >= prefix
        listed = self.placement.table[row.table_row, : prefix + len(slots)].tolist()
        assert listed[prefix:] == slots
        decoded = slots[0] - DECODE
        assert listed[prefix - decoded : prefix] == list(range(DECODE, slots[0]))
        parts = KEPT if drafts else PROMPT
        assert prefix - decoded == parts

    def record(self):
        """Record the results of the forward that is not recorded yet."""
        if self.late is not None:
            row, tokens = self.late
            self.late = None
            self.recorder.record([row], [tokens])

    def check(self):
        """Compare what the host knows once everything is recorded."""
        self.record()
        state = self.state
        assert state.verified == self.verified
        assert state.drafts == self.drafts
        assert (state.pending_max, state.drafted_max) == (0, len(self.drafts))
        assert state.outputs == self.truth[PROMPT : self.verified + 1]


PROPOSED = st.lists(st.integers(1, 2), max_size=4)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["draft", "draft", "draft", "verify"]), PROPOSED, st.booleans()
    ),
    max_size=40,
)
"""Each: the row, what is proposed, and whether the result is recorded at once."""
AUTOREGRESSIVE = st.lists(st.tuples(PROPOSED, st.booleans()), max_size=10)


@settings(suppress_health_check=[HealthCheck.large_base_example])  # long histories
@given(
    st.sampled_from([Residency.HOST, Residency.DEVICE]),
    STEPS,
    AUTOREGRESSIVE,
    st.randoms(use_true_random=False),
)
def test_what_a_forward_runs_does_not_depend_on_what_is_recorded(
    residency, steps, autoregressive, rng
):
    truth = [rng.randint(1, 2) for _ in range(TEXT)]
    guesses = [token if rng.random() < 0.8 else 3 - token for token in truth]
    replay = Replay(residency, (truth, guesses))
    for kind, proposed, at_once in steps:
        room = MOST - replay.state.drafted_max
        if kind == "draft" and room > len(proposed):
            action = Draft("r", len(proposed))
        else:
            proposed = proposed[:room]
            action = Verify("r", len(proposed))
        replay.run(action, proposed, at_once)
    replay.fall_back()
    for proposed, at_once in autoregressive:
        replay.run(Plain("r", len(proposed)), proposed, at_once)
    replay.check()
