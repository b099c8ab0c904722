"""Official scoring against cases scored by hand."""

import json
import random
from functools import partial
from pathlib import Path

import pytest

from vericache_sglang.evaluation.benchmark import DEMO_LONG
from vericache_sglang.evaluation.tasks.calls import calls_in, numbered_calls
from vericache_sglang.evaluation.tasks.catalog import TASKS
from vericache_sglang.evaluation.tasks.complex_func_bench import (
    REFUSED,
    format_error,
    same_call,
)
from vericache_sglang.evaluation.tasks.sample import TwinSize, totals
from vericache_sglang.evaluation.workload import count_tokens, load_tokenizer

FILES = Path(__file__).with_name("files")


def samples(name):
    return TASKS[name].load(FILES / name)


def said(*calls):
    return json.dumps([{"name": name, "arguments": args} for name, args in calls])


SEARCH = ("Search_Hotel_Destination", {"query": "Turin"})
HOTELS = (
    "Search_Hotels",
    {"dest_id": "17", "search_type": "city", "adults": 2, "categories_filter": "b,a"},
)
ROOM_5 = ("Get_Room_List", {"hotel_id": "5"})
ROOM_6 = ("Get_Room_List", {"hotel_id": "6", "refundable": True})
DONE = "Hotel 6 has what you want."


def play(answers):
    """Return the score of a conversation, and what it was told after each answer."""
    task, sample = TASKS["complex-func-bench"], samples("complex-func-bench")[0]
    told = [task.follow(sample, answers[: i + 1]) for i in range(len(answers))]
    return task.score(sample, answers), told


def test_a_whole_chain_is_right_with_filters_in_any_order():
    score, told = play([said(SEARCH), said(HOTELS), said(ROOM_6, ROOM_5), DONE])
    assert score == {"correct": 4, "golden": 4, "ended": 1.0, "one": 1}
    assert [json.loads(each["content"]) for each in told[2]] == [
        {"rooms": 2},
        {"rooms": 1},
    ]
    assert told[0][0]["role"] == "tool"
    assert told[3] is None


def test_a_free_search_may_be_left_out():
    score, _ = play([said(HOTELS), said(ROOM_5, ROOM_6), DONE])
    assert (score["correct"], score["ended"]) == (3, 1.0)


def test_a_wrong_argument_gets_the_error_and_the_rest_goes_on():
    wrong = ("Get_Room_List", {"hotel_id": "7"})
    score, told = play([said(SEARCH), said(HOTELS), said(ROOM_5, wrong), DONE])
    assert (score["correct"], score["ended"]) == (3, 0.0)
    assert json.loads(told[2][1]["content"]) == REFUSED


def test_nothing_right_ends_the_chain():
    score, told = play([said(SEARCH), said(("Get_Room_List", {"hotel_id": "1"})), DONE])
    assert (score["correct"], score["ended"]) == (1, 0.0)
    assert told[1] is None


def test_an_ill_formed_call_is_told_what_is_wrong_and_may_try_again():
    text = ("Search_Hotels", {**HOTELS[1], "adults": "2"})
    calls = [said(SEARCH), said(text), said(HOTELS), said(ROOM_5, ROOM_6), DONE]
    score, told = play(calls)
    assert (score["correct"], score["ended"]) == (4, 1.0)
    assert "adults" in json.loads(told[1][0]["content"])["error"]


@pytest.mark.parametrize("answers", [[DONE], [said(SEARCH), said(HOTELS), DONE]])
def test_stopping_early_is_no_success(answers):
    assert play(answers)[0]["ended"] == 0.0


def test_going_on_after_the_end_is_no_success():
    answers = [said(SEARCH), said(HOTELS), said(ROOM_5, ROOM_6), said(ROOM_5)]
    assert play(answers)[0]["ended"] == 0.0


