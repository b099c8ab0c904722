"""A grammar walked over drafts, against a fresh one that was given the same text."""

import json
import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject

from vericache_sglang.evaluation.workload import load_tokenizer
from vericache_sglang.sampling.grammar import MOST_DRAFTS, GrammarCursor

MODEL = Path(__file__).parents[3] / "configs" / "demo-model"
VOCABULARY, EOS = 586, 6
ALL_ALLOWED = -1
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "id": {"type": "integer"}},
        "required": ["name", "id"],
    }
)
SOURCES = {
    "regex": r"(name|city)=[a-z]{2,6}(;[0-9]+)*",
    "json": SCHEMA,
    "ebnf": 'root ::= pair ("," pair)*\npair ::= [a-z]+ "=" [0-9]+ ";"',
}

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODEL)


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request, tokenizer):
    if request.param == "xgrammar":
        from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

        return XGrammarGrammarBackend(tokenizer, VOCABULARY, [EOS])
    from sglang.srt.constrained.llguidance_backend import GuidanceBackend

    return GuidanceBackend(tokenizer, n_vocab=VOCABULARY, eos_token_ids=[EOS])


def compiled(backend, kind, source):
    return getattr(backend, f"dispatch_{kind}")(source)


def masks(grammar, rows):
    return grammar.allocate_vocab_mask(VOCABULARY, rows, "cpu")


def after(template, text):
    """Return a fresh grammar that was given ``text``."""
    grammar = template.copy()
    for token in text:
        grammar.accept_token(token)
    return grammar


def mask_after(template, text):
    """Return the mask [words] of what may follow ``text``."""
    grammar = after(template, text)
    mask = masks(grammar, 1)
    if not grammar.is_terminated():
        grammar.fill_vocab_mask(mask, 0)
    return mask[0]


def next_mask(grammar):
    """Return the mask [words] of what may follow where a grammar stands."""
    mask = masks(grammar, 1)
    GrammarCursor(grammar).mask_after([], mask, range(1))
    return mask[0]


