"""Acceptance against one-token decoding of a made-up model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.sampling.accept import accepted_tokens


def model(text: tuple[int, ...]) -> int:
    """A deterministic 'full-KV model' over a vocabulary of four tokens."""
    return (sum(text) * 7 + len(text) * 3) % 4


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.lists(st.integers(0, 3), max_size=8),
)
def test_accepted_tokens_are_what_one_token_decoding_emits(prompt, drafts):
    text = tuple(prompt)
    target = [model(text + tuple(drafts[:i])) for i in range(len(drafts) + 1)]
    got = accepted_tokens(drafts, target)
    wanted = []
    while len(wanted) < len(got):
        wanted.append(model(text + tuple(wanted)))
    assert got == wanted
    assert 1 <= len(got) <= len(drafts) + 1
    if len(got) <= len(drafts):
        assert drafts[len(got) - 1] != got[-1], "stopped although the draft agreed"


def test_all_accepted_gives_the_bonus_token():
    assert accepted_tokens([5, 6], [5, 6, 7]) == [5, 6, 7]


def test_no_draft_is_one_plain_step():
    assert accepted_tokens([], [9]) == [9]


def test_a_shorter_target_gives_no_token_of_its_own():
    """A grammar ends with the second draft: nothing may follow it."""
    assert accepted_tokens([5, 6, 7], [5, 6]) == [5, 6]
    assert accepted_tokens([5, 6, 7], [5, 9]) == [5, 9]


@pytest.mark.parametrize("target", [[], [1, 2, 3, 4]])
def test_a_target_no_verification_has_is_refused(target):
    with pytest.raises(ValueError, match="2 drafts with"):
        accepted_tokens([1, 2], target)
