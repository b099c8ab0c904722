"""``stop_regex``: what may be searched after every token, and what may not."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.errors import ConfigError
from vericache_sglang.serving.stop_patterns import MOST_WAYS, check_stop_patterns


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "a", r"[0-9]{4}", r"\d{1,3}\.", "\n\n+", ".*", "(?:ab|cd)+", "(?=a)b"),
        *("(?<=a)b", "(?i)stop", "^Answer: [A-D]$", "(?:foo|bar|baz){1,3}x"),
        *(r"\s{0,16}:\s{0,16}x", "(?>a{1,3})b", "(a(b(c)))", "x" * 256),
    ],
)
def test_a_bounded_pattern_is_accepted(pattern):
    check_stop_patterns([pattern])


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        *((p, "without a bound") for p in ("(a+)+$", "(.*)*x", "(a|aa)+$", "a*b")),
        *((p, "without a bound") for p in ("[^x]*x", "(?=a*b)", "(?!a+)", "a+?b")),
        *((p, f"more than {MOST_WAYS} ways") for p in ("(a?){40}a{40}", "(a?b?c?){9}")),
        ("(a{0,40}){0,20}b", f"more than {MOST_WAYS} ways"),
        *((p, "span more than") for p in ("a{1000000}", "(?:a{300}){300}")),
        *((p, "backreferences") for p in (r"(a)\1", r"(a)?(?(1)b|c)")),
        ("(", "missing"),
        ("a{4294967295}", "too large"),
        ("(" * 5000 + ")" * 5000, "stop_regex"),
    ],
)
def test_a_pattern_that_may_take_long_is_refused(pattern, why):
    with pytest.raises(ConfigError, match=why) as refusal:
        check_stop_patterns([pattern])
    assert len(str(refusal.value)) < 250


def test_the_ways_of_all_patterns_count_together():
    one = "a{0,200}b"
    check_stop_patterns([one])
    with pytest.raises(ConfigError, match="ways"):
        check_stop_patterns([one] * 8)


ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "(?:ab|a)", "(a|b|ab)", "a?", "^", "$"])
COUNTS = st.sampled_from(["", "*", "+", "?", "{2}", "{0,9}", "{3,}", "*?", "{1,40}"])
PATTERNS = st.recursive(
    st.tuples(ATOMS, COUNTS).map("".join),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, COUNTS).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.tuples(inner, inner).map("|".join),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(PATTERNS, st.sampled_from(["a", "ab", "aab", "b"]))
def test_the_search_for_an_accepted_pattern_ends(pattern, unit):
    """One whose time doubles with each character never does, in 3,000 of them."""
    try:
        re.compile(pattern)
        check_stop_patterns([pattern])
    except (ConfigError, re.error):
        return
    re.search(pattern, unit * (3000 // len(unit)) + "c")
