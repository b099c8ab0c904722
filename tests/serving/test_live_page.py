"""The live page: its JSON over SGLang's parts, and what a browser draws from it."""

import asyncio
import base64
import hashlib
import os
import re
import shutil
import subprocess
import threading
import time
from html.parser import HTMLParser

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from vericache_sglang.former_names import with_former_names
from vericache_sglang.observability.guard import Guard
from vericache_sglang.serving.live_page import TIERS, StateReader, add_routes

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")

LANES = [
    ("4f1c", "draft", 5, 8, "host", 0.91),
    ("9b00", "verify", 0, 8, "host", 0.88),
    ("<script>alert('x')</script>\"&amp;", "wait", 8, 8, "device", 0.5),
    ("17aa", "plain", 0, 0, "device", 0.0),
    ("c0de", "swapped_out", 0, 0, "swapped_out", 0.95),
]
NAMES = ("rid", "phase", "drafts", "most", "residency", "acceptance")

REPORT = {
    **{"accepted": 900, "drafted": 1000, "cycles": 50, "plain_rows": 70},
    **{"running": 5, "requests_drafting": 3, "disabled_speculations": 7},
    **{"inner_proposed_draft": 30, "inner_proposed_plain": 10},
    **{"inner_accepted_draft": 9, "consistency_checks": 9},
    **{"requests_device": 2, "requests_host": 2, "requests_swapped_out": 1},
    **{"host_bytes": 3 << 20, "host_budget_bytes": 4 << 30},
    **{"staging_slots": 128, "staging_tokens": 2048},
    "lanes": [
        {**dict(zip(NAMES, lane, strict=True)), "prompt": 1234, "emitted": 56}
        for lane in LANES
    ],
    "rings": {
        "link": {"limit": 1_000_000, "iterations": [0, 250_000, 1_000_000, 0]},
        "staging": {"limit": 2048, "iterations": [128, 128, 0, 0]},
        "verify": {"limit": 2, "iterations": [0, 1, 2, 0]},
    },
}
ODD = "\"><img src=x onerror='x'>"


def state(report, **more):
    """Return a scheduler's internal state; ``report`` None is plain SGLang."""
    found = {"served_model_name": "demo", "api_key": "secret"}
    return found if report is None else {**found, "vericache": {**report, **more}}


async def answer():
    return [state(REPORT)]


# -- the routes ---------------------------------------------------------------------


def talk(exchange, read=answer, keys=None, **times):
    """Run ``exchange(http)`` against our routes behind SGLang's check of API keys."""
    from sglang.srt.utils.auth import add_api_key_middleware

    app = FastAPI()
    add_routes(app, read, Guard(), **times)
    add_routes(app, read, Guard(), **times)
    assert [route.path for route in app.routes].count("/vericache") == 1
    if keys:
        add_api_key_middleware(app, **keys)

    async def run():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as http:
            return await exchange(http)

    return asyncio.run(run())


def test_page_and_state_are_served_and_only_read():
    async def exchange(http):
        assert (await http.post("/vericache")).status_code == 405
        return await http.get("/vericache"), await http.get("/vericache/state")

    page, found = talk(exchange)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text.startswith("<!DOCTYPE html>")
    assert found.json() == [{"model": "demo", "report": REPORT}]
    for reply in (page, found):
        assert reply.status_code == 200
        assert reply.headers["cache-control"] == "no-store"
        assert "secret" not in reply.text


def test_the_page_fetches_nothing_from_elsewhere():
    (page,) = talk(lambda http: asyncio.gather(http.get("/vericache")))
    tree = Tree(page.text)
    sources = {"src", "href", "srcset", "data", "action", "style"}
    assert not [each for each in tree.elements if sources & set(each[1])]
    assert "url(" not in page.text
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    for tag in ("script", "style"):
        digest = hashlib.sha256(tree.of(tag)[0][1].encode()).digest()
        assert f"{tag}-src 'sha256-{base64.b64encode(digest).decode()}'" in policy


def test_tiers_of_the_cache_are_answered_by_their_names():
    keys = {key for tier in TIERS.values() for key in tier.values()}
    report = {key: i for i, key in enumerate(sorted(keys))} | {"cache_segments": 3}

    async def read():
        return [state(report), state(None)]

    (reply,) = talk(lambda http: asyncio.gather(http.get("/vericache/cache")), read)
    first, second = reply.json()
    assert second is None
    assert first.pop("segments") == 3
    assert first["store"]["hit_tokens"] == report["cache_match_store_tokens"]
    tiers = {
        tier: {name: report[key] for name, key in keys.items()}
        for tier, keys in TIERS.items()
    }
    assert first == with_former_names("cache", tiers)


