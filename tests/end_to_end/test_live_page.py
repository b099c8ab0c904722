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
        await_report(
            server,
            lambda report: (
                len(report["lanes"]) == len(texts)
                and any(lane["most"] for lane in report["lanes"])
            ),
        )
        yield rids
    finally:
        server.post("/abort_request", {"rid": "", "abort_all": True})
        worker.join()


def state(server):
    """Return what the page draws of the one scheduler."""
    (scheduler,) = server.get("/vericache/state")
    return scheduler


def await_report(server, holds):
    """Ask until ``holds`` is true of the report; viewers share an answer."""
    deadline = time.monotonic() + 60
    while not holds(report := state(server)["report"]):
        assert time.monotonic() < deadline, report
        time.sleep(0.2)


def lanes(markup):
    return re.findall(r'<li class="lane (\w+)"', markup)


def test_the_state_follows_the_requests(servers, prompts):
    ours, _ = servers
    await_report(ours, lambda report: not report["running"])
    with requests_running(ours, prompts) as rids:
        found = state(ours)
    assert {lane["rid"] for lane in found["report"]["lanes"]} == set(rids)
    phases = {lane["phase"] for lane in found["report"]["lanes"]}
    assert phases <= {"draft", "verify", "wait", "plain", "swapped_out"}
    assert found["report"]["rings"].keys() == {"link", "staging", "verify"}
    assert found["model"].endswith("demo-model")
    await_report(ours, lambda report: not report["lanes"])


def test_plain_sglang_says_so(servers):
    _, plain = servers
    assert state(plain)["report"] is None


def test_the_page_is_only_read(servers):
    ours, _ = servers
    assert ours.get("/vericache").startswith(b"<!DOCTYPE html>")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        ours.post("/vericache", {})


@pytest.mark.extended
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
    assert int(updates[1]) >= 2, "the script has not replaced the first content"
    assert len(lanes(dom)) == len(prompts)
    for ring in ("Host link", "Staging buffer", "Verifications"):
        assert f'aria-label="{ring}: ' in dom
    assert dom.count("&lt;script&gt;") >= len(prompts)
    assert PRINTS not in dom
    assert "<title>VeriCache</title>" in dom
    assert dom.count("<script>") == 1
    assert re.search(r'<p id="stale"[^>]* hidden=""', dom), "it could not fetch"
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (400, 1200)
