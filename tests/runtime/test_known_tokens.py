"""A token that is known already takes the place of the one that a prefill samples."""

from types import SimpleNamespace

import torch

from vericache_sglang.runtime.known_tokens import know_next, put_known


def request(outputs):
    return SimpleNamespace(output_ids=list(outputs))


def test_only_the_next_token_of_a_request_that_moved_is_replaced():
    moved, later, other = request([4, 5]), request([4, 5]), request([])
    for each in (moved, later):
        know_next(each, 9)
    later.output_ids += [9, 6]  # prefilled again after a retraction
    sampled = torch.tensor([1, 2, 3])
    put_known(SimpleNamespace(reqs=[moved, later, other]), sampled)
    assert sampled.tolist() == [9, 2, 3]