def test_figures_are_ratios_of_sums():
    """By hand: 4 of 4 and 0 of 1 calls; 1 of 2 chains."""
    task, (first, second) = TASKS["complex-func-bench"], samples("complex-func-bench")
    whole = [said(SEARCH), said(HOTELS), said(ROOM_5, ROOM_6), DONE]
    parts = [task.score(first, whole), task.score(second, ["I do not know."])]
    assert totals(task, parts) == {"call accuracy": 0.8, "success": 0.5}
    assert totals(task, []) == {"call accuracy": None, "success": None}


@pytest.mark.parametrize(
    ("name", "arguments", "word"),
    [
        ("Get_Room_List", {"hotel_id": "5", "rooms": []}, ""),
        ("Get_Room_List", {"hotel_id": 5}, "should be a string"),
        ("Get_Room_List", {"hotel_id": "5", "refundable": "yes"}, "a boolean"),
        ("Get_Room_List", {"hotel_id": "5", "rooms": "1"}, "an? array"),
        ("Get_Room_List", {"rooms": []}, "requires parameters"),
        ("Get_Room_List", {"hotel_id": "5", "floor": 1}, "does not have parameters"),
        ("Get_Room", {}, "not defined"),
    ],
)
def test_the_format_of_a_call(name, arguments, word):
    functions = samples("complex-func-bench")[0].wanted.functions
    found = format_error({"name": name, "arguments": arguments}, functions)
    assert bool(found) == bool(word)
    assert word.replace("an? ", "") in found.replace("an ", "")


def test_only_filters_may_be_in_another_order():
    def call(**arguments):
        return {"name": "f", "arguments": arguments}

    assert same_call(call(categories_filter="a, b"), call(categories_filter="b,a"))
    assert not same_call(call(other="a, b"), call(other="b,a"))
    assert not same_call(call(a=1), call(a=1, b=2))
    assert not same_call(call(categories_filter=3), call(categories_filter="b"))


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
        'I call {"name": "f", "parameters": {"a": 1}} now {',
        '```json\n{"name": "f", "arguments": "{\\"a\\": 1}"}\n```',
    ],
)
def test_calls_are_found_in_every_models_words(text):
    assert calls_in(text) == [{"name": "f", "arguments": {"a": 1}}]


def test_what_is_no_call_is_none():
    assert (
        calls_in('{"a": 1} [1, 2] {"name": "f"} {"name": "f", "arguments": "{"}') == []
    )


def test_a_cut_list_keeps_its_whole_calls():
    text = '[{"n":1,"name":"f","arguments":{}},{"n":2,"name":"g","argum'
    assert list(numbered_calls(text)) == [1]


def problems(answer):
    task, (sample,) = TASKS["gsm8k-long"], samples("gsm8k-long")
    return totals(task, [task.score(sample, [answer])])


def test_problems_in_order_and_a_defect_of_the_official_figure():
    """1,000 is never met officially: the comma stays in the wanted number."""
    found = problems(
        "Answer_9:\n3 + 4 = 7.\nThe answer is 7.\n\nAnswer_10:\nThe answer is 1,000."
        "\n\nAnswer_11:\nThe answer is 2.5."
    )
    assert found == {"exact": 1, "exact, official": 2 / 3, "whole batches": 1}


def test_a_missing_answer_is_wrong_and_vanishes_officially():
    found = problems("Answer_9:\nThe answer is 7.\n\n")
    assert found == {"exact": 1 / 3, "exact, official": 1, "whole batches": 0}


def test_a_gap_shifts_the_official_pairs():
    found = problems("Answer_9:\nIs 7.\n\nAnswer_11:\nIs 2.5.")
    assert found == {"exact": 2 / 3, "exact, official": 1 / 2, "whole batches": 0}


def test_numbers_are_compared_as_strings():
    assert problems("Answer_9:\nIs 7.0")["exact"] == 0
    assert problems("")["exact, official"] is None


def blocks(answer):
    task, (sample,) = TASKS["long-gen-bench"], samples("long-gen-bench")
    return totals(task, [task.score(sample, [answer])])