def allowed(mask):
    """List the tokens a row of a packed mask allows."""
    words = mask.tolist()
    return [t for t in range(VOCABULARY) if words[t // 32] >> t % 32 & 1]


def walk(template, rng, length):
    """Draw a legal text of ``length`` tokens; shorter where the grammar ends."""
    text = []
    for _ in range(length):
        legal = allowed(mask_after(template, text))
        text.append(rng.choice(legal))
        if text[-1] == EOS:
            break
    return text


@pytest.mark.parametrize("kind", SOURCES)
def test_verified_masks_are_those_of_the_text(backend, kind):
    template = compiled(backend, kind, SOURCES[kind])
    rng = random.Random(7)
    ended = 0
    for _ in range(12):
        text = walk(template, rng, rng.randrange(12))
        if EOS in text:
            text.remove(EOS)
        drafts = walk_on(template, rng, text, rng.randrange(1, 9))
        grammar = after(template, text)
        cursor = GrammarCursor(grammar)
        mask = masks(grammar, len(drafts) + 3)
        usable = cursor.mask_after(drafts, mask, range(1, len(drafts) + 2))
        ends = after(template, text + drafts).is_terminated()
        ended += ends
        assert usable == len(drafts) + (not ends)
        for j in range(usable):
            wanted = mask_after(template, text + drafts[:j])
            assert torch.equal(mask[1 + j], wanted)
        assert (mask[[0, *range(1 + usable, len(mask))]] == ALL_ALLOWED).all()
        assert torch.equal(next_mask(grammar), mask_after(template, text))
    assert ended < 12


def walk_on(template, rng, text, length):
    """Draw legal drafts after ``text``, at least one."""
    drafts = []
    while len(drafts) < length and drafts[-1:] != [EOS]:
        drafts.append(rng.choice(allowed(mask_after(template, text + drafts))))
    return drafts


@pytest.mark.parametrize("kind", SOURCES)
def test_drafting_sees_the_drafts_and_settling_forgets_them(backend, kind):
    template = compiled(backend, kind, SOURCES[kind])
    rng = random.Random(11)
    grammar = template.copy()
    cursor = GrammarCursor(grammar)
    text = []
    for _ in range(4):
        drafts = walk_on(template, rng, text, 5)
        for j, token in enumerate(drafts):
            mask = masks(grammar, 2)
            cursor.mask_after([], mask, range(1, 2))
            assert torch.equal(mask[1], mask_after(template, text + drafts[:j]))
            going = not after(template, text + drafts[: j + 1]).is_terminated()
            assert cursor.draft(token) is going
        cursor.settle()
        mask = masks(grammar, len(drafts) + 1)
        cursor.mask_after(drafts, mask, range(len(drafts) + 1))
        assert torch.equal(mask[0], mask_after(template, text)), "drafts taken back"
        cursor.settle()
        cursor.settle()
        # SGLang itself advances the grammar, over some drafts and another token.
        kept = [token for token in drafts[:2] if token != EOS]
        for token in kept:
            grammar.accept_token(token)
        text += kept


@pytest.mark.parametrize("kind", SOURCES)
def test_proposals_are_taken_back_and_drafts_before_them_are_not(backend, kind):
    """Any prefix of a run that was looked at may be drafted; the cursor goes on."""
    template = compiled(backend, kind, SOURCES[kind])
    rng = random.Random(3)
    for _ in range(12):
        grammar = template.copy()
        cursor, drafted = GrammarCursor(grammar), []
        going = True
        while going and len(drafted) < 9:
            proposed = walk_on(template, rng, drafted, 4)
            mask = masks(grammar, len(proposed) + 1)
            usable = cursor.mask_after(proposed, mask, range(len(proposed) + 1))
            ends = after(template, drafted + proposed).is_terminated()
            assert usable == len(proposed) + (not ends)
            for j in range(usable):
                wanted = mask_after(template, drafted + proposed[:j])
                assert torch.equal(mask[j], wanted)
            kept = proposed[: rng.randrange(1, len(proposed) + 1)]
            for token in kept:
                drafted.append(token)
                going = cursor.draft(token)
                assert going is not after(template, drafted).is_terminated()
        cursor.settle()
        assert torch.equal(next_mask(grammar), mask_after(template, []))


def test_a_run_may_end_with_a_token_that_is_not_allowed(backend, tokenizer):
    template = compiled(backend, "regex", "[0-9]{9}")
    (digit,) = tokenizer.encode("7", add_special_tokens=False)
    (letter,) = tokenizer.encode("q", add_special_tokens=False)
    grammar = template.copy()
    cursor = GrammarCursor(grammar)
    mask = masks(grammar, 3)
    assert cursor.mask_after([digit, digit], mask, range(3)) == 3
    assert [cursor.draft(token) for token in (digit, letter)] == [True, False]
    cursor.settle()
    assert torch.equal(next_mask(grammar), mask_after(template, []))


@pytest.mark.parametrize("tail", [[], [20]], ids=["last", "one more"])
def test_nothing_follows_the_draft_that_ends_the_text(backend, tokenizer, tail):
    template = compiled(backend, "regex", "name=[a-z]")
    letters = tokenizer.encode("name=b", add_special_tokens=False)
    drafts = [*letters, EOS, *tail]
    grammar = template.copy()
    mask = masks(grammar, len(drafts) + 1)
    usable = GrammarCursor(grammar).mask_after(drafts, mask, range(len(drafts) + 1))
    assert usable == len(letters) + 1
    assert allowed(mask[len(letters)]) == [EOS]
    assert not grammar.is_terminated()


def test_a_result_processed_while_drafts_are_ahead_changes_nothing(backend, tokenizer):
    """SGLang writes ``finished`` with every result, that of a drafting step as well."""
    template = compiled(backend, "regex", "name=[a-z]")
    text = tokenizer.encode("name=b", add_special_tokens=False)
    for start in range(len(text) + 1):
        grammar = after(template, text[:start])
        cursor = GrammarCursor(grammar)
        for token in (*text[start:], EOS):
            cursor.mask_after([], masks(grammar, 1), range(1))
            assert cursor.draft(token) is (token != EOS)
            grammar.finished = False
        cursor.settle()
        assert torch.equal(next_mask(grammar), mask_after(template, text[:start]))
        grammar.accept_token((*text, EOS)[start])
        now = mask_after(template, (*text, EOS)[: start + 1])
        assert torch.equal(next_mask(grammar), now)


def test_an_illegal_draft_ends_what_means_something(backend, tokenizer):
    template = compiled(backend, "regex", "[0-9]{9}")
    (digit,) = tokenizer.encode("7", add_special_tokens=False)
    (letter,) = tokenizer.encode("q", add_special_tokens=False)
    grammar = template.copy()
    cursor = GrammarCursor(grammar)
    drafts = [digit, letter, digit]
    mask = masks(grammar, 4)
    assert cursor.mask_after(drafts, mask, range(4)) == 2
    assert torch.equal(mask[1], mask_after(template, [digit]))
    for token, legal in ((digit, True), (letter, False)):
        cursor.mask_after([], masks(grammar, 1), range(1))
        assert cursor.draft(token) is legal
    cursor.settle()
    assert torch.equal(next_mask(grammar), mask_after(template, []))


def test_the_longest_draft_can_be_taken_back(backend, tokenizer):
    template = compiled(backend, "regex", "[0-9]*")
    (digit,) = tokenizer.encode("7", add_special_tokens=False)
    grammar = template.copy()
    cursor = GrammarCursor(grammar)
    for _ in range(MOST_DRAFTS):
        assert cursor.draft(digit)
    cursor.settle()
    assert torch.equal(next_mask(grammar), mask_after(template, []))


def test_drafts_may_cross_the_end_of_a_reasoners_thinking(backend, tokenizer):
    """Free while it thinks, then the grammar; back to thinking when taken back."""
    template = compiled(backend, "regex", "[0-9]{2}")
    (digit,) = tokenizer.encode("7", add_special_tokens=False)
    end = tokenizer.encode("|q", add_special_tokens=False)
    grammar = ReasonerGrammarObject(template.copy(), end)
    grammar.maybe_init_reasoning(True)
    cursor = GrammarCursor(grammar)
    drafts = [40, *end, digit, digit, EOS]
    free = [True] * (1 + len(end)) + [False] * 3
    for _ in range(2):
        mask = masks(grammar, len(drafts) + 1)
        usable = cursor.mask_after(drafts, mask, range(len(drafts) + 1))
        assert usable == len(drafts)
        assert [bool((row == ALL_ALLOWED).all()) for row in mask[:usable]] == free
        assert torch.equal(mask[usable - 1], mask_after(template, [digit, digit]))
        steps = [cursor.draft(token) for token in drafts]
        assert steps == [True] * (len(drafts) - 1) + [False]
        cursor.settle()
        assert grammar.tokens_in_think == 0
        assert grammar.tokens_after_end == -1
