"""The words documents are made of; each is one piece of the demo tokenizer.

The order is part of the format: a seed picks words by their place in these lists.
"""

from __future__ import annotations


def each(text: str) -> tuple[str, ...]:
    """Return the words of ``text``."""
    return tuple(text.split())


FIRST_NAMES = each(
    "Dana Omar Lena Igor Maya Hugo Nina Paul Vera Ivan Rosa Juan Elsa Karl Lucy Theo "
    "Anna Marc Yuki Sven Tara Liam Zoe Amir Jade Otto Mona Finn Cora Erik Gina Luis "
    "Ruth Neil Ines Kofi Aldo Beth Cleo Dirk Enzo Faye Gwen Hank Iris Joel Kira "
    "Lars"
)
LAST_NAMES = each(
    "Kim Berg Cruz Dunn Egan Ford Gale Hart Ivey Jung Koch Lind Mora Nash Oaks Pena "
    "Quin Reed Sato Tran Ueda Vega Wolf Yang Zorn Adler Blake Chase Drake Ellis Frost "
    "Grant Hayes Irwin James Kerr Lopez Meyer Novak Olsen Perez Quist Rossi Silva "
    "Tomas Usman Voss White"
)
CITIES = each(
    "Oslo Rome Lima Cairo Paris Tokyo Delhi Quito Sofia Milan Miami Dubai Seoul Accra "
    "Perth Kyoto Lyon Bern Riga Porto Turin Basel Leeds Osaka Hanoi Doha Baku Minsk "
    "Dakar Tunis Lagos Havana Bogota Dallas Denver Boston Austin Dublin London Berlin "
    "Vienna Prague Warsaw Zagreb Athens Ankara Moscow Mumbai Nagoya Sydney Darwin "
    "Geneva Munich Naples Venice Lisbon Madrid Bilbao Malaga Bergen Odense Aarhus "
    "Malmo Tampa"
)
PLANS = each("gold silver bronze basic trial pro team family")
DEVICES = each(
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
VERBS = each("sent checked moved lost signed copied printed updated reviewed closed")
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
