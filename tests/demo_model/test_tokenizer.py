"""The tokenizer built from the generator is the one the checkpoints were made with."""

import json
import random
from pathlib import Path

import pytest

from demo_model import tokenizer
from vericache_sglang import demo_records as records

CONFIGS = Path(__file__).parents[2] / "configs"
FOLDERS = [CONFIGS / "demo-model", CONFIGS / "demo-model-long"]


@pytest.fixture(scope="module")
def built():
    return tokenizer.build()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_shipped_vocabulary_is_rebuilt(built, folder, tmp_path):
    tokenizer.save(built, tmp_path, 16384)
    made = (tmp_path / "tokenizer.json").read_text()
    shipped = (folder / "tokenizer.json").read_text()
    made_list = json.dumps(json.loads(made)["model"]["vocab"])
    assert (
        made_list.encode() == json.dumps(json.loads(shipped)["model"]["vocab"]).encode()
    )
    assert made == shipped
    template = (folder / "chat_template.jinja").read_text()
    assert (tmp_path / "chat_template.jinja").read_text().strip() == template.strip()


@pytest.mark.parametrize(
    "text",
    [
        "Hello wörld, ünïcode 日本 \t tabs\n\n  1234567890",
        "".join(chr(code) for code in range(32, 127)),
    ],
    ids=["foreign", "ascii"],
)
def test_any_text_round_trips(built, text):
    ids = tokenizer.encode(built, text)
    assert built.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.SPECIAL.index("<unk>") not in ids


def test_conversations_round_trip_in_few_tokens(built):
    drawn, text = records.document(random.Random(1), 20, 0.0)
    question, answer = records.multi_request(random.Random(2), drawn, 8)
    whole = f"{records.prompt_text(text, question)}{answer}<|end|>\n"
    ids = tokenizer.encode(built, whole)
    assert built.decode(ids, skip_special_tokens=False) == whole
    assert all(len(tokenizer.encode(built, r.line())) == 31 for r in drawn)
    assert 8 * 40 < len(tokenizer.encode(built, answer)) < 8 * 60
    assert ids.count(tokenizer.SPECIAL.index("<|end|>")) == 3


def test_every_digit_is_a_token(built):
    assert len(tokenizer.encode(built, "0686")) == 4
