"""The live page: what it shows, what it escapes, and what it does without an answer."""

import asyncio
import base64
import hashlib
from dataclasses import replace
from html.parser import HTMLParser

import httpx
import pytest
from fastapi import FastAPI

from vericache_sglang.serving.live_page.charts import area, merge
from vericache_sglang.serving.live_page.page import body, page
from vericache_sglang.serving.live_page.reading import RingLevels, read_state
from vericache_sglang.serving.live_page.routes import add_page
from vericache_sglang.serving.live_page.source import Source, TokenRate

LANES = [
    ("4f1c", "draft", 5, 8, "host", 0.91),
    ("9b00", "verify", 0, 8, "host", 0.88),
    ("<script>alert('x')</script>\"&amp;", "wait", 8, 8, "device", 0.5),
    ("17aa", "plain", 0, 0, "device", 0.0),
    ("c0de", "parked", 0, 0, "parked", 0.95),
]
NAMES = ("rid", "phase", "drafts", "most", "residency", "acceptance")

REPORT = {
    "accepted": 900,
    "drafted": 1000,
    "rounds": 50,
    "plain_rows": 70,
    "running": 5,
    "requests_drafting": 3,
    "requests_device": 2,
    "requests_host": 2,
    "requests_parked": 1,
    "steps_aside": 7,
    "host_bytes": 3 << 20,
    "host_budget_bytes": 4 << 30,
    "staging_slots": 128,
    "staging_tokens": 2048,
    "lanes": [
        {**dict(zip(NAMES, lane, strict=True)), "prompt": 1234, "emitted": 56}
        for lane in LANES
    ],
    "rings": {
        "link": {"limit": 1_000_000, "windows": [0, 250_000, 1_000_000, 0]},
        "staging": {"limit": 2048, "windows": [128, 128, 0, 0]},
        "verify": {"limit": 2, "windows": [0, 1, 2, 0]},
    },
}

VOID = {"meta", "rect", "path"}


class Tree(HTMLParser):
    """Reads markup, insists that it nests, and remembers every element."""

    def __init__(self, markup):
        super().__init__()
        self.elements, self._open = [], []
        self.feed(markup)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append([tag, dict(attrs), ""])
        if tag not in VOID:
            self._open.append(self.elements[-1])

    def handle_startendtag(self, tag, attrs):
        self.elements.append([tag, dict(attrs), ""])

    def handle_endtag(self, tag):
        assert self._open, f"</{tag}> closes nothing"
        assert self._open[-1][0] == tag, f"</{tag}> closes <{self._open[-1][0]}>"
        self._open.pop()

    def handle_data(self, data):
        for element in self._open:
            element[2] += data

    def of(self, tag=None, name=None):
        """Return (attributes, text) of the elements with a tag and a class."""
        return [
            (attributes, text)
            for found, attributes, text in self.elements
            if (tag is None or found == tag)
            and (name is None or name in attributes.get("class", "").split())
        ]

    def text(self, name):
        return " ".join(text for _, text in self.of(name=name))


def render(report=None, **more):
    state = {"served_model_name": "demo", "api_key": "secret"}
    if report is not None:
        state["vericache"] = {**report, **more}
    return body([read_state(state)], 0.0)


def tile(tree, label):
    (text,) = [text for _, text in tree.of("div", "tile") if text.startswith(label)]
    return text.removeprefix(label)


def test_a_page_is_complete_and_fetches_nothing():
    markup = page(render(REPORT))
    tree = Tree(markup)
    assert markup.startswith("<!DOCTYPE html>")
    assert [len(tree.of(tag)) for tag in ("html", "title", "main", "script")] == [1] * 4
    assert tree.of("meta")[-1][0] == {"http-equiv": "refresh", "content": "2"}
    sources = {"src", "href", "srcset", "data", "action"}
    assert not [each for each in tree.elements if sources & set(each[1])]
    assert "url(" not in markup
    assert "secret" not in markup


def test_a_lane_per_request_says_where_it_stands():
    tree = Tree(render(REPORT))
    rows = tree.of("li", "lane")
    assert [row[0]["class"].split()[1] for row in rows] == [lane[1] for lane in LANES]
    expected = ["5 of 8 drafts", "verifying", "8 of 8 drafts", "a token each", "parked"]
    for (_, text), words, lane in zip(rows, expected, LANES, strict=True):
        assert text.startswith(lane[0])
        assert words in text
        assert "prompt 1,234" in text
        assert "emitted 56" in text
    assert "acceptance 91%" in rows[0][1]
    assert "complement on the host" in rows[0][1]
    bars = [attrs for attrs, _ in tree.of("rect", "fill")]
    assert [float(bar["width"]) for bar in bars][:5] == [62.5, 100, 100, 0, 0]
    legend = "drafting 1verifying 1waiting 1plain 1parked 1"
    assert tree.text("legend") == legend
    (sentence,) = [text for _, text in tree.of("p", "state")]
    assert sentence == (
        "5 requests run: 1 drafting, 1 verifying, 1 waiting, 1 plain, 1 parked."
    )