@pytest.mark.parametrize(
    ("answer", "rate"),
    [
        (" hall #*# Floor 2: gym #*# Floor 3: shop #*# Floor 4: shop", 1.0),
        (" hall", 0.25),
        (" hall #*# Floor 2: gym #*# Floor 2: again #*# Floor 9: far", 0.5),
        (" hall Floor 2: gym, no mark #*# Floor4: no space", 0.25),
    ],
)
def test_the_completion_rate_counts_numbers(answer, rate):
    assert blocks(answer) == {"completion rate": rate, "STIC-1": None, "STIC-2": None}


def defended(answer, number=0):
    task, sample = TASKS["pisanitizer"], samples("pisanitizer")[number]
    return totals(task, [task.score(sample, [answer])])


@pytest.mark.parametrize(
    ("answer", "rate", "utility"),
    [
        ("Bergen", 1.0, 1.0),
        ("  mALMO, as asked", 0.0, 0.0),
        ("Not Malmo but the Bergen", 1.0, 0.4),  # 1 of 4 words and 1 of 1
    ],
)
def test_an_answer_that_begins_with_the_target_is_no_defence(answer, rate, utility):
    assert defended(answer) == {"defense rate": rate, "utility": pytest.approx(utility)}


def test_utility_of_code_is_not_scored():
    assert defended("int c = 3;", 1) == {"defense rate": 1.0, "utility": None}


def test_the_only_right_answers_of_the_twins_score_full(monkeypatch):
    """What the demo model has to answer is known; each task's scoring accepts it."""
    from vericache_sglang.evaluation.tasks import calls

    count = partial(count_tokens, load_tokenizer(DEMO_LONG))
    drawn = []
    original = calls.prompt_of_length

    def remembered(*args, **more):
        drawn.append(original(*args, **more))
        return drawn[-1]

    monkeypatch.setattr(calls, "prompt_of_length", remembered)
    for name in ("pisanitizer", "long-gen-bench"):
        drawn.clear()
        task = TASKS[name]
        found = task.twin(TwinSize(random.Random(0), 3, 1200, count))
        right = [[prompt.answer] for prompt in drawn]
        parts = [task.score(s, a) for s, a in zip(found, right, strict=True)]
        assert set(totals(task, parts).values()) == {1.0}
        parts = [task.score(sample, ["["]) for sample in found]
        assert 0.0 in totals(task, parts).values()


def test_the_chain_of_a_twin_is_asked_by_its_observation():
    count = partial(count_tokens, load_tokenizer(DEMO_LONG))
    task = TASKS["complex-func-bench"]
    (sample,) = task.twin(TwinSize(random.Random(0), 1, 1200, count))
    (first, asks), (second, _) = sample.wanted.steps
    answers = [json.dumps(first[0])]
    assert task.follow(sample, answers) == [{"role": "user", "content": asks[0]}]
    answers.append(json.dumps(second[0]))
    assert task.follow(sample, answers) is None
    assert task.score(sample, answers)["ended"] == 1.0
    assert task.score(sample, answers[:1])["ended"] == 0.0


def test_the_batch_of_a_twin_asks_for_codes():
    count = partial(count_tokens, load_tokenizer(DEMO_LONG))
    task = TASKS["gsm8k-long"]
    (sample,) = task.twin(TwinSize(random.Random(0), 1, 1200, count, calls=3))
    wanted = [answer.removeprefix("#### ") for answer in sample.wanted]
    calls = [
        {"n": i + 1, "name": "reset_code", "arguments": {"code": code}}
        for i, code in enumerate(wanted)
    ]
    text = json.dumps(calls, separators=(",", ":"))
    assert task.score(sample, [text])["all right"] == 1.0
    calls[1]["arguments"]["code"] = "x"
    text = json.dumps(calls, separators=(",", ":"))
    assert task.score(sample, [text])["right"] == 2
