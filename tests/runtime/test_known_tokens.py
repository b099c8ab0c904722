"""A token that is known already takes the place of the one that a prefill samples."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.managers.schedule_batch import ReqLogprob
from sglang.srt.managers.scheduler_components.logprob_result_processor import (
    SchedulerLogprobResultProcessor,
)

from vericache_sglang.remote.messages import Logprobs, WantedLogprobs
from vericache_sglang.runtime.known_tokens import (
    know_next,
    put_known,
    take_back,
)
from vericache_sglang.runtime.request_logprobs import (
    LISTS,
    add_logprobs,
    logprobs_from,
    wanted_by,
)

pytestmark = pytest.mark.sglang


def request(outputs, top=-1, chosen=None):
    """Return a request; ``top`` >= 0: with log-probabilities."""
    kept = ReqLogprob(top_logprobs_num=max(top, 0), token_ids_logprob=chosen)
    for name in LISTS:
        setattr(kept, name, [])
    return SimpleNamespace(
        output_ids=list(outputs), return_logprob=top >= 0, logprob=kept, grammar=None
    )


def result(tokens, output=None):
    return SimpleNamespace(next_token_ids=torch.tensor(tokens), logits_output=output)


def test_only_the_next_token_of_a_request_that_moved_is_replaced():
    moved, later, other = request([4, 5]), request([4, 5]), request([])
    for each in (moved, later):
        know_next(each, 9)
    later.output_ids += [9, 6]  # prefilled again after a retraction
    sampled = result([1, 2, 3])
    put_known(SimpleNamespace(reqs=[moved, later, other]), sampled)
    assert sampled.next_token_ids.tolist() == [9, 2, 3]


FULL = [
    Logprobs(-0.5, ((-0.5, -1.5), (7, 8)), ((-3.0,), (4,))),
    Logprobs(-0.25, ((-0.25, -2.5), (9, 8)), ((-4.0,), (4,))),
]


@pytest.mark.parametrize(
    ("top", "chosen", "entries"),
    [
        (0, None, [Logprobs(each.value) for each in FULL]),
        (2, None, [Logprobs(each.value, each.top) for each in FULL]),
        (2, [4], FULL),
    ],
)
def test_a_token_that_is_taken_back_keeps_its_log_probabilities(top, chosen, entries):
    req = request([7, 9], top, chosen)
    assert wanted_by(req) == WantedLogprobs(top, chosen and tuple(chosen))
    add_logprobs(req, req.output_ids, entries)
    assert logprobs_from(req, 0) == entries
    assert logprobs_from(req, 1) == entries[1:]
    take_back(req)
    assert logprobs_from(req, 0) == entries[:1]
    # What SGLang's sampler tells of another token.
    told = SimpleNamespace(
        next_token_logprobs=torch.tensor([-9.0, -9.0]),
        next_token_top_logprobs_val=[torch.zeros(2) for _ in "ab"] if top else None,
        next_token_top_logprobs_idx=[torch.zeros(2).long() for _ in "ab"],
        next_token_token_ids_logprobs_val=[torch.zeros(1) for _ in "ab"] * bool(chosen),
        next_token_token_ids_logprobs_idx=[[0], [0]],
    )
    sampled = result([1, 1], told)
    put_known(SimpleNamespace(reqs=[request([]), req]), sampled)
    assert sampled.next_token_ids.tolist() == [1, 9]
    assert told.next_token_logprobs.tolist() == [-9.0, entries[1].value]
    if top:
        best = told.next_token_top_logprobs_val, told.next_token_top_logprobs_idx
        assert tuple(tuple(each[1].tolist()) for each in best) == entries[1].top
    if chosen:
        assert told.next_token_token_ids_logprobs_val[1].tolist() == [-4.0]
        assert told.next_token_token_ids_logprobs_idx[1] == [4]


def test_a_request_without_log_probabilities_wants_none():
    assert wanted_by(request([1])) is None


def test_output_tokens_that_are_prefilled_are_not_taken_for_the_prompt():
    """SGLang's own code asserts that it is told of as many as the prompt has."""
    req = request([7, 9], top=0)
    req.origin_input_ids, req.logprob_start_len = [1, 2, 3], 3
    req.is_prefill_only, req.input_token_logprobs = False, None
    for kind in ("top", "token_ids"):
        for part in ("val", "idx"):
            setattr(req, f"temp_input_{kind}_logprobs_{part}", None)
    output = SimpleNamespace(next_token_logprobs=[-1.0], input_token_logprobs=(-2.0,))
    given = {"pt": 0, "next_token_ids": [5], "num_input_logprobs": 1}
    put_known(SimpleNamespace(reqs=[req]), result([5]))
    processor = SchedulerLogprobResultProcessor(model_config=None)
    processor.add_logprob_return_values(0, req, output=output, **given)
    assert req.logprob.input_token_logprobs_val == []
    assert req.logprob.output_token_logprobs_val == [-1.0]