def test_what_clients_chose_is_text_and_never_markup():
    tree = Tree(page(render(REPORT)))
    assert len(tree.of("script")) == 1
    shown = [(attrs["title"], text) for attrs, text in tree.of("span", "rid")]
    assert shown == [(lane[0], lane[0]) for lane in LANES]
    odd = "\"><img src=x onerror='x'>"
    lane = {**REPORT["lanes"][0], "phase": odd, "residency": odd}
    ring = {odd: {"limit": 1, "windows": [1]}}
    state = {"served_model_name": odd, "vericache": {"lanes": [lane], "rings": ring}}
    tree = Tree(body([read_state(state)], 0.0))
    assert not tree.of("img")
    assert odd in tree.text("head")
    assert odd in tree.text("facts")
    assert odd in tree.text("ring")


def test_headline_numbers():
    reading = read_state({"vericache": {**REPORT, "shadow_checks": 9}})
    assert reading.decoded == 900 + 50 + 70
    tree = Tree(body([replace(reading, tokens_per_s=1234.4)], 0.0))
    assert tile(tree, "Running").startswith("5")
    assert tile(tree, "Split to draft").startswith("3")
    assert tile(tree, "Tokens per second").startswith("1,234")
    assert tile(tree, "Drafts accepted").startswith("90.0%")
    assert tile(tree, "Accepted per verification").startswith("18.0")
    assert tile(tree, "Steps aside").startswith("7")
    assert tile(tree, "Shadow mismatches") == "0in 9 checks"
    assert not tree.of(name="alarm")


def test_a_shadow_mismatch_stands_out():
    tree = Tree(render(REPORT, shadow_checks=9, shadow_mismatches=2))
    ((_, text),) = tree.of(name="alarm")
    assert text == "Shadow mismatches2in 9 checks"


def test_memory_is_shown_by_residency():
    lines = [text for _, text in Tree(render(REPORT)).of("li") if "lane" not in text]
    memory = lines[-5:]
    assert memory == [
        "KV on the device2 requests",
        "Complement on the host2 requests",
        "All KV on the host1 request",
        "Host memory3.0 of 4,096 MiB",
        "Staging region128 of 2,048 slots",
    ]


def test_rings_are_drawn_as_shares_and_told_in_words():
    tree = Tree(render(REPORT))
    charts = tree.of("svg", "area")
    assert [attrs["aria-label"] for attrs, _ in charts] == [
        "Host link: 31% on average, 100% at most, of 4 iterations",
        "Staging region: 3% on average, 6% at most, of 4 iterations",
        "Verifications: 38% on average, 100% at most, of 4 iterations",
    ]
    link = tree.of("path", "fill")[0][0]["d"]
    assert link == "M0 100V100h1V75h1V0h1V100h1V100Z"
    assert "of 2,048 slots" in tree.text("ring")


def test_long_and_empty_rings_can_be_drawn():
    assert merge([0.1] * 300 + [0.9], 100) == [0.1] * 75 + [0.9]
    assert merge([], 100) == []
    drawn = Tree(area([0.5] * 4096, "x"))
    assert drawn.of("path")[0][0]["d"].count("h1") == 128
    assert drawn.of("svg")[0][0]["viewbox"] == "0 0 128 100"
    assert RingLevels("staging", 0, (0, 3)).shares() == (0.0, 0.0)
    empty = {"rings": {"link": {"limit": 0, "windows": []}}}
    assert "0% on average" in Tree(render(empty)).text("ring")


def test_a_report_without_anything_is_an_idle_server():
    tree = Tree(render({}))
    assert tree.of("p", "state")[0][1] == "No request is running."
    assert "\N{EN DASH}" in tile(tree, "Drafts accepted")
    assert "no checks made" in tile(tree, "Shadow mismatches")
    assert not tree.of("li")


def test_off_and_plain_are_said_in_words():
    (off,) = Tree(render(None)).of("p", "state")
    assert "VeriCache is off" in off[1]
    plain = Tree(render(REPORT, requests_drafting=0)).of("p", "state")
    assert "5 requests run, decoded plainly" in plain[0][1]


def test_many_lanes_and_what_is_not_shown():
    lanes = [{**REPORT["lanes"][0], "rid": f"r{i}"} for i in range(256)]
    markup = render(REPORT, running=300, lanes=lanes)
    tree = Tree(markup)
    assert [text for _, text in tree.of("span", "rid")] == [f"r{i}" for i in range(256)]
    assert "The first 256 of 300 are shown." in tree.text("note")
    assert len(markup) < 200_000  # sent every second


def test_every_scheduler_has_a_section():
    readings = [read_state({"vericache": REPORT}), read_state({})]
    tree = Tree(body(readings, 0.0))
    first, second = (text for _, text in tree.of("section", "scheduler"))
    assert first.startswith("Scheduler 1 of 2")
    assert "VeriCache is off" in second


