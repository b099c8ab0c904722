"""How far apart two runs' log-probabilities are."""

from math import inf

import pytest

from vericache_sglang.evaluation.sampled import logprob_entries, logprob_gap

TOP = [[-1.0, 5, None], [-2.0, 6, None], [-2.000001, 7, None]]


def report(top=TOP, chosen=(-1.0, 5), own=((-3.0, 20),)):
    answer = {
        "output_token_logprobs": [[*chosen, None]],
        "output_top_logprobs": [None, top],
        "output_token_ids_logprobs": [[[*each, None] for each in own]],
    }
    return {"waves": [[answer]]}


@pytest.mark.parametrize(
    ("other", "gap"),
    [
        ({}, 0.0),
        ({"chosen": (-1.25, 5)}, 0.25),
        ({"chosen": (-1.0, 6)}, inf),
        ({"own": ((-3.5, 20),)}, 0.5),
        ({"own": ((-3.0, 21),)}, inf),
        ({"own": ((None, 20),)}, inf),
        ({"own": ()}, inf),
        ({"top": [TOP[0], TOP[2], TOP[1]]}, 1e-6),
        ({"top": [*TOP[:2], [-2.000001, 8, None]]}, 0.0),
        ({"top": [TOP[0], [-2.0, 8, None], TOP[2]]}, 1e-6),
        ({"top": [TOP[1], TOP[0], TOP[2]]}, 1.0),
        ({"top": [[-1.0, 9, None], *TOP[1:]]}, 1.000001),
        ({"top": TOP[:2]}, inf),
        ({"top": None}, inf),
    ],
)
def test_the_gap_is_that_of_the_worst_entry(other, gap):
    for runs in ((report(), report(**other)), (report(**other), report())):
        assert logprob_gap(*runs) == pytest.approx(gap)


def test_every_entry_is_counted():
    assert logprob_entries(report()) == 6
