"""Next tokens and acceptance: by plain loops, by the engine and SGLang, by the kernel.

Triton decides at import whether it interprets, so the kernels are compared in a process
of their own: this file, run as a script with ``TRITON_INTERPRET=1``.
"""

import dataclasses
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_kernels.accept_commit import (
    Noise,
    Verified,
    accept_commit,
    bytes_moved,
    next_tokens,
    scores_bytes,
)
from vericache_kernels.accept_commit.ref import best_tokens, commit_rows, hashes
from vericache_patches.kernels_ops_sampling_murmur_hash import murmur_hash32
from vericache_sglang.engine.accept import accepted_tokens

SPECIAL = [0.0, 1.5, -2.0, math.inf, -math.inf, math.nan, -math.nan, 1e-40]
ZEROS, BELOW = [0.0, -0.0], [-1.0, -2.0, -0.25, -math.inf]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OUTPUTS = ("tokens", "emitted", "pending", "lengths")


@st.composite
def batches(draw):
    """Draw tokens of a forward and rows of it; few token ids, so that drafts agree."""
    most = draw(st.integers(0, 9))
    rows = draw(
        st.lists(st.tuples(st.integers(0, most), st.integers(0, most + 1)), max_size=6)
    )
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    drafted = torch.tensor([d for d, _ in rows], dtype=torch.int64)
    usable = torch.tensor([min(u, d + 1) for d, u in rows], dtype=torch.int64)
    ids = draw(st.sampled_from([1, 2, 50]))
    drafts = torch.randint(1, ids + 1, (len(rows), most), generator=random)
    # Rows lie in the forward in another order than in the batch, with gaps.
    sizes, order = drafted + 2, torch.randperm(len(rows), generator=random)
    starts = torch.zeros(len(rows), dtype=torch.int64)
    starts[order] = sizes[order].cumsum(0) - sizes[order]
    total = int(sizes.sum())
    tokens = torch.randint(1, ids + 1, (total,), generator=random)
    pending = torch.randint(0, 9, (len(rows),), generator=random)
    lengths = torch.randint(0, 2**20, (len(rows),), generator=random)
    small = draw(st.sampled_from([torch.int32, torch.int64]))
    return tokens, Verified(
        starts.to(small),
        usable.to(small),
        drafts,
        pending,
        lengths.to(small),
    )


@st.composite
def scored(draw, sizes=(1, 7, 40)):
    """Draw scores with ties and special numbers, and noise for them."""
    count, columns = draw(st.integers(0, 3)), draw(st.sampled_from(sizes))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = torch.randn(count, columns, generator=random)
    if draw(st.booleans()):
        scores = -1 - scores.abs()
    if draw(st.booleans()):
        scores = scores.round()
    values = st.sampled_from(draw(st.sampled_from([SPECIAL, ZEROS, BELOW])))
    special = torch.tensor(draw(st.lists(values, min_size=1, max_size=4)))
    share = draw(st.sampled_from([0.0, 0.01, 1.0]))
    chosen = torch.rand(count, columns, generator=random) < share
    drawn = torch.randint(0, len(special), (count, columns), generator=random)
    scores = torch.where(chosen, special[drawn], scores)
    scores = scores.to(draw(st.sampled_from(DTYPES)))
    whole = torch.iinfo(torch.int64)
    seeds = torch.randint(whole.min, whole.max, (count,), generator=random)
    positions = torch.randint(0, 2**33, (count,), generator=random)
    return scores, Noise(seeds, positions)


