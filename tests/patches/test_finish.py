"""Runs of accepted tokens end where one-token decoding ends (the finish hook)."""

from types import SimpleNamespace

import pytest

from vericache_patches.managers_schedule_batch import update_finish_state


class OneByOne:
    """A request that ends at token 9, or at the text "ab" (tokens 1, 2)."""

    def __init__(self):
        self.output_ids = []
        self.to_finish = None
        self.finished_len = None
        self.grammar = None
        self.reasoning_tokens = 0
        self.reason = None
        self.checked = []

    def finished(self):
        return self.reason is not None


def original(req, new_accepted_len=1):
    """Stand-in for the method the hook wraps; looks at the last token only."""
    req.checked.append(new_accepted_len)
    if req.to_finish:
        req.reason = req.to_finish
    elif req.output_ids[-2:] == [1, 2]:
        req.reason = "text"
    elif req.output_ids[-1] == 9:
        req.reason = "token"


def feed(runs):
    req = OneByOne()
    for run in runs:
        if req.finished():
            break
        req.output_ids.extend(run)
        update_finish_state(original, req, len(run))
    return req


@pytest.mark.parametrize(
    "tokens", [[5, 9, 1, 2], [1, 2, 9], [3, 1, 9, 2], [5, 1, 2, 1, 2], [4, 4, 4]]
)
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_any_run_length_ends_as_single_tokens_do(tokens, width):
    single = feed([[token] for token in tokens])
    runs = [tokens[i : i + width] for i in range(0, len(tokens), width)]
    together = feed(runs)
    assert together.reason == single.reason
    if single.finished():
        assert together.output_ids[: together.finished_len] == single.output_ids


def test_an_empty_run_costs_nothing_and_honours_an_abort():
    req = OneByOne()
    update_finish_state(original, req, 0)
    assert req.checked == []
    req.to_finish = "abort"
    update_finish_state(original, req, 0)
    assert req.reason == "abort"


def test_a_finished_request_is_left_to_the_original():
    req = SimpleNamespace(
        finished=lambda: True, to_finish=None, grammar=None, checked=[]
    )
    req.output_ids = [1, 9, 3]
    req.reason = None
    update_finish_state(original, req, 3)
    assert req.checked == [3]


class Grammar:
    """Completed by the third token; SGLang advances it over the whole run first."""

    def __init__(self):
        self.seen = 0


def ends_with_grammar(req, new_accepted_len=1):
    if req.grammar is not None and req.grammar.seen >= 3:
        req.reason = "grammar"


@pytest.mark.parametrize("runs", [[[4, 4, 4]], [[4], [4, 4]], [[4, 4], [4]]])
def test_a_grammar_ends_a_run_at_its_last_token(runs):
    req = OneByOne()
    req.grammar = Grammar()
    for run in runs:
        req.grammar.seen += len(run)
        req.output_ids.extend(run)
        update_finish_state(ends_with_grammar, req, len(run))
    assert (req.reason, len(req.output_ids)) == ("grammar", 3)
    assert req.finished_len in (None, 3)


def ended(req, new_accepted_len=1):
    if req.grammar is not None:
        req.reason = "grammar"


@pytest.mark.parametrize(
    ("note", "reason"),
    [
        ((2, True), "grammar"),
        ((2, False), None),  # the token that ends a grammar ends no request
        ((1, False), "grammar"),  # noted of earlier tokens: a prefill's came since
        (None, "grammar"),
    ],
)
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_grammar_ends_a_request_with_the_token_behind_its_end(note, reason, tokens):
    req = OneByOne()
    req.grammar, req.output_ids = Grammar(), [4, 4, *[4] * tokens]
    req.reason = None
    if note is not None:
        req.vericache_grammar_ended = note
    update_finish_state(ended, req, tokens)
    assert req.reason == reason
    assert isinstance(req.grammar, Grammar)


def test_reasoning_ends_with_the_answer():
    """SGLang counts a run's reasoning tokens before the hook cuts the run."""
    req = OneByOne()
    req.output_ids = [4, 9, 4, 4]
    req.reasoning_tokens = 4
    update_finish_state(original, req, 4)
    assert (req.finished_len, req.reasoning_tokens) == (2, 2)
