"""The shipped checkpoints answer, decoding greedily token by token."""

import json
import random
from pathlib import Path

import pytest
import torch

from demo_model import checkpoint, tokenizer
from vericache_sglang import demo_records as records

CONFIGS = Path(__file__).parents[2] / "configs"


class Greedy:
    """Greedy decoding by hand: one token at a time on the keys kept so far."""

    def __init__(self, folder: Path) -> None:
        self.net, self.built = checkpoint.load(folder), tokenizer.load(folder)
        self.end = self.built.token_to_id("<|end|>")

    def count(self, text: str) -> int:
        return len(tokenizer.encode(self.built, text))

    @torch.inference_mode()
    def answer(self, text: str, most: int) -> str:
        ids, past, made = torch.tensor([tokenizer.encode(self.built, text)]), None, []
        while len(made) < most:
            hidden, _, past = self.net.hidden(ids, past=past)
            token = int(self.net.logits(hidden[0, -1]).argmax())
            if token == self.end:
                break
            made.append(token)
            ids = torch.tensor([[token]])
        return self.built.decode(made, skip_special_tokens=False)


@pytest.fixture(scope="module", params=["demo-model", "demo-model-long"])
def greedy(request):
    torch.set_num_threads(1)
    return Greedy(CONFIGS / request.param)


@pytest.mark.extended
def test_single_calls_are_exact(greedy):
    right = 0
    for seed in range(20):
        prompt = records.prompt_of_length(random.Random(seed), 700, greedy.count)
        right += greedy.answer(prompt.text, 80) == prompt.answer
    assert right >= 18


@pytest.mark.extended
def test_several_calls_at_once_are_exact():
    greedy = Greedy(CONFIGS / "demo-model-long")
    right = 0
    for seed in range(4):
        prompt = records.prompt_of_length(
            random.Random(seed), 1000, greedy.count, calls=5 + seed
        )
        answer = greedy.answer(prompt.text, 480)
        right += answer == prompt.answer
        assert 200 <= greedy.count(answer) <= 450
        assert len(json.loads(answer)) == 5 + seed
    assert right >= 3
