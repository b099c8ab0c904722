"""The replay against drafting and verifying token by token."""

import pytest
import torch
from transformers import DynamicCache

from vericache_sglang.calibrate.acceptance import (
    Cycles,
    agreeing,
    perfect,
    read,
    replay,
)
from vericache_sglang.calibrate.cache import KV, RoundedCache

ANSWER = 18


def next_token(net, tokens):
    """Run everything again, without a cache."""
    with torch.no_grad():
        return int(net(torch.tensor([tokens])).logits[0, -1].argmax())


def cache_of(net, prompt, verified, draft):
    """Exact KV of verified tokens behind an approximate prompt."""
    exact, built = DynamicCache(), DynamicCache()
    with torch.no_grad():
        net(torch.tensor([prompt + verified]), past_key_values=exact)
    for layer, kv in enumerate(draft):
        keys, values = exact.layers[layer].keys, exact.layers[layer].values
        built.update(
            torch.cat([kv.keys[None], keys[:, :, len(prompt) :]], 2),
            torch.cat([kv.values[None], values[:, :, len(prompt) :]], 2),
            layer,
        )
    return built


def serve(net, prompt, draft, length):
    """Draft freely, one token at a time; verify each draft by a run of its own."""
    verified, rounds = [next_token(net, prompt)], []
    while len(verified) < ANSWER:
        cache = cache_of(net, prompt, verified[:-1], draft)
        drafts = []
        for _ in range(min(length, ANSWER - len(verified))):
            token = (verified + drafts)[-1]
            with torch.no_grad():
                output = net(torch.tensor([[token]]), past_key_values=cache)
            drafts.append(int(output.logits[0, -1].argmax()))
        accepted = 0
        for token in drafts:
            if token != next_token(net, prompt + verified):
                break
            verified.append(token)
            accepted += 1
        rounds.append((len(drafts), accepted))
        if len(verified) < ANSWER:
            verified.append(next_token(net, prompt + verified))
    return verified, rounds


def noisy(reading, size):
    generator = torch.Generator().manual_seed(3)
    return [
        KV(
            *(
                p + size * p.std() * torch.randn(p.shape, generator=generator)
                for p in kv
            )
        )
        for kv in reading.prompt_kv()
    ]


@pytest.mark.parametrize("size", [0.0, 0.2, 0.4])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_the_replay_counts_what_drafting_token_by_token_counts(
    tiny, prompt, size, length
):
    reading = read(tiny, prompt, ANSWER, torch.float32)
    draft = noisy(reading, size)
    answer, rounds = serve(tiny.net, prompt, draft, length)
    drafted, accepted = (sum(column) for column in zip(*rounds, strict=True))
    assert list(reading.answer) == answer
    found = replay(tiny, reading, draft, length)
    assert found == Cycles(len(rounds), drafted, accepted)
    assert (found.accepted == found.drafted) == (size == 0)
    assert found.accepted > 0


@pytest.mark.parametrize("length", [1, 5, 13, 40])
def test_the_exact_kv_is_accepted_whole(tiny, prompt, length):
    reading = read(tiny, prompt, ANSWER, torch.bfloat16)
    found = replay(tiny, reading, reading.prompt_kv(), length)
    assert found == perfect(reading, length)
    # Every round but the last moves on by its drafts and the verifier's token.
    assert found.drafted + found.cycles in (ANSWER - 1, ANSWER)


def test_a_useless_draft_ends_the_round_and_not_the_replay(tiny, prompt):
    reading = read(tiny, prompt, ANSWER, torch.float32)
    nan = [
        KV(*(torch.full_like(p, torch.nan) for p in kv)) for kv in reading.prompt_kv()
    ]
    _, rounds = serve(tiny.net, prompt, nan, 4)
    found = replay(tiny, reading, nan, 4)
    assert found.cycles == len(rounds) > ANSWER // 2
    assert found.accepted == sum(accepted for _, accepted in rounds)


def test_an_answer_ends_where_the_model_ends_it(tiny, prompt, monkeypatch):
    whole = read(tiny, prompt, ANSWER, torch.float32).answer
    end = whole[6]
    monkeypatch.setattr(tiny.net.generation_config, "eos_token_id", [60, end])
    cut = read(tiny, prompt, ANSWER, torch.float32).answer
    first = min(whole.index(t) for t in (60, end) if t in whole)
    assert cut == whole[: first + 1]


def test_the_pool_holds_numbers_of_its_own_dtype(tiny, prompt):
    reading = read(tiny, prompt, 5, torch.bfloat16)
    assert reading.layers[0].keys.dtype == torch.bfloat16
    assert reading.layers[0].keys.shape == (2, len(prompt) + 4, 16)
    cache = RoundedCache(torch.bfloat16)
    with torch.no_grad():
        tiny.run(prompt, cache)
    for layer in cache.layers:
        assert layer.keys.dtype == torch.float32
        assert torch.equal(layer.keys, layer.keys.bfloat16().float())
        assert torch.equal(layer.values, layer.values.bfloat16().float())
    exact = DynamicCache()
    with torch.no_grad():
        tiny.net(torch.tensor([prompt]), past_key_values=exact)
    # Layer 0 does not depend on other rounded numbers.
    wanted = exact.layers[0].keys.bfloat16().float()
    assert torch.equal(cache.layers[0].keys, wanted)


@pytest.mark.parametrize(
    ("guessed", "wanted", "agree"),
    [([], [], 0), ([1], [2], 0), ([1, 2, 3], [1, 2, 3], 3), ([1, 9, 3], [1, 2, 3], 1)],
)
def test_drafts_agree_up_to_the_first_difference(guessed, wanted, agree):
    assert agreeing(guessed, wanted) == agree