def test_an_api_key_is_asked_for_as_elsewhere():
    async def exchange(http):
        key = {"Authorization": "Bearer k"}
        paths = ("/vericache", "/vericache/state", "/vericache/cache")
        without = [await http.get(path) for path in paths]
        return without, await http.get("/vericache/state", headers=key)

    without, given = talk(exchange, keys={"api_key": "k", "admin_api_key": None})
    assert [reply.status_code for reply in without] == [401] * 3
    assert given.status_code == 200
    assert not any("lanes" in reply.text for reply in without)


def test_no_answer_is_a_503_and_a_late_one_goes_to_nobody_else():
    """The question is asked through SGLang's own communicator, once."""
    from sglang.srt.managers.communicator import FanOutCommunicator

    sent, made = [], []

    async def read():
        if not made:
            made.append(FanOutCommunicator(sent.append, fan_out=1))
        return await made[0]("state")

    async def exchange(http):
        silent = [
            await http.get("/vericache/state"),
            await http.get("/vericache/cache"),
        ]
        assert sent == ["state"]
        assert (await http.get("/vericache")).status_code == 200
        made[0].handle_recv(state(REPORT))
        await asyncio.sleep(0)
        late = asyncio.create_task(http.get("/vericache/state"))
        while len(sent) < 2:
            await asyncio.sleep(0)
        made[0].handle_recv(state(REPORT, disabled_speculations=8))
        return silent, await late

    silent, late = talk(exchange, read, timeout_s=2.0, fresh_s=0.0)
    for reply in silent:
        assert reply.status_code == 503
        assert "The scheduler has not answered" in reply.json()["error"]
    assert late.json()[0]["report"]["disabled_speculations"] == 8


def test_viewers_share_one_question():
    asked = []

    async def slow():
        asked.append(1)
        await asyncio.sleep(0.01)
        return await answer()

    async def look():
        reader = StateReader(slow, fresh_s=60.0)
        seen = await asyncio.gather(*(reader.state() for _ in range(20)))
        return [*seen, await reader.state()]

    seen = asyncio.run(look())
    assert asked == [1]
    assert len({id(found) for found in seen}) == 1


def test_a_failed_question_is_asked_again():
    asked = []

    async def fails_once():
        asked.append(1)
        if len(asked) == 1:
            raise ConnectionError("gone")
        return await answer()

    async def look():
        reader = StateReader(fails_once, fresh_s=0.0)
        with pytest.raises(ConnectionError):
            await reader.state()
        return await reader.state()

    assert asyncio.run(look())[0]["report"]["cycles"] == 50


# -- what a browser draws -----------------------------------------------------------

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
        self.elements.append([tag, dict(attrs), "", [e[0] for e in self._open]])
        if tag not in VOID:
            self._open.append(self.elements[-1])

    def handle_endtag(self, tag):
        if tag in VOID:
            return
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
            for found, attributes, text, _ in self.elements
            if (tag is None or found == tag)
            and (name is None or name in attributes.get("class", "").split())
        ]

    def text(self, name):
        return " ".join(text for _, text in self.of(name=name))

    def tile(self, label):
        (text,) = [text for _, text in self.of("div", "tile") if text.startswith(label)]
        return text.removeprefix(label)


class Served:
    """The routes over a canned state, on a real HTTP server on a free port."""

    def __init__(self, read, **times):
        app = FastAPI()
        add_routes(app, read, Guard(), **times)
        settings = uvicorn.Config(app, port=0, log_level="error", lifespan="off")
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self):
        self._thread.start()
        deadline = time.monotonic() + 30
        while not self._server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/vericache"

    def __exit__(self, *error):
        self._server.should_exit = True
        self._thread.join()


def browse(url, folder, milliseconds=3000):
    """Return the document a browser shows after ``milliseconds`` of its own time."""
    quiet = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-sync"),
        *("--disable-component-update", f"--user-data-dir={folder}"),
        *(f"--virtual-time-budget={milliseconds}", "--dump-dom"),
    )
    shown = subprocess.run(
        [CHROMIUM, *quiet, url], capture_output=True, text=True, timeout=120
    )
    assert "<body" in shown.stdout, shown.stderr[-2000:]
    return shown.stdout


