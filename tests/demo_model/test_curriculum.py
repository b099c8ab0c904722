"""Batches: what is learned, where, and at which positions."""

import dataclasses
import random
import re

import pytest
import torch

from demo_model import curriculum, tokenizer

STAGES = {
    **{f"single-{i}": stage for i, stage in enumerate(curriculum.SINGLE)},
    **{f"multi-{i}": stage for i, stage in enumerate(curriculum.MULTI)},
}


@pytest.fixture(scope="module")
def built():
    return tokenizer.build()


@pytest.fixture(scope="module")
def maker(built):
    return curriculum.BatchMaker(built)


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_fills_its_sequences(name, maker):
    stage = STAGES[name]
    batch = maker.make(stage, random.Random(name))
    assert batch.ids.shape == (stage.batch, stage.length + 1)
    assert (batch.ids != 0).float().mean() > 0.95
    assert batch.answered.float().mean() > 0.02
    assert batch.labels.shape == (stage.batch, stage.length, 5)
    assert (batch.positions.diff(dim=1) >= 1).all()
    assert batch.positions[:, 0].eq(0).all()
    assert batch.positions.max() < stage.positions


def test_gaps_reach_far_and_only_between_lines(maker):
    stage = dataclasses.replace(curriculum.MULTI[3], batch=1)
    farthest = 0
    for seed in range(30):
        batch = maker.make(stage, random.Random(seed))
        farthest = max(farthest, int(batch.positions.max()))
        jumps = (batch.positions.diff(dim=1) > 1).nonzero()[:, 1]
        assert batch.ids[0, jumps].eq(maker.newline).all()
    assert farthest > 0.8 * stage.positions


@pytest.mark.parametrize("name", ["single-1", "multi-1"])
def test_answers_are_marked_and_nothing_else(name, maker, built):
    batch = maker.make(STAGES[name], random.Random(1))
    for row, mask in zip(batch.ids, batch.answered, strict=True):
        text = built.decode(row.tolist(), skip_special_tokens=False)
        whole = re.findall(r"<\|assistant\|>(.*?<\|end\|>)", text)
        cut = re.findall(r"<\|assistant\|>((?:(?!<\|end\|>).)*)$", text)
        marked = built.decode(row[1:][mask].tolist(), skip_special_tokens=False)
        assert marked == "".join(whole + cut)


def test_labels_name_the_record_and_the_item(maker, built):
    text = (
        "<s><|system|>user 0042|name=Maya Quin|city=Rome\nnote: x.\n<|end|>\n"
        "<|user|>1. verify user 0042\n2. verify user 9310<|end|>\n"
        '<|assistant|>[{"n":1,"name":"verify_user","arguments":{"id":"0042","code":"'
        '7777"}},{"n":2,"name":"verify_user","arguments":{"id":"9310"'
    )
    ids = tokenizer.encode(built, text)
    labels = torch.tensor(maker.label(ids))
    seen, runs = None, []
    for label in labels.tolist():
        if label != seen:
            runs.append(tuple(label))
        seen = label
    none, first, second = (-100,) * 4, (0, 0, 4, 2), (9, 3, 1, 0)
    assert runs == [
        *((*none, -100), (*first, -100), (*none, -100)),
        *((*none, 1), (*first, 1), (*first, 2), (*second, 2)),
        *((*none, -100), (*none, 1), (*first, 1), (*first, 2), (*second, 2)),
    ]


def test_same_seed_same_batch(maker):
    first, second = (maker.make(curriculum.MULTI[2], random.Random(4)) for _ in "12")
    for field in dataclasses.fields(curriculum.Batch):
        assert torch.equal(getattr(first, field.name), getattr(second, field.name))
