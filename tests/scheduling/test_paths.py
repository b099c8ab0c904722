"""Path choice: what is missing is never chosen, bandwidth never hurts, shares hold."""

from collections import Counter
from dataclasses import replace
from math import inf, isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.inter import PATHS
from vericache_sglang.scheduling.paths import (
    ALIKE,
    FORCED,
    MARGIN,
    Path,
    PathChoice,
    Prospects,
    by_arrival,
)

PLAIN = Prospects(
    full_bytes=4000,
    whole_bytes=4000,
    draft_bytes=1000,
    rest_bytes=3000,
    near_bytes_per_s=40_000,
    far_bytes_per_s=1200,
    near_wait_s=0.0,
    draft_wait_s=0.0,
    whole_wait_s=0.0,
    rest_wait_s=0.0,
    verify_load_s=0.1,
    holds=True,
    host_room=True,
    prefill_s=30.0,
    tokens=256,
    draft_length=40,
    acceptance_rate=0.8,
    near_token_s=0.05,
    far_token_s=0.05,
)
"""By hand: full KV near in 0.1 s, draft KV far in 0.83 s, its rest in 2.5 s more."""

CASES = {
    "B1 arrives first": ({}, Path.B1),
    "the verifier is full for 2 s": ({"near_wait_s": 2.0}, Path.P2_CACHED),
    "and keeps no KV": ({"near_wait_s": 2.0, "holds": False}, Path.P2_STATELESS),
    "and answers are short": ({"near_wait_s": 2.0, "tokens": 30}, Path.P1_CACHED),
    "and the link is busy": ({"near_wait_s": 2.0, "rest_wait_s": 20.0}, Path.P1_CACHED),
    "and the host is full": ({"near_wait_s": 2.0, "host_room": False}, Path.P1_CACHED),
    "and no rest is stored": ({"near_wait_s": 2.0, "rest_bytes": None}, Path.P1_CACHED),
    # 4000 / 1200 = 3.3 s: the paper's demotion, unless B1 is earlier.
    "busy verifiers": ({"near_wait_s": 9.0, "verify_load_s": inf}, Path.B2),
    "busy, B1 earlier": ({"near_wait_s": 2.0, "verify_load_s": inf}, Path.B1),
    "no draft KV is stored": ({"near_wait_s": 9.0, "draft_bytes": None}, Path.B2),
    "no live verifier": ({"near_wait_s": inf}, Path.B2),
    "nor a store": ({"near_wait_s": inf, "whole_bytes": None}, Path.LOCAL),
    "the far link is as good": ({"far_bytes_per_s": 40_000}, Path.P2_CACHED),
}

seconds = st.floats(0, 100) | st.just(inf)
sizes = st.none() | st.floats(0, 1e10)
rates = st.floats(1e6, 1e11)
prospects = st.builds(
    Prospects,
    full_bytes=sizes,
    whole_bytes=sizes,
    draft_bytes=sizes,
    rest_bytes=sizes,
    near_bytes_per_s=rates,
    far_bytes_per_s=rates,
    near_wait_s=seconds,
    draft_wait_s=st.floats(0, 100),
    whole_wait_s=st.floats(0, 100),
    rest_wait_s=st.floats(0, 100),
    verify_load_s=seconds,
    holds=st.booleans(),
    host_room=st.booleans(),
    prefill_s=st.floats(0, 100),
    tokens=st.floats(1, 1e4),
    draft_length=st.integers(1, 64),
    acceptance_rate=st.floats(0.05, 1),
    near_token_s=st.floats(1e-3, 1),
    far_token_s=st.floats(1e-3, 1),
)
mixes = st.lists(st.floats(0, 1), min_size=6, max_size=6).filter(lambda w: sum(w) > 0.1)


def shares_of(weights):
    return {
        path: weight / sum(weights) for path, weight in zip(PATHS, weights, strict=True)
    }


def missing(known, path):
    """Name what the path lacks; the oracle for ``Prospects.possible``."""
    lacks = set()
    if path not in (Path.B2, Path.LOCAL):
        if known.near_wait_s == inf:
            lacks.add("verifier")
        if known.full_bytes is None:
            lacks.add("full KV")
    if path is Path.B2 and known.whole_bytes is None:
        lacks.add("whole KV")
    if path[:2] in ("P1", "P2"):
        if known.draft_bytes is None:
            lacks.add("draft KV")
        if known.verify_load_s == inf:
            lacks.add("grant")
        if path.endswith("cached") and not known.holds:
            lacks.add("slot")
    if path[:2] == "P2" and (known.rest_bytes is None or not known.host_room):
        lacks.add("rest")
    return lacks