needs_browser = pytest.mark.skipif(
    not CHROMIUM, reason="no chromium; set CHROMIUM or install it"
)

ODD_REPORT = {
    "lanes": [{**REPORT["lanes"][0], "phase": ODD, "residency": ODD}],
    "rings": {
        ODD: {"limit": 0, "iterations": [1, 3]},
        "link": {"limit": 0, "iterations": []},
    },
    **{"running": 1, "requests_drafting": 1},
}
MANY = {
    "lanes": [{**REPORT["lanes"][0], "rid": f"r{i}"} for i in range(256)],
    "rings": {"link": {"limit": 10, "iterations": [1] * 4095 + [9]}},
    **{"running": 300, "requests_drafting": 300},
}
REMOTE = {
    **{"remote_verifiers": 2, "remote_guests": 13, "remote_returns": 5},
    **{"remote_b1": 1234, "remote_local": 7},
}
SCHEDULERS = {
    "busy": state(REPORT),
    "off": state(None),
    "idle": state({}),
    "not drafting": state(REPORT, requests_drafting=0),
    "mismatch": state(REPORT, consistency_mismatches=2),
    "odd": state(ODD_REPORT),
    "many": state(MANY),
    "drafter": state(REPORT, role="drafter", **REMOTE),
    "verifier": state(REPORT, role="verifier", **REMOTE),
}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Return the whole document, and a section's tree by scheduler."""
    decoded = [0]

    async def read():
        decoded[0] += 100
        busy = state(REPORT, plain_rows=decoded[0])
        return [busy, *list(SCHEDULERS.values())[1:]]

    with Served(read, fresh_s=0.0) as url:
        dom = browse(url, tmp_path_factory.mktemp("profile"))
    sections = re.findall(r'<section class="scheduler">.*?</section>', dom, re.DOTALL)
    assert len(sections) == len(SCHEDULERS)
    trees = dict(zip(SCHEDULERS, map(Tree, sections), strict=True))
    return {"page": Tree(dom.removeprefix("<!DOCTYPE html>")), **trees}


@needs_browser
def test_the_page_updates_itself(drawn):
    ((body, _),) = drawn["page"].of("body")
    assert int(body["data-updates"]) >= 2
    ((stale, _),) = [each for each in drawn["page"].of("p") if each[0].get("id")]
    assert "hidden" in stale
    assert re.search(r"demo \d\d:\d\d:\d\d UTC", drawn["page"].text("head"))
    assert drawn["off"].of("h2")[0][1] == "Scheduler 2 of 9"


@needs_browser
def test_a_lane_per_request_says_where_it_stands(drawn):
    rows = drawn["busy"].of("li", "lane")
    assert [row[0]["class"].split()[1] for row in rows] == [lane[1] for lane in LANES]
    expected = [
        "5 of 8 drafts",
        "verifying",
        "8 of 8 drafts",
        "a token each",
        "swapped",
    ]
    for (_, text), words, lane in zip(rows, expected, LANES, strict=True):
        assert text.startswith(lane[0])
        assert words in text
        assert "prompt 1,234" in text
        assert "emitted 56" in text
    assert "acceptance 91%" in rows[0][1]
    assert "residual KV on the host" in rows[0][1]
    bars = [attrs for attrs, _ in drawn["busy"].of("rect", "fill")]
    assert [float(bar["width"]) for bar in bars][:5] == [62.5, 100, 100, 0, 0]
    legend = "drafting 1verifying 1waiting 1autoregressive 1swapped out 1"
    assert drawn["busy"].text("legend") == legend
    (sentence,) = [text for _, text in drawn["busy"].of("p", "state")]
    assert sentence == (
        "5 requests run: 1 drafting, 1 verifying, 1 waiting, 1 autoregressive, "
        "1 swapped out."
    )


@needs_browser
def test_what_clients_chose_is_text_and_never_markup(drawn):
    assert len(drawn["page"].of("script")) == 1
    assert not drawn["page"].of("img")
    shown = [(attrs["title"], text) for attrs, text in drawn["busy"].of("span", "rid")]
    assert shown == [(lane[0], lane[0]) for lane in LANES]
    assert ODD in drawn["odd"].text("facts")
    assert ODD in drawn["odd"].text("ring")
    assert ODD in drawn["odd"].text("phase")


