"""Documents of user records, and requests whose answers are JSON tool calls.

Pure standard library and deterministic by the ``random.Random`` that is passed in:
the same seed gives the same text on every machine. Every generated word is a piece
of the demo tokenizer, so one record takes 31 tokens and one call about 50.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Each word is one piece of the demo tokenizer. The order is part of the format: a seed
# picks words by their place in these lists.
FIRST_NAMES = _words(
    "Dana Omar Lena Igor Maya Hugo Nina Paul Vera Ivan Rosa Juan Elsa Karl Lucy Theo "
    "Anna Marc Yuki Sven Tara Liam Zoe Amir Jade Otto Mona Finn Cora Erik Gina Luis "
    "Ruth Neil Ines Kofi Aldo Beth Cleo Dirk Enzo Faye Gwen Hank Iris Joel Kira "
    "Lars"
)
LAST_NAMES = _words(
    "Kim Berg Cruz Dunn Egan Ford Gale Hart Ivey Jung Koch Lind Mora Nash Oaks Pena "
    "Quin Reed Sato Tran Ueda Vega Wolf Yang Zorn Adler Blake Chase Drake Ellis Frost "
    "Grant Hayes Irwin James Kerr Lopez Meyer Novak Olsen Perez Quist Rossi Silva "
    "Tomas Usman Voss White"
)
CITIES = _words(
    "Oslo Rome Lima Cairo Paris Tokyo Delhi Quito Sofia Milan Miami Dubai Seoul Accra "
    "Perth Kyoto Lyon Bern Riga Porto Turin Basel Leeds Osaka Hanoi Doha Baku Minsk "
    "Dakar Tunis Lagos Havana Bogota Dallas Denver Boston Austin Dublin London Berlin "
    "Vienna Prague Warsaw Zagreb Athens Ankara Moscow Mumbai Nagoya Sydney Darwin "
    "Geneva Munich Naples Venice Lisbon Madrid Bilbao Malaga Bergen Odense Aarhus "
    "Malmo Tampa"
)
PLANS = _words("gold silver bronze basic trial pro team family")
DEVICES = _words(
    "tablet router camera laptop phone printer scanner monitor speaker sensor modem "
    "drone watch kiosk server projector"
)
SUBJECTS = (
    "the manager",
    "our office",
    "the new team",
    "one client",
    "the vendor",
    "a driver",
    "the auditor",
    "the bank",
    "my colleague",
    "the board",
)
VERBS = _words("sent checked moved lost signed copied printed updated reviewed closed")
OBJECTS = (
    "the weekly report",
    "an old folder",
    "the budget",
    "two boxes",
    "a long letter",
    "the contract",
    "some notes",
    "the calendar",
    "a broken chair",
    "the summary",
)
TIMES = (
    "on monday",
    "on friday",
    "last night",
    "this morning",
    "after lunch",
    "before noon",
    "in june",
    "in winter",
    "at the meeting",
    "near the gate",
)
TAILS = (
    "and nobody replied",
    "and it was fine",
    "but we had to wait",
    "so the plan stayed open",
    "and then left",
    "because of the rain",
    "while the phone was ringing",
    "but the door was locked",
)

FIELDS = ("name", "city", "plan", "device", "code")


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a document; ``id`` and ``code`` are four decimal digits."""

    id: str
    name: str
    city: str
    plan: str
    device: str
    code: str

    def line(self) -> str:
        """Return the line the document holds, newline included."""
        fields = "|".join(f"{field}={getattr(self, field)}" for field in FIELDS)
        return f"user {self.id}|{fields}\n"


@dataclass(frozen=True, slots=True)
class Function:
    """One tool: how it is asked for, and what its call says.

    Attributes:
        phrasings: Requests, with ``{id}`` where the record's id goes.
        fields: Arguments looked up in the record, in the order of the answer.
        constants: JSON text of the arguments that are the same in every call.
    """

    phrasings: tuple[str, ...]
    fields: tuple[str, ...]
    constants: str