def test_paths_are_those_of_the_program():
    assert {*PATHS, "local"} == set(Path)


@pytest.mark.parametrize("name", CASES)
def test_by_hand(name):
    change, path = CASES[name]
    assert by_arrival(replace(PLAIN, **change)) is path
    assert PathChoice().choose(replace(PLAIN, **change)) is path


def test_predictions_by_hand():
    assert PLAIN.end_s(Path.B1) == pytest.approx(0.1 + 256 * 0.05)
    assert PLAIN.end_s(Path.B2) == pytest.approx(4000 / 1200 + 256 * 0.05)
    # 8 cycles of 40 drafts and a verification, Eq. (tp_inter).
    assert PLAIN.end_s(Path.P1_CACHED) == pytest.approx(1000 / 1200 + 8 * 2.05)
    slow = replace(PLAIN, verify_load_s=3.0)
    assert slow.end_s(Path.P1_STATELESS) == pytest.approx(1000 / 1200 + 8 * 3.05)
    # 2.5 s of 16.4 s: 39 of 256 tokens, the others by decoding.
    rest = 256 * (1 - 2.5 / 16.4) * 0.05
    assert PLAIN.end_s(Path.P2_CACHED) == pytest.approx(1000 / 1200 + 2.5 + rest)


@given(known=prospects, weights=mixes, forced=st.sampled_from(["auto", *FORCED]))
def test_what_is_chosen_has_all_it_needs(known, weights, forced):
    choice = PathChoice(forced)
    for path in Path:
        assert known.possible(path) == (not missing(known, path))
        assert isfinite(known.eta_s(path)) == known.possible(path)
        assert known.end_s(path) >= known.eta_s(path)
    for shares in ({}, shares_of(weights)):
        choice.shares = shares
        for _ in range(5):
            path = choice.choose(known)
            assert missing(known, path) == set()
            choice.took(path)


@given(known=prospects, weights=mixes, name=st.sampled_from(list(FORCED)))
def test_a_forced_path_wins_where_it_is_possible(known, weights, name):
    choice = PathChoice(name)
    choice.shares = shares_of(weights)
    kinds = [path for path in Path if path.lower().startswith(name)]
    if any(not missing(known, path) for path in kinds):
        assert choice.choose(known) in kinds


@given(
    known=prospects,
    near=st.floats(1, 100),
    far=st.floats(1, 100),
    path=st.sampled_from(Path),
)
def test_more_bandwidth_never_makes_the_arrival_later(known, near, far, path):
    more = replace(
        known,
        near_bytes_per_s=known.near_bytes_per_s * near,
        far_bytes_per_s=known.far_bytes_per_s * far,
    )
    assert more.eta_s(path) <= known.eta_s(path)
    before, after = by_arrival(known), by_arrival(more)
    assert more.eta_s(after) <= known.eta_s(before)


@settings(max_examples=15, deadline=None)
@given(weights=mixes)
def test_many_alike_requests_follow_the_program(weights):
    # All six within a fifth: nothing to wait for, and the same KV everywhere.
    alike = replace(PLAIN, far_bytes_per_s=40_000, acceptance_rate=1.0, rest_bytes=9.0)
    ends = [alike.end_s(Path(path)) for path in PATHS]
    assert max(ends) <= (1 + ALIKE) * min(ends)
    choice = PathChoice()
    choice.shares = shares_of(weights)
    taken = Counter()
    for _ in range(800):
        path = choice.choose(alike)
        choice.took(path)
        taken[path] += 1
    for path, share in choice.shares.items():
        assert taken[path] / 800 == pytest.approx(share, abs=MARGIN + 0.03)


def test_shares_decide_only_between_paths_that_end_alike():
    choice = PathChoice()
    choice.shares = {"B2": 1.0}
    for tokens, found in ((2000, Path.B2), (100, Path.B1)):
        # 3.2 s later: of 100 s it does not matter, of 5 s it does.
        known = replace(PLAIN, tokens=tokens)
        assert choice.choose(known) is found


def test_an_unknown_path_is_refused():
    with pytest.raises(ConfigError, match="path p3; known: auto, local, b1"):
        PathChoice("p3")
