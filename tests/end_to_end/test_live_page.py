"""The live page of a server at work, as a program and as a browser get it."""

import os
import re
import shutil
import struct
import subprocess
import threading
import time
import urllib.error
from contextlib import contextmanager

import pytest

pytestmark = pytest.mark.server

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")

QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--hide-scrollbars", "--window-size=400,1200"),
)

PRINTS = "<script>document.title = 'taken over'</script>"
"""In every request's id: the page must show it, not run it."""


@contextmanager
def requests_running(server, texts):
    """Keep ``texts`` decoding; yields once the page has all, and one drafts."""
    rids = [f"{PRINTS}{i}-{time.monotonic_ns()}" for i in range(len(texts))]
    worker = threading.Thread(
        target=server.generate,
        args=(texts,),
        kwargs={"max_new_tokens": 2000, "ignore_eos": True, "more": {"rid": rids}},
    )
    worker.start()
    try:
        await_fragment(
            server,
            lambda text: (
                len(lanes(text)) == len(texts) and re.search(r"\d+ of \d+ drafts", text)
            ),
        )
        yield
    finally:
        server.post("/abort_request", {"rid": "", "abort_all": True})
        worker.join()


def await_fragment(server, holds):
    """Ask until ``holds`` says yes of the changing part; viewers share an answer."""
    deadline = time.monotonic() + 60
    while not holds(text := server.get("/vericache?fragment=1").decode()):
        assert time.monotonic() < deadline, text
        time.sleep(0.2)


def lanes(markup):
    return re.findall(r'<li class="lane (\w+)"', markup)


def test_the_page_follows_the_requests(servers, prompts):
    ours, _ = servers
    await_fragment(ours, lambda text: "No request is running." in text)
    with requests_running(ours, prompts):
        page = ours.get("/vericache").decode()
        reported = ours.counters()
    assert page.startswith("<!DOCTYPE html>")
    assert page.count("&lt;script&gt;") >= len(prompts)
    assert PRINTS not in page
    phases = lanes(page)
    assert len(phases) == len(prompts) == len(reported["lanes"])
    assert set(phases) <= {"draft", "verify", "wait", "plain", "parked"}
    for ring in ("Host link", "Staging region", "Verifications"):
        assert f'aria-label="{ring}: ' in page
    await_fragment(ours, lambda text: not lanes(text))


def test_plain_sglang_says_so(servers):
    _, plain = servers
    assert "VeriCache is off in this server" in plain.get("/vericache").decode()


def test_the_page_is_only_read(servers):
    ours, _ = servers
    with pytest.raises(urllib.error.HTTPError, match="405"):
        ours.post("/vericache", {})


@pytest.mark.skipif(not CHROMIUM, reason="no chromium; set CHROMIUM or install it")
def test_a_browser_shows_and_updates_it(servers, prompts, tmp_path):
    ours, _ = servers
    picture = tmp_path / "page.png"
    with requests_running(ours, prompts):
        browser = subprocess.run(
            [
                *(CHROMIUM, *QUIET, f"--user-data-dir={tmp_path / 'profile'}"),
                *("--virtual-time-budget=4000", "--dump-dom"),
                *(f"--screenshot={picture}", f"{ours.url}/vericache"),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
    dom = browser.stdout
    updates = re.search(r'<body data-updates="(\d+)"', dom)
    assert updates, browser.stderr[-2000:]
    assert int(updates[1]) >= 1, "the script has not replaced the first content"
    assert len(lanes(dom)) == len(prompts)
    assert "<title>VeriCache</title>" in dom
    assert dom.count("<script>") == 1
    assert re.search(r'<p id="stale"[^>]* hidden=""', dom), "it could not fetch"
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (400, 1200)
