"""No fault of a metric, trace or page ends serving, and no counter falls."""

import json
import time
from urllib.error import HTTPError

import pytest
from live_server import MODEL, LiveServer, faulty, run

from vericache_sglang.evaluation.lossless import greedy
from vericache_sglang.evaluation.matrix import PLAIN
from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts

pytestmark = pytest.mark.server

FLAGS = (
    *("--vericache-min-prompt", "64", "--vericache-draft-length", "8"),
    *("--vericache-residency", "host", "--vericache-compressor", "keynorm"),
    *("--max-total-tokens", "20000", "--enable-metrics"),
)
LONG = {"max_new_tokens": 32, "ignore_eos": True}
WRITTEN = 'vericache_store_bytes_total{direction="written"'


@pytest.fixture(scope="module")
def prompts():
    return record_prompts(load_tokenizer(MODEL), [700, 700, 700, 900], 11)


def scraped(server, start):
    """Return the value of the one sample whose line begins so, labels aside."""
    name, label = start.split("{")
    lines = server.get("/metrics").decode().splitlines()
    (line,) = [each for each in lines if each.startswith(name) and label in each]
    return float(line.rsplit(" ", 1)[1])


def until(holds, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


@pytest.mark.extended
def test_new_weights_leave_the_store_and_no_counter_falls(tmp_path, prompts):
    """After other weights the store is not used, so its own counters are gone."""
    store = json.dumps({"directory": str(tmp_path / "store")})
    server = LiveServer(
        *(tmp_path, *FLAGS, "--vericache-live-page", "off"),
        *("--hicache-storage-backend", "file"),
        *("--hicache-storage-backend-extra-config", store),
    )
    try:
        server.wait()
        server.generate(prompts[:3], **LONG)
        until(lambda: server.counters()["cache_store_written_bytes"])
        # An answer more, so that the metrics have read the store's counters.
        server.generate(prompts[:1], **LONG)
        before = server.settle()
        until(lambda: scraped(server, WRITTEN) > 0)
        published = scraped(server, WRITTEN)
        reply = server.post("/update_weights_from_disk", {"model_path": str(MODEL)})
        assert reply["success"], reply
        (answer,) = server.generate(prompts[3:], **LONG)
        after = server.settle()
        assert len(answer["output_ids"]) == LONG["max_new_tokens"]
        for key in ("cache_store_written_bytes", "cache_store_misses", "cycles"):
            assert after[key] >= before[key], key
        assert scraped(server, WRITTEN) >= published
        until(
            lambda: scraped(server, "vericache_verifications_total{") == after["cycles"]
        )
        assert "Traceback" not in server.log.read_text()
        with pytest.raises(HTTPError, match="404"):
            server.get("/vericache")
    finally:
        server.close()


def test_broken_observers_are_switched_off_and_answers_stay(tmp_path, prompts):
    wave = {"prompts": prompts, "params": [greedy(32, ignore_eos=True)] * len(prompts)}
    wanted = run(PLAIN, MODEL, [wave])["waves"][0]
    server = LiveServer(
        *(tmp_path, *FLAGS, "--vericache-trace", str(tmp_path / "trace")),
        environment=faulty("broken_observers"),
    )
    try:
        server.wait()
        answers = server.generate(prompts, **LONG)
        state = [server.get("/vericache/state") for _ in range(3)]
        assert [server.counters() for _ in range(3)] == [{}] * 3
        again = server.generate(prompts, **LONG)
    finally:
        server.close()
    for got in (answers, again):
        assert [a["output_ids"] for a in got] == [w["ids"] for w in wanted]
    assert all(a["meta_info"]["vericache"]["cycles"] for a in answers)
    assert [scheduler["report"] for (scheduler,) in state] == [{}] * 3
    log = server.log.read_text()
    for name, fault in (
        ("metrics", "broken Metrics"),
        ("trace", "broken Trace"),
        ("report", "broken report"),
    ):
        assert log.count(f"the {name} failed; serving goes on") == 1
        assert log.count(f"the {name} is switched off") == 1
        assert fault in log