def murmur_by_hand(words):
    state = 0
    for word in words:
        word = word * 0xCC9E2D51 % 2**32
        word = (word << 15 | word >> 17) % 2**32 * 0x1B873593 % 2**32
        state ^= word
        state = ((state << 13 | state >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    state ^= 4 * len(words)
    state = (state ^ state >> 16) * 0x85EBCA6B % 2**32
    state = (state ^ state >> 13) * 0xC2B2AE35 % 2**32
    return state ^ state >> 16


def noise_by_hand(seed, position, column):
    words = [seed % 2**32, (seed >> 32) % 2**32, position % 2**32, column]
    uniform = murmur_by_hand(words) / (2**32 - 1)
    log = math.log(uniform) if uniform else -sys.float_info.max
    return -math.log(-min(log, -(2.0**-32)))


def best_by_hand(scores):
    """The first of the greatest, NaN above all."""
    best = 0
    for column, score in enumerate(scores):
        if math.isnan(scores[best]):
            break
        if math.isnan(score) or score > scores[best]:
            best = column
    return best


@settings(max_examples=60, deadline=None)
@given(batch=batches())
def test_rows_accept_what_the_engine_accepts(batch):
    tokens, rows = batch
    commit = accept_commit(tokens, rows)
    assert commit.tokens.shape == (len(rows.drafts), rows.drafts.shape[1] + 1)
    assert commit.lengths.dtype == rows.lengths.dtype
    for r in range(len(rows.drafts)):
        usable, start = int(rows.usable[r]), int(rows.first[r])
        run, pending = [], int(rows.pending[r])
        if usable:
            drafts = rows.drafts[r].tolist()
            run = accepted_tokens(drafts, tokens[start : start + usable].tolist())
            pending = run[-1]
        assert int(commit.emitted[r]) == len(run)
        padding = [0] * (rows.drafts.shape[1] + 1 - len(run))
        assert commit.tokens[r].tolist() == run + padding
        assert int(commit.pending[r]) == pending
        assert int(commit.lengths[r]) == int(rows.lengths[r]) + len(run)


def test_acceptance_by_hand():
    tokens = torch.tensor([7, 8, 9, 5, 4, 7, 7, 1])
    rows = Verified(
        first=torch.tensor([0, 3, 5, 7, 0]),
        usable=torch.tensor([3, 2, 2, 1, 0]),
        drafts=torch.tensor([[7, 8], [4, 4], [7, 7], [0, 0], [7, 8]]),
        pending=torch.tensor([1, 2, 3, 4, 5]),
        lengths=torch.tensor([10, 20, 30, 40, 50]),
    )
    commit = accept_commit(tokens, rows)
    # All agree and a bonus; the first is wrong; a grammar ends; a plain row; padding.
    assert commit.tokens.tolist() == [
        *([7, 8, 9], [5, 0, 0], [7, 7, 0]),
        *([1, 0, 0], [0, 0, 0]),
    ]
    assert commit.emitted.tolist() == [3, 1, 2, 1, 0]
    assert commit.pending.tolist() == [9, 5, 7, 1, 5]
    assert commit.lengths.tolist() == [13, 21, 32, 41, 50]


@settings(max_examples=60, deadline=None)
@given(case=scored())
def test_the_best_token_is_the_first_of_the_greatest(case):
    scores, _ = case
    expected = [best_by_hand(row) for row in scores.double().tolist()]
    assert next_tokens(scores).tolist() == expected


@settings(max_examples=40, deadline=None)
@given(case=scored())
def test_a_drawn_token_is_the_best_with_its_noise(case):
    scores, noise = case
    drawn = next_tokens(scores, noise).tolist()
    names = zip(noise.seeds.tolist(), noise.positions.tolist(), strict=True)
    for row, token, (seed, at) in zip(
        scores.double().tolist(), drawn, names, strict=True
    ):
        noised = [s + noise_by_hand(seed, at, i) for i, s in enumerate(row)]
        assert token == best_by_hand(noised)


def test_hashes_are_the_ones_sglang_has():
    seeds = torch.tensor([5, -7, 0, 2**62])
    noise = Noise(seeds, torch.tensor([3, 2**33 + 9, 0, 2**31]))
    found = hashes(noise, 9)
    # Of SGLang 0.5.21's Triton kernel under the interpreter.
    assert found[:2, :4].tolist() == [
        [1143663789, 2739215764, 4235648582, 3872702179],
        [424179439, 207368835, 1576246499, 378305871],
    ]
    theirs = murmur_hash32(seeds, noise.positions, torch.arange(9))
    assert torch.equal(found, theirs.long())


@pytest.mark.sglang
def test_tokens_are_the_ones_sglang_draws(monkeypatch):
    pytest.importorskip("sglang")
    from sglang.srt.layers import sampler

    monkeypatch.setattr(sampler, "murmur_hash32", murmur_hash32)
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 500, generator=random) * 3
    logits[torch.rand(logits.shape, generator=random) < 0.3] = -math.inf
    scores = torch.log(torch.softmax(logits, dim=-1))
    seeds = torch.randint(0, 2**62, (300,), generator=random)
    noise = Noise(seeds, torch.arange(300))
    with torch.compiler.set_stance("force_eager"):
        drawn = sampler.multinomial_with_seed(scores, seeds, noise.positions)
    assert torch.equal(next_tokens(scores, noise), drawn.view(-1))
    assert (next_tokens(scores, noise) != next_tokens(scores)).sum() > 50


def test_a_position_draws_alike_whatever_stands_beside_it():
    random = torch.Generator().manual_seed(1)
    scores = torch.randn(6, 40, generator=random)
    noise = Noise(torch.full((6,), 77), torch.arange(6))
    together = next_tokens(scores, noise)
    for i in range(6):
        own = Noise(noise.seeds[i : i + 1], noise.positions[i : i + 1])
        assert torch.equal(next_tokens(scores[i : i + 1], own), together[i : i + 1])
    again = next_tokens(scores[:1].expand(6, -1).contiguous(), noise)
    assert len(set(again.tolist())) > 1


def test_bytes_moved_are_counted():
    noise = Noise(torch.zeros(3).long(), torch.zeros(3).int())
    scores = torch.zeros(3, 100, dtype=torch.bfloat16)
    assert scores_bytes(scores) == 3 * 100 * 2 + 3 * 8
    assert scores_bytes(scores, noise) == 3 * 100 * 2 + 3 * 8 + 3 * 12
    # In: 4 tokens, 2 * 5 drafts, 3 vectors of 4 bytes and one of 8. Out: 2 * 6 tokens,
    # counts, pending tokens, lengths.
    moved = bytes_moved(*sound())
    assert moved == 4 * 8 + 10 * 8 + 2 * (3 * 4 + 8) + 12 * 8 + 2 * (4 + 8 + 4)


def sound(**changes):
    vectors = {name: torch.zeros(2).int() for name in ("first", "usable")}
    rows = Verified(
        **vectors,
        drafts=torch.zeros(2, 5).long(),
        pending=torch.zeros(2).long(),
        lengths=torch.zeros(2).int(),
    )
    return torch.zeros(4).long(), dataclasses.replace(rows, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafts": torch.zeros(2).long()}, r"drafts must be \[B, d\]"),
        ({"drafts": torch.zeros(2, 5).int()}, "drafts must be int64, is torch.int32"),
        ({"usable": torch.zeros(3).int()}, r"rows.usable must be \[2\]"),
        ({"lengths": torch.zeros(2)}, "rows.lengths must be int32 or int64"),
        ({"first": torch.zeros(2, device="meta").int()}, "rows.first is on meta"),
        (
            {"pending": torch.zeros(4).long()[::2]},
            r"rows.pending must be \[2\], contig",
        ),
        ({"pending": torch.zeros(2).int()}, "rows.pending must be int64"),
    ],
    ids=["flat", "int32", "count", "floats", "device", "strided", "pending"],
)
def test_rows_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        accept_commit(*sound(**changes))


