"""Log-probabilities laid out as SGLang unpacks a verification's result."""

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from vericache_sglang.sampling.logprobs import (
    LogprobTable,
    TokenLogprob,
    one_token_logprobs,
    read,
)

pytestmark = pytest.mark.sglang


def test_read_gives_an_entry_for_every_row():
    output = LogitsProcessorOutput(
        next_token_logits=None,
        next_token_logprobs=torch.tensor([-0.5, -1.5]),
        next_token_top_logprobs_val=[[-0.1, -0.2], []],
        next_token_top_logprobs_idx=[[7, 8], []],
        next_token_token_ids_logprobs_val=[[], [-3.0]],
        next_token_token_ids_logprobs_idx=[[], [9]],
    )
    assert read(output) == [
        TokenLogprob(-0.5, ([-0.1, -0.2], [7, 8]), ([], [])),
        TokenLogprob(-1.5, ([], []), ([-3.0], [9])),
    ]


def test_what_was_not_asked_is_none():
    output = LogitsProcessorOutput(
        next_token_logits=None, next_token_logprobs=torch.tensor([-0.5])
    )
    assert read(output) == [TokenLogprob(-0.5)]


def test_runs_of_different_length_are_padded_to_the_longest():
    table = LogprobTable()
    table.rows[1] = [TokenLogprob(-1.0, ([-1.0], [4])), TokenLogprob(-2.0)]
    table.rows[2] = [TokenLogprob(-3.0, None, ([-4.0, -5.0], [1, 2]))]
    output = table.pack(3)
    assert output.next_token_logprobs.tolist() == [[0, 0], [-1, -2], [-3, 0]]
    top = [list(values) for values in output.next_token_top_logprobs_val]
    assert top == [[], [], [-1.0], [], [], []]
    tokens = [list(values) for values in output.next_token_top_logprobs_idx]
    assert tokens == [[], [], [4], [], [], []]
    chosen = [list(values) for values in output.next_token_token_ids_logprobs_val]
    assert chosen == [[], [], [], [], [-4.0, -5.0], []]
    asked = [list(values) for values in output.next_token_token_ids_logprobs_idx]
    assert asked == [[], [], [], [], [1, 2], []]


def test_an_iteration_that_emits_nothing_has_one_empty_column():
    output = LogprobTable().pack(2)
    assert output.next_token_logprobs.shape == (2, 1)
    assert len(output.next_token_top_logprobs_val) == 2


def test_plain_rows_become_runs_of_one_token():
    output = LogitsProcessorOutput(
        next_token_logits=None, next_token_logprobs=torch.tensor([-0.5, -1.5])
    )
    one_token_logprobs(output)
    assert output.next_token_logprobs.tolist() == [[-0.5], [-1.5]]
    nothing = LogitsProcessorOutput(next_token_logits=None)
    one_token_logprobs(nothing)
    assert nothing.next_token_logprobs is None