def test_tokens_per_second_are_those_of_the_last_seconds():
    rate = TokenRate()
    assert rate.note(100, 50.0) is None
    assert rate.note(110, 50.2) is None, "a round is no rate"
    assert rate.note(300, 54.0) == pytest.approx(50.0)
    assert rate.note(900, 61.0) == pytest.approx(600 / 7)
    assert rate.note(0, 62.0) is None, "another process"
    assert rate.note(10, 63.0) == pytest.approx(10.0)
    assert rate.note(9999, 90.0) is None, "nobody looked for a while"


def client(source, **keys):
    """Return a client of an application with the page and SGLang's key check."""
    from sglang.srt.utils.auth import add_api_key_middleware

    app = FastAPI()
    add_page(app, source)
    add_page(app, source)
    assert [route.path for route in app.routes].count("/vericache") == 1
    if keys:
        add_api_key_middleware(app, **keys)
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


async def answer():
    return [{"served_model_name": "demo", "vericache": REPORT}]


def test_a_fragment_is_the_changing_part():
    async def talk():
        async with client(Source(answer)) as http:
            whole = await http.get("/vericache")
            part = await http.get("/vericache?fragment=1")
            assert (await http.post("/vericache")).status_code == 405
        return whole, part

    whole, part = asyncio.run(talk())
    for reply in (whole, part):
        assert reply.status_code == 200
        assert reply.headers["content-type"] == "text/html; charset=utf-8"
        assert reply.headers["cache-control"] == "no-store"
    assert Tree(part.text).of("li", "lane") == Tree(whole.text).of("li", "lane")
    assert not Tree(part.text).of("script")


def test_only_the_pages_own_script_and_style_may_run():
    async def talk():
        async with client(Source(answer)) as http:
            return await http.get("/vericache")

    reply = asyncio.run(talk())
    policy = reply.headers["content-security-policy"]
    tree = Tree(reply.text)
    for tag in ("script", "style"):
        digest = hashlib.sha256(tree.of(tag)[0][1].encode()).digest()
        assert f"{tag}-src 'sha256-{base64.b64encode(digest).decode()}'" in policy
    assert policy.startswith("default-src 'none'")
    assert not [each for each in tree.elements if "style" in each[1]]


def test_an_api_key_is_asked_for_as_elsewhere():
    async def talk():
        async with client(Source(answer), api_key="k", admin_api_key=None) as http:
            without = await http.get("/vericache?fragment=1")
            key = {"Authorization": "Bearer k"}
            return without, await http.get("/vericache", headers=key)

    without, given = asyncio.run(talk())
    assert (without.status_code, given.status_code) == (401, 200)
    assert "lane" not in without.text


def test_no_answer_is_a_503_and_a_late_one_goes_to_nobody_else():
    """The question is asked through SGLang's own communicator, once."""
    from sglang.srt.managers.communicator import FanOutCommunicator

    sent = []

    async def talk():
        communicator = FanOutCommunicator(sent.append, fan_out=1)
        source = Source(lambda: communicator("state"), patience_s=0.1, fresh_s=0.0)
        async with client(source) as http:
            silent = [await http.get("/vericache"), await http.get("/vericache")]
            silent.append(await http.get("/vericache?fragment=1"))
            assert sent == ["state"]
            communicator.handle_recv({"vericache": REPORT})
            await asyncio.sleep(0)
            late = asyncio.create_task(http.get("/vericache"))
            while len(sent) < 2:
                await asyncio.sleep(0)
            communicator.handle_recv({"vericache": {**REPORT, "steps_aside": 8}})
            return silent, await late

    silent, late = asyncio.run(talk())
    for reply in silent:
        assert reply.status_code == 503
        (failure,) = Tree(reply.text).of("p", "state")[-1:]
        assert "The scheduler has not answered" in failure[1]
    assert Tree(silent[0].text).of("title")
    assert late.status_code == 200
    assert tile(Tree(late.text), "Steps aside").startswith("8")


def test_viewers_share_one_question():
    asked = []

    async def slow():
        asked.append(1)
        await asyncio.sleep(0.01)
        return await answer()

    async def talk():
        source = Source(slow, fresh_s=60.0)
        seen = await asyncio.gather(*(source.readings() for _ in range(20)))
        seen.append(await source.readings())
        return seen

    seen = asyncio.run(talk())
    assert asked == [1]
    assert len({id(reading) for reading in seen}) == 1


def test_a_failed_question_is_asked_again():
    asked = []

    async def fails_once():
        asked.append(1)
        if len(asked) == 1:
            raise ConnectionError("gone")
        return await answer()

    async def talk():
        source = Source(fails_once, fresh_s=0.0)
        with pytest.raises(ConnectionError):
            await source.readings()
        return await source.readings()

    assert asyncio.run(talk())[0].figures["rounds"] == 50