@pytest.mark.parametrize(
    ("scores", "seeds", "message"),
    [
        (torch.zeros(3), torch.zeros(3).long(), r"scores must be \[N, V\]"),
        (torch.zeros(3, 0), torch.zeros(3).long(), r"scores must be \[N, V\]"),
        (torch.zeros(3, 4).mT, torch.zeros(4).long(), "contiguous in V"),
        (torch.zeros(3, 4).double(), torch.zeros(3).long(), "scores are torch.float64"),
        (torch.zeros(3, 4), torch.zeros(2).long(), r"noise.seeds must be \[3\]"),
        (torch.zeros(3, 4), torch.zeros(3).int(), "noise.seeds must be int64"),
    ],
    ids=["flat", "empty", "strided", "dtype", "seeds", "seed-dtype"],
)
def test_scores_that_do_not_fit_are_refused(scores, seeds, message):
    with pytest.raises(ValueError, match=message):
        next_tokens(scores, Noise(seeds, torch.zeros(len(seeds)).long()))


def test_the_kernels_equal_the_reference():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__],
        env=environment | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout)
    assert seen["accepted"] > 20
    assert seen["drawn"] > 20


SEEN = {"accepted": 0, "drawn": 0}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(batch=batches())
def commit_equals_reference(batch):
    from vericache_kernels.accept_commit.triton_impl import launch_commit

    commit, expected = launch_commit(*batch), commit_rows(*batch)
    for name in OUTPUTS:
        assert torch.equal(getattr(commit, name), getattr(expected, name)), name
    SEEN["accepted"] += int((commit.emitted - 1).clamp(min=0).sum())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=scored(sizes=(1, 40, 1025, 17000)))
def best_equals_reference(case):
    from vericache_kernels.accept_commit.triton_impl import launch_best

    scores, noise = case
    assert torch.equal(launch_best(scores, None), best_tokens(scores, None))
    assert torch.equal(launch_best(scores, noise), best_tokens(scores, noise))
    SEEN["drawn"] += len(scores)


def best_of_special_numbers_equals_reference():
    """A NaN of either sign is the greatest, a zero of either sign the same."""
    from vericache_kernels.accept_commit.triton_impl import launch_best

    rows = [[1, -math.nan, math.inf], [-1, -0.0, 0.0], [-1, 0.0, -0.0]]
    scores = torch.tensor([*rows, [-math.inf] * 3, [-3, -math.inf, -2]])
    noise = Noise(torch.zeros(5).long(), torch.zeros(5).long())
    assert scores[0, 1].signbit()
    assert launch_best(scores, None).tolist() == [1, 1, 1, 0, 2]
    assert launch_best(scores, noise)[[0, 3]].tolist() == [1, 0]


def best_of_strided_rows_equals_reference():
    from vericache_kernels.accept_commit.triton_impl import launch_best

    wide = torch.randn(3, 50, generator=torch.Generator().manual_seed(4))
    assert torch.equal(launch_best(wide[:, :33], None), wide[:, :33].argmax(1))


if __name__ == "__main__":
    commit_equals_reference()
    best_equals_reference()
    best_of_special_numbers_equals_reference()
    best_of_strided_rows_equals_reference()
    print(json.dumps(SEEN))