FUNCTIONS = {
    "send_invoice": Function(
        ("send the invoice to user {id}", "please invoice user {id}"),
        ("name", "city", "plan"),
        '"currency":"EUR","notify":true',
    ),
    "ship_device": Function(
        ("ship the device to user {id}", "please ship hardware to user {id}"),
        ("device", "name", "city"),
        '"priority":"normal","insured":true',
    ),
    "reset_code": Function(
        ("reset the code of user {id}", "please reset access for user {id}"),
        ("code", "device"),
        '"force":false,"notify":true',
    ),
    "open_ticket": Function(
        ("open a ticket for user {id}", "please open a support ticket for user {id}"),
        ("name", "device", "plan"),
        '"queue":"support","priority":"normal"',
    ),
    "verify_user": Function(
        ("verify user {id}", "please verify the identity of user {id}"),
        ("name", "code"),
        '"method":"phone","force":false',
    ),
    "book_visit": Function(
        ("book a visit to user {id}", "please book a visit for user {id}"),
        ("city", "device", "name"),
        '"insured":true,"method":"phone"',
    ),
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request over one document.

    Attributes:
        records: What the document holds, in its order.
        document: Text of the system turn, without the role markers.
        question: Text of the user turn, without the role markers.
        answer: The only right answer, JSON, without the end marker.
    """

    records: tuple[Record, ...]
    document: str
    question: str
    answer: str

    @property
    def text(self) -> str:
        """The prompt as the model reads it, up to and with the assistant marker."""
        return prompt_text(self.document, self.question)


def record(rng: random.Random, user_id: str) -> Record:
    """Draw the fields of one record."""
    return Record(
        id=user_id,
        name=f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}",
        city=rng.choice(CITIES),
        plan=rng.choice(PLANS),
        device=rng.choice(DEVICES),
        code=f"{rng.randrange(10000):04d}",
    )


def filler_line(rng: random.Random) -> str:
    """Draw one line that no request asks about, about 14 tokens."""
    parts = (SUBJECTS, VERBS, OBJECTS, TIMES, TAILS)
    return "note: " + " ".join(rng.choice(part) for part in parts) + ".\n"


def document(
    rng: random.Random, records: int, filler: float
) -> tuple[list[Record], str]:
    """Draw a document.

    Args:
        rng: The only source of randomness; advanced.
        records: How many records; 1 <= records <= 10000, ids are distinct.
        filler: Share of filler among all lines, in [0, 1).

    Returns:
        The records in document order, and the text (every line ends in a newline).

    Raises:
        ValueError: ``records`` or ``filler`` is out of bounds.
    """
    if not 1 <= records <= 10000:
        raise ValueError(f"records {records} is outside [1, 10000]")
    if not 0 <= filler < 1:
        raise ValueError(f"filler {filler} is outside [0, 1)")
    drawn = [record(rng, f"{n:04d}") for n in rng.sample(range(10000), records)]
    lines = []
    for entry in drawn:
        while rng.random() < filler:
            lines.append(filler_line(rng))
        lines.append(entry.line())
    return drawn, "".join(lines)


def call(entry: Record, function: str, number: int | None = None) -> str:
    """Return the JSON text of one call, with ``"n":number`` first where given."""
    spec = FUNCTIONS[function]
    looked_up = ",".join(f'"{name}":"{getattr(entry, name)}"' for name in spec.fields)
    prefix = "" if number is None else f'"n":{number},'
    arguments = f'"id":"{entry.id}",{looked_up},{spec.constants}'
    return f'{{{prefix}"name":"{function}","arguments":{{{arguments}}}}}'


def request(rng: random.Random, record: Record) -> tuple[str, str]:
    """Ask for one call about ``record``; return (question, answer)."""
    function = rng.choice(tuple(FUNCTIONS))
    phrasing = rng.choice(FUNCTIONS[function].phrasings)
    return phrasing.format(id=record.id), call(record, function)


def multi_request(
    rng: random.Random, records: Sequence[Record], calls: int
) -> tuple[str, str]:
    """Ask for several calls at once, about distinct records.

    The question is a numbered list, one item per line; the answer is a JSON array
    whose entries carry the number of their item as ``"n"``.

    Args:
        rng: The only source of randomness; advanced.
        records: What the document holds.
        calls: How many calls; 1 <= calls <= min(9, len(records)).

    Returns:
        (question, answer).

    Raises:
        ValueError: ``calls`` is out of bounds.
    """
    if not 1 <= calls <= min(9, len(records)):
        raise ValueError(f"calls {calls} is outside [1, {min(9, len(records))}]")
    items, answers = [], []
    for number, entry in enumerate(rng.sample(list(records), calls), start=1):
        function = rng.choice(tuple(FUNCTIONS))
        phrasing = rng.choice(FUNCTIONS[function].phrasings)
        items.append(f"{number}. {phrasing.format(id=entry.id)}")
        answers.append(call(entry, function, number))
    return "\n".join(items), f"[{','.join(answers)}]"


def parse_answer(answer: str) -> list[dict[str, object]]:
    """Return the calls of an answer, one or several, as parsed JSON objects.

    Raises:
        ValueError: ``answer`` is not JSON (``json.JSONDecodeError`` is one).
    """
    parsed = json.loads(answer)
    return parsed if isinstance(parsed, list) else [parsed]


def system_turn(document: str) -> str:
    """Return the start of every conversation: the document in the system turn."""
    return f"<s><|system|>{document}<|end|>\n"


def user_turn(question: str) -> str:
    """Return a request with its markers, up to where the answer starts."""
    return f"<|user|>{question}<|end|>\n<|assistant|>"


def prompt_text(document: str, question: str) -> str:
    """Return the text the model continues with the answer and ``<|end|>``."""
    return system_turn(document) + user_turn(question)


def prompt_of_length(
    rng: random.Random,
    tokens_target: int,
    count_tokens: Callable[[str], int],
    *,
    calls: int = 1,
    filler: float = 0.1,
) -> Prompt:
    """Draw a prompt of about ``tokens_target`` tokens and never more.

    Args:
        rng: The only source of randomness; advanced.
        tokens_target: Most tokens of ``Prompt.text``; short by about one record.
        count_tokens: Token count of a text, special tokens written out included.
        calls: 1 for a single-call request, more for ``multi_request``.
        filler: See ``document``.

    Returns:
        The prompt and its answer.

    Raises:
        ValueError: Not even ``calls`` records fit, or an argument is out of bounds.
    """
    if calls < 1:
        raise ValueError(f"calls {calls} is below 1")
    item = "please open a support ticket for user 0000"
    longest = "\n".join(f"{number}. {item}" for number in range(1, calls + 1))
    room = tokens_target - count_tokens(user_turn(longest))
    drawn, text = document(rng, max(calls, min(10000, room // 20)), filler)
    lines = text.splitlines(keepends=True)
    fits = bisect_right(
        range(len(lines) + 1),
        room,
        key=lambda kept: count_tokens(system_turn("".join(lines[:kept]))),
    )
    text = "".join(lines[: fits - 1])
    kept = tuple(drawn[: text.count("user ")])
    if len(kept) < calls:
        raise ValueError(f"{tokens_target} tokens cannot hold {calls} records")
    if calls == 1:
        question, answer = request(rng, rng.choice(kept))
    else:
        question, answer = multi_request(rng, kept, calls)
    return Prompt(kept, text, question, answer)
