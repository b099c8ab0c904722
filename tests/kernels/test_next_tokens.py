"""Next tokens by plain loops and by SGLang; the kernels by the reference.

The kernels run in a process of their own, see ``kernel_device``: this file as a script.
"""

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_device import moved, report, run, unsynced

from vericache_kernels.next_tokens import Noise, bytes_moved, next_tokens
from vericache_kernels.next_tokens.ref import best_tokens, hashes
from vericache_patches.kernels_ops_sampling_murmur_hash import murmur_hash32

SPECIAL = [0.0, 1.5, -2.0, math.inf, -math.inf, math.nan, -math.nan, 1e-40]
ZEROS, BELOW = [0.0, -0.0], [-1.0, -2.0, -0.25, -math.inf]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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
    assert bytes_moved(scores) == 3 * 100 * 2 + 3 * 8
    assert bytes_moved(scores, noise) == 3 * 100 * 2 + 3 * 8 + 3 * 12


@pytest.mark.parametrize(
    ("scores", "seeds", "message"),
    [
        (torch.zeros(3), torch.zeros(3).long(), r"scores must be \[N, V\]"),
        (torch.zeros(3, 0), torch.zeros(3).long(), r"scores must be \[N, V\]"),
        (torch.zeros(3, 4).mT, torch.zeros(4).long(), "contiguous in V"),
        (torch.zeros(3, 4).double(), torch.zeros(3).long(), "scores are torch.float64"),
        (torch.zeros(3, 4), torch.zeros(2).long(), r"noise.seeds must be \[3\]"),
        (torch.zeros(3, 4), torch.zeros(3).int(), "noise.seeds must be one of"),
    ],
    ids=["flat", "empty", "strided", "dtype", "seeds", "seed-dtype"],
)
def test_scores_that_do_not_fit_are_refused(scores, seeds, message):
    with pytest.raises(ValueError, match=message):
        next_tokens(scores, Noise(seeds, torch.zeros(len(seeds)).long()))


def test_the_kernels_equal_the_reference():
    assert run(__file__)["drawn"] > 20


SEEN = {"drawn": 0}


def best_on_device(scores, noise):
    from vericache_kernels.next_tokens.triton_impl import launch

    arguments = moved((scores, noise))
    with unsynced():
        tokens = launch(*arguments)
    return tokens.cpu()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=scored(sizes=(1, 40, 1025, 17000)))
def best_equals_reference(case):
    scores, noise = case
    for each in (None, noise):
        assert torch.equal(best_on_device(scores, each), best_tokens(scores, each))
    SEEN["drawn"] += len(scores)


def best_of_special_numbers_equals_reference():
    """A NaN of either sign is the greatest, a zero of either sign the same."""
    rows = [[1, -math.nan, math.inf], [-1, -0.0, 0.0], [-1, 0.0, -0.0]]
    scores = torch.tensor([*rows, [-math.inf] * 3, [-3, -math.inf, -2]])
    noise = Noise(torch.zeros(5).long(), torch.zeros(5).long())
    assert scores[0, 1].signbit()
    assert best_on_device(scores, None).tolist() == [1, 1, 1, 0, 2]
    assert best_on_device(scores, noise)[[0, 3]].tolist() == [1, 0]


def best_of_strided_rows_equals_reference():
    wide = torch.randn(3, 50, generator=torch.Generator().manual_seed(4))
    assert torch.equal(best_on_device(wide[:, :33], None), wide[:, :33].argmax(1))


if __name__ == "__main__":
    best_equals_reference()
    best_of_special_numbers_equals_reference()
    best_of_strided_rows_equals_reference()
    report(SEEN)
