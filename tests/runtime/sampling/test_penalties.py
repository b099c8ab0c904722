"""Penalties are SGLang's own, bit for bit, for every prefix of a request's drafts."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang")

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling import penaltylib

from vericache_sglang.runtime.eligibility import end_tokens
from vericache_sglang.sampling.penalties import Penalties

VOCABULARY = 12
EOS, STOPS = 6, {2, 9}
PROMPT_END = 3

pytestmark = pytest.mark.sglang

tokens = st.integers(0, VOCABULARY - 1)
weights = st.floats(-2.0, 2.0, width=32)
parameters = st.builds(
    SimpleNamespace,
    frequency_penalty=weights,
    presence_penalty=weights,
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.0625, 2.0, width=32)),
    min_new_tokens=st.integers(0, 8),
    stop_token_ids=st.sampled_from([None, set(), STOPS]),
)


class Batch:
    """What SGLang's penalizers read of a ``ScheduleBatch`` of one request."""

    device = "cpu"

    def __init__(self, params):
        self.reqs = [request(params)]


def request(params):
    return SimpleNamespace(
        sampling_params=params,
        eos_token_ids={EOS},
        tokenizer=SimpleNamespace(eos_token_id=EOS, additional_stop_token_ids=None),
        origin_input_ids=[1, PROMPT_END],
        output_ids=[],
    )


def upstream(params, text, *, lagged):
    """Return SGLang's penalties of the token after ``text``: additive, scaling.

    The batch decodes one token a step; ``cumulate_penalty_output_tokens`` runs before
    each, and under overlap the last step's token is not in ``output_ids`` yet.
    """
    batch = Batch(params)
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(
        vocab_size=VOCABULARY,
        batch=batch,
        penalizers={
            penaltylib.BatchedFrequencyPenalizer,
            penaltylib.BatchedMinNewTokensPenalizer,
            penaltylib.BatchedPresencePenalizer,
            penaltylib.BatchedRepetitionPenalizer,
        },
    )
    batch.sampling_info = SimpleNamespace(penalizer_orchestrator=orchestrator)
    for step in range(1, len(text) + 1):
        batch.reqs[0].output_ids = text[: step - 1] if lagged else text[:step]
        ScheduleBatch.cumulate_penalty_output_tokens(batch)
    additive = torch.zeros(1, VOCABULARY)
    orchestrator.accumulate_additive_penalties(additive)
    return additive, orchestrator.accumulate_scaling_penalties()


def ours(params, noted, *, lagged):
    """Return our penalties after the runs of ``noted``."""
    penalties = Penalties(
        params,
        end_tokens(request(params)),
        VOCABULARY,
        "cpu",
        PROMPT_END if lagged else None,
    )
    for run in noted:
        penalties.note(run)
    return penalties


@settings(deadline=None)
@given(
    parameters,
    st.lists(tokens, min_size=1, max_size=7),
    st.lists(tokens, max_size=5),
    st.booleans(),
)
def test_every_position_is_penalised_as_sglang_does(params, text, drafts, lagged):
    made = ours(params, [text], lagged=lagged).rows(len(text), drafts, 0)
    assert made.additive.shape == (len(drafts) + 1, VOCABULARY)
    for j in range(len(drafts) + 1):
        additive, scaling = upstream(params, text + drafts[:j], lagged=lagged)
        assert torch.equal(made.additive[j : j + 1], additive)
        assert (made.scaling is None) == (scaling is None)
        if scaling is not None:
            assert torch.equal(made.scaling[j : j + 1], scaling)


@settings(deadline=None)
@given(
    parameters,
    st.lists(tokens, min_size=1, max_size=7),
    st.lists(tokens, max_size=5),
    st.integers(0, 5),
)
def test_rows_from_the_middle_are_the_last_of_all_rows(params, text, drafts, first):
    first = min(first, len(drafts))
    penalties = ours(params, [text], lagged=True)
    everything = penalties.rows(len(text), drafts, 0)
    part = penalties.rows(len(text), drafts, first)
    assert torch.equal(part.additive, everything.additive[first:])
    if everything.scaling is not None:
        assert torch.equal(part.scaling, everything.scaling[first:])


@settings(deadline=None)
@given(
    parameters,
    st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(tokens, max_size=3),
    st.booleans(),
)
def test_runs_of_accepted_tokens_leave_what_the_text_alone_does(
    params, runs, drafts, lagged
):
    """Rounds of any length, with drafts made and given up in between."""
    stepped = ours(params, [], lagged=lagged)
    emitted = 0
    for run in runs:
        stepped.note(run)
        emitted += len(run)
        stepped.rows(emitted, drafts, 0)
    text = [token for run in runs for token in run]
    fresh = ours(params, [text], lagged=lagged)
    got, wanted = (p.rows(emitted, drafts, 0) for p in (stepped, fresh))
    assert torch.equal(got.additive, wanted.additive)
    if wanted.scaling is not None:
        assert torch.equal(got.scaling, wanted.scaling)


def test_a_row_by_hand():
    params = SimpleNamespace(
        frequency_penalty=0.5,
        presence_penalty=0.25,
        repetition_penalty=2.0,
        min_new_tokens=3,
        stop_token_ids=None,
    )
    made = ours(params, [[4, 4]], lagged=False).rows(2, [5], 0)
    assert made.additive[0, [4, 5, EOS]].tolist() == [-1.25, 0.0, -torch.inf]
    assert made.additive[1, [4, 5, EOS]].tolist() == [-1.25, -0.75, 0.0]
    assert made.scaling[:, [4, 5]].tolist() == [[2.0, 1.0], [2.0, 2.0]]


def test_under_overlap_the_prompts_end_counts_and_the_newest_token_does_not():
    params = SimpleNamespace(
        frequency_penalty=1.0,
        presence_penalty=0.0,
        repetition_penalty=1.0,
        min_new_tokens=0,
        stop_token_ids=None,
    )
    made = ours(params, [[4, 5]], lagged=True).rows(2, [7], 0)
    counted = [row.nonzero().flatten().tolist() for row in made.additive]
    assert counted == [[PROMPT_END, 4], [PROMPT_END, 4, 5]]
    assert made.scaling is None
