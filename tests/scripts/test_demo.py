"""The demo's page: what differs is marked, and the exit status says what was shown."""

import pytest

import serve_demo
from demo.page import WRONG, Result, marked, table
from demo.question import Answer, Question

GOOD = (
    '[{"n":1,"name":"verify_user","arguments":{"id":"1","city":"Oslo"}},'
    '{"n":2,"name":"ship_device","arguments":{"id":"2","device":"camera"}}]'
)
QUESTIONS = [Question("1. verify user 1\n2. ...", (1, 2), GOOD)]

MARKED = [
    (GOOD, []),
    (GOOD.replace("Oslo", "Rome"), ["Rome", " (not Oslo)"]),
    (GOOD.replace("verify_user", "reset_code"), ["reset_code"]),
    (GOOD.replace(',"city":"Oslo"', ""), ["missing", " (not Oslo)"]),
    (GOOD.replace('"id":"2",', '"id":"2","x":1,'), ["1", " (not None)"]),
    (GOOD[:40], ["..."]),
    (GOOD.replace("}}]", "}}"), ["..."]),
    ("nonsense", ["nonsense"]),
]


@pytest.mark.parametrize(("text", "wrong"), MARKED)
def test_only_what_differs_is_red(text, wrong):
    found = [
        line.plain[span.start : span.end]
        for line in marked(text, GOOD)
        for span in line.spans
        if span.style == WRONG
    ]
    assert found == wrong


def result(name, text, seconds=1.0):
    return Result(name, [Answer(text, tuple(text.encode()))], seconds)


def test_speed_and_sameness_are_of_the_first_system():
    full, other = result("full", GOOD, 2.0), result("other", GOOD[:-10], 1.0)
    assert other.rate == len(GOOD) - 10
    assert other.same_as(full) == [False]
    assert (full.right(QUESTIONS), other.right(QUESTIONS)) == (1, 0)
    shown = table([full, other], QUESTIONS)
    columns = [[str(cell) for cell in column.cells] for column in shown.columns]
    speed, same = columns[2], columns[3]
    assert speed == ["1.00x", f"{2 * (len(GOOD) - 10) / len(GOOD):.2f}x"]
    assert same == ["1 of 1", "0 of 1"]


def test_a_document_has_one_beginning_and_different_questions():
    document = serve_demo.Document(
        serve_demo.ROOT / "configs/demo-model-long", tokens=900, questions=3, calls=2
    )
    prompts = [question.prompt for question in document.questions]
    assert 700 < document.tokens <= 900
    assert len({prompt[:600] for prompt in prompts}) == 1
    assert len(set(prompts)) == 3


def test_the_picture_is_drawn(tmp_path):
    results = [result("full", GOOD), result("other", GOOD[:-1])]
    serve_demo.draw(results, "a title", tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