@needs_browser
def test_headline_numbers(drawn):
    busy = drawn["busy"]
    assert busy.tile("Running").startswith("5")
    assert busy.tile("Compressed to draft").startswith("3")
    assert re.match(r"[\d,]+decoded", busy.tile("Tokens per second"))
    assert busy.tile("Drafts accepted").startswith("90.0%")
    assert busy.tile("Accepted per verification").startswith("18.0")
    assert busy.tile("Proposals accepted").startswith("22.5%")
    assert busy.tile("Speculation disabled").startswith("7")
    assert busy.tile("Inconsistent answers") == "0in 9 checks"
    assert not busy.of(name="alarm")
    ((_, alarm),) = drawn["mismatch"].of(name="alarm")
    assert alarm == "Inconsistent answers2in 9 checks"


@needs_browser
def test_a_role_shows_its_peers_and_paths(drawn):
    assert not drawn["busy"].text("tiles").count("Verifiers")
    found = {
        role: [text for _, text in drawn[role].of("dl", "tiles")][1]
        for role in ("drafter", "verifier")
    }
    assert found == {
        "drafter": "Verifiers2serve this drafter nowPath b11,234requests since start"
        "Path local7requests since startReturned5from verifiers since start",
        "verifier": "Guests13requests of drafters now",
    }


@needs_browser
def test_memory_is_shown_by_residency(drawn):
    (memory,) = [text for _, text in drawn["busy"].of("ul", "memory")]
    assert memory == (
        "KV on the device2 requestsResidual KV on the host2 requestsSwapped out"
        "1 requestHost memory3.0 of 4,096 MiBStaging buffer128 of 2,048 slots"
    )


@needs_browser
def test_rings_are_drawn_as_shares_and_told_in_words(drawn):
    charts = drawn["busy"].of("svg", "area")
    assert [attrs["aria-label"] for attrs, _ in charts] == [
        "Host link: 31% on average, 100% at most, of 4 iterations",
        "Staging buffer: 3% on average, 6% at most, of 4 iterations",
        "Verifications: 38% on average, 100% at most, of 4 iterations",
    ]
    link = drawn["busy"].of("path", "fill")[0][0]["d"]
    assert link == "M0 100V100.0h1V75.0h1V0.0h1V100.0h1V100Z"
    assert "of 2,048 slots" in drawn["busy"].text("ring")
    # No limit, no windows, and more windows than can be told apart.
    assert [attrs["aria-label"] for attrs, _ in drawn["odd"].of("svg", "area")] == [
        f"{ODD}: 0% on average, 0% at most, of 2 iterations",
        "Host link: 0% on average, 0% at most, of 0 iterations",
    ]
    (many,) = drawn["many"].of("path", "fill")
    assert many[0]["d"].count("h1") == 128
    assert many[0]["d"].endswith("V10.0h1V100Z"), "the largest of neighbours stays"


@needs_browser
def test_idle_off_and_not_drafting_are_said_in_words(drawn):
    assert drawn["idle"].of("p", "state")[0][1] == "No request is running."
    assert drawn["idle"].tile("Drafts accepted").startswith("\N{EN DASH}")
    assert "no checks made" in drawn["idle"].tile("Inconsistent answers")
    assert not drawn["idle"].of("li")
    assert "VeriCache is off" in drawn["off"].of("p", "state")[0][1]
    (words,) = drawn["not drafting"].of("p", "state")
    assert "5 requests run, decoded autoregressively" in words[1]


@needs_browser
def test_many_lanes_and_what_is_not_shown(drawn):
    shown = [text for _, text in drawn["many"].of("span", "rid")]
    assert shown == [f"r{i}" for i in range(256)]
    assert "The first 256 of 300 are shown." in drawn["many"].text("note")


@needs_browser
def test_without_an_answer_the_page_says_so(tmp_path):
    async def silent():
        await asyncio.sleep(60)

    with Served(silent, timeout_s=0.05) as url:
        tree = Tree(browse(url, tmp_path).removeprefix("<!DOCTYPE html>"))
    ((attributes, text),) = [each for each in tree.of("p") if each[0].get("id")]
    assert "hidden" not in attributes
    assert "The scheduler has not answered" in text
