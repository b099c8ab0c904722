"""The generator against an oracle that only knows the text, by regular expressions."""

import json
import random
import re

import pytest

from vericache_sglang import demo_records as records

# A document of seed 1 and a request of seed 6: checkpoints and results rest on them.
PINNED = """
user 2201|name=Maya Quin|city=Kyoto|plan=family|device=server|code=7737
note: the board sent the calendar after lunch so the plan stayed open.
user 9325|name=Faye Zorn|city=Baku|plan=silver|device=projector|code=0464
1. reset the code of user 2201
2. send the invoice to user 9325
[{"n":1,"name":"reset_code","arguments":{"id":"2201","code":"7737",\
"device":"server","force":false,"notify":true}},{"n":2,"name":"send_invoice",\
"arguments":{"id":"9325","name":"Faye Zorn","city":"Baku","plan":"silver",\
"currency":"EUR","notify":true}}]
"""
LINE = re.compile(
    r"^user (?P<id>\d{4})\|name=(?P<name>[^|\n]+)\|city=(?P<city>[^|\n]+)"
    r"\|plan=(?P<plan>[^|\n]+)\|device=(?P<device>[^|\n]+)\|code=(?P<code>\d{4})$",
    re.MULTILINE,
)
ASKED = {
    r"send the invoice to user|please invoice user": "send_invoice",
    r"ship the device to user|please ship hardware to user": "ship_device",
    r"reset the code of user|please reset access for user": "reset_code",
    r"open a ticket for user|please open a support ticket for user": "open_ticket",
    r"verify user|please verify the identity of user": "verify_user",
    r"book a visit to user|please book a visit for user": "book_visit",
}
LOOKED_UP = {
    "send_invoice": {"name", "city", "plan"},
    "ship_device": {"device", "name", "city"},
    "reset_code": {"code", "device"},
    "open_ticket": {"name", "device", "plan"},
    "verify_user": {"name", "code"},
    "book_visit": {"city", "device", "name"},
}


def asked_by(item: str) -> tuple[str, str]:
    """Return (function, id) of one request, or of one item without its number."""
    (function,) = [f for p, f in ASKED.items() if re.match(rf"(?:{p}) \d{{4}}$", item)]
    return function, item[-4:]


def check_call(call: dict, item: str, document: str) -> None:
    """Check one parsed call against the text of its request and the document."""
    function, user_id = asked_by(item)
    (line,) = [m for m in LINE.finditer(document) if m["id"] == user_id]
    assert call["name"] == function
    arguments = call["arguments"]
    assert arguments["id"] == user_id
    for field in LOOKED_UP[function]:
        assert arguments[field] == line[field]
    constants = set(arguments) - LOOKED_UP[function] - {"id"}
    assert len(constants) == 2
    assert not constants & {"name", "city", "plan", "device", "code"}


def test_text_of_a_seed_never_changes():
    drawn, text = records.document(random.Random(1), 2, 0.4)
    question, answer = records.multi_request(random.Random(6), drawn, 2)
    assert f"\n{text}{question}\n{answer}\n" == PINNED


@pytest.mark.parametrize("seed", range(20))
def test_single_answers_are_what_the_document_says(seed):
    rng = random.Random(seed)
    drawn, text = records.document(rng, 30, 0.3)
    question, answer = records.request(rng, rng.choice(drawn))
    check_call(json.loads(answer), question, text)


@pytest.mark.parametrize("seed", range(20))
def test_multi_answers_are_what_the_document_says(seed):
    rng = random.Random(seed)
    drawn, text = records.document(rng, 30, 0.3)
    question, answer = records.multi_request(rng, drawn, 1 + seed % 9)
    items, calls = question.split("\n"), json.loads(answer)
    assert len(calls) == len(items) == 1 + seed % 9
    assert len({call["arguments"]["id"] for call in calls}) == len(calls)
    for number, (item, call) in enumerate(zip(items, calls, strict=True), start=1):
        assert item.startswith(f"{number}. ")
        assert call["n"] == number
        check_call(call, item.removeprefix(f"{number}. "), text)
    assert records.parse_answer(answer) == calls


def test_documents_hold_records_and_filler_only():
    drawn, text = records.document(random.Random(3), 40, 0.4)
    lines = text.splitlines()
    assert [m["id"] for m in LINE.finditer(text)] == [entry.id for entry in drawn]
    assert len({entry.id for entry in drawn}) == 40
    filler = [line for line in lines if line.startswith("note: ")]
    assert len(filler) + 40 == len(lines)
    assert 0.2 < len(filler) / len(lines) < 0.6


@pytest.mark.parametrize(
    ("target", "calls"),
    [(300, 1), (600, 6), (700, 1), (4000, 1), (4000, 6), (20000, 8)],
)
def test_prompts_meet_their_length_from_below(target, calls):
    words = re.compile(r"\d|\w+|\W")
    count = lambda text: len(words.findall(text))  # noqa: E731
    prompt = records.prompt_of_length(random.Random(1), target, count, calls=calls)
    assert target - 60 - 20 * calls < count(prompt.text) <= target
    assert prompt.text.count(f"user {prompt.records[-1].id}|") == 1
    ids = {call["arguments"]["id"] for call in records.parse_answer(prompt.answer)}
    assert ids <= {entry.id for entry in prompt.records}
    assert len(LINE.findall(prompt.document)) == len(prompt.records)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda rng: records.document(rng, 0, 0.1), r"records 0 is outside"),
        (lambda rng: records.document(rng, 3, 1.0), r"filler 1.0 is outside"),
        (lambda rng: records.multi_request(rng, [], 1), r"calls 1 is outside \[1, 0\]"),
        (
            lambda rng: records.prompt_of_length(rng, 40, len),
            r"40 tokens cannot hold 1 records",
        ),
        (
            lambda rng: records.prompt_of_length(rng, 4000, len, calls=0),
            r"calls 0 is below 1",
        ),
    ],
)
def test_arguments_out_of_bounds_are_refused(ask, message):
    with pytest.raises(ValueError, match=message):
        ask(random.Random(0))
