"""Min-p with a seed (the hook on SGLang's torch sampler)."""

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers import sampler as upstream

from vericache_patches.layers_sampler import sample
from vericache_sglang.platforms.cpu.murmur_hash import murmur_hash32

VOCABULARY = 16
ROWS = 4000

pytestmark = pytest.mark.sglang


@pytest.fixture
def original(monkeypatch):
    """Return SGLang's function, hooked by nobody, hashing without a GPU."""
    monkeypatch.setattr(upstream, "murmur_hash32", murmur_hash32)
    function = upstream.top_k_top_p_min_p_sampling_from_probs_torch
    with torch.compiler.set_stance("force_eager"):  # compiling takes half a minute
        yield getattr(function, "__wrapped__", function)


def distribution(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, VOCABULARY, generator=generator)
    return torch.softmax(logits, dim=-1).expand(ROWS, -1).clone()


def arguments(top_k=VOCABULARY, top_p=1.0, min_p=0.0, *, seeded=True):
    """Return what follows ``probs``; every row has another position."""
    return (
        torch.full((ROWS,), top_k, dtype=torch.int32),
        torch.full((ROWS,), top_p),
        torch.full((ROWS,), min_p),
        min_p > 0,
        torch.full((ROWS,), 7, dtype=torch.int64) if seeded else None,
        torch.arange(ROWS),
    )


def test_upstream_still_refuses(original):
    """Else the patch is to be deleted."""
    with pytest.raises(AssertionError, match="sampling seed"):
        original(distribution(1), *arguments(min_p=0.1))


@pytest.mark.parametrize(
    "cut", [{"min_p": 0.2}, {"min_p": 0.05, "top_k": 5, "top_p": 0.8}], ids=str
)
def test_the_same_tokens_stay_as_without_a_seed(original, cut):
    """What upstream keeps of the distribution without a seed is what is drawn with."""
    probs = distribution(1)
    _, weights, tokens, _ = original(
        probs.clone(), *arguments(**cut, seeded=False), return_filtered_probs=True
    )
    kept = torch.zeros_like(weights).scatter_(-1, tokens.to(torch.int64), weights)
    drawn = sample(original, probs.clone(), *arguments(**cut))
    shares = torch.bincount(drawn.to(torch.int64), minlength=VOCABULARY) / ROWS
    wanted = kept[0] / kept[0].sum()
    assert (wanted == 0).any()
    assert set(drawn.tolist()) == set(wanted.nonzero().flatten().tolist())
    assert torch.allclose(shares, wanted, atol=0.03)


def test_a_seed_gives_the_same_tokens_again(original):
    given = arguments(min_p=0.1)
    first = sample(original, distribution(1), *given)
    assert torch.equal(first, sample(original, distribution(1), *given))
    assert len(set(first.tolist())) > 2


def test_a_token_at_the_threshold_stays(original):
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).expand(ROWS, -1).clone()
    given = list(arguments(min_p=0.25))
    drawn = sample(original, probs, *given)
    assert set(drawn.tolist()) == {0, 1, 2, 3}
    given[2] = torch.full((ROWS,), 0.26)
    assert set(sample(original, probs, *given).tolist()) == {0, 1}


@pytest.mark.parametrize(
    "given",
    [arguments(top_k=3), arguments(min_p=0.1, seeded=False)],
    ids=["no min-p", "no seed"],
)
def test_everything_else_is_passed_on(given):
    calls = []

    def original(*args, **more):
        calls.append((args, more))
        return "result"

    probs = distribution(1)
    assert sample(original, probs, *given, return_filtered_probs=True) == "result"
    ((args, more),) = calls
    assert args[0] is probs
    assert all(a is b for a, b in zip(args[1:], given, strict=True))
    assert more == {"return_filtered_probs": True}


def test_a_row_of_nan_does_not_end_the_batch(original):
    """A grammar that allows no token masks them all; upstream raises for the batch."""
    probs = distribution(1)
    probs[3] = float("nan")
    with pytest.raises(RuntimeError, match="probability tensor"):
        original(probs.clone(), *arguments(top_k=5, seeded=False))
    drawn = sample(original, probs.clone(), *arguments(top_k=5, seeded=False))
    assert drawn[3] == 0
    assert len({*drawn.tolist()}) > 2, "the other rows are drawn as before"
