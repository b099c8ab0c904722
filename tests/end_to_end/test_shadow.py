"""Finished requests are decoded again plainly while the server is idle."""

import re
import time

import pytest
from live_server import MODEL, LiveServer

from lossless.runs import faulty
from vericache_sglang.engine.shadow import RID_PREFIX

FLAGS = (
    *("--vericache-min-prompt", "64", "--vericache-draft-length", "8"),
    *("--vericache-residency", "host", "--vericache-shadow-rate", "1.0"),
    # Longer prompts are prefilled in pieces, shadows as well.
    *("--chunked-prefill-size", "512", "--max-total-tokens", "30000"),
    "--sleep-on-idle",
)

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return (a sound server, one that sends drafts out unverified)."""
    folder = tmp_path_factory.mktemp("shadow")
    sound = LiveServer(folder, *FLAGS)
    lossy = LiveServer(folder, *FLAGS, environment=faulty("unverified_drafts"))
    try:
        yield sound.wait(), lossy.wait()
    finally:
        sound.close()
        lossy.close()


def checked(server, seconds=60):
    """Wait until no check is outstanding; return the counters."""
    deadline = time.monotonic() + seconds
    while (counters := server.counters())["shadow_pending"]:
        assert time.monotonic() < deadline, f"still checking: {counters}"
        time.sleep(0.1)
    return counters


def drafted(answers):
    """Count the answers that came from drafts."""
    return sum(answer["meta_info"]["vericache"]["rounds"] > 0 for answer in answers)


def checking(server, seconds=30):
    """Wait until a shadow runs, with more to come."""
    deadline = time.monotonic() + seconds
    while True:
        counters = server.counters()
        if counters["running"] and counters["shadow_pending"] > 1:
            return
        assert time.monotonic() < deadline, f"no check began: {counters}"


def test_every_drafted_answer_is_checked(pair, prompts):
    server, _ = pair
    answers = server.generate(prompts)
    answers += server.generate(prompts[:2], temperature=1.0)
    wanted = drafted(answers[: len(prompts)])
    assert wanted >= len(prompts) - 1
    counters = checked(server)
    assert counters["shadow_checks"] == wanted, "sampled requests are not checked"
    assert counters["shadow_mismatches"] == 0
    assert counters["shadow_dropped"] == 0


def test_stops_and_penalties_are_repeated(pair, prompts):
    server, _ = pair
    before = server.counters()
    answers = server.generate(prompts[:2], stop=['"'])
    answers += server.generate(prompts[2:4], frequency_penalty=0.7, ignore_eos=True)
    answers += server.generate(prompts[4:], regex=r"\{\"name\":\"[a-z_]+\"\}")
    after = checked(server)
    assert after["shadow_checks"] == before["shadow_checks"] + drafted(answers)
    assert after["shadow_mismatches"] == 0


def test_clients_are_served_beside_a_shadow(pair, prompts):
    server, _ = pair
    before = server.counters()
    answers = server.generate(prompts[:2], max_new_tokens=160, ignore_eos=True)
    checking(server)
    # Too much to prefill in one iteration: a check may not make them wait.
    fresh = [f"{i} {prompt}" for i, prompt in enumerate(prompts[2:4])]
    beside = server.generate(fresh, ignore_eos=True)
    checked(server)
    alone = server.generate(fresh, ignore_eos=True)
    assert [b["output_ids"] for b in beside] == [a["output_ids"] for a in alone]
    after = checked(server)
    done = after["shadow_checks"] - before["shadow_checks"]
    wanted = drafted([*answers, *beside, *alone])
    assert done == wanted, "an interrupted check is made later"
    assert after["shadow_mismatches"] == after["shadow_dropped"] == 0


def test_a_shadow_makes_way_for_a_flush(pair, prompts):
    server, _ = pair
    before = server.counters()
    answers = server.generate(prompts[:3], max_new_tokens=60, ignore_eos=True)
    checking(server)
    server.post("/flush_cache", {})  # raises unless it succeeds
    after = checked(server)
    done = after["shadow_checks"] - before["shadow_checks"]
    assert done == drafted(answers)
    assert after["shadow_mismatches"] == after["shadow_dropped"] == 0


def test_new_weights_end_the_checks_of_old_answers(pair, prompts):
    server, _ = pair
    answers = server.generate(prompts[:3], max_new_tokens=60, ignore_eos=True)
    checking(server)
    reply = server.post("/update_weights_from_disk", {"model_path": str(MODEL)})
    assert reply["success"], reply
    after = server.counters()
    assert after["shadow_pending"] == 0
    assert 0 < after["shadow_dropped"] <= drafted(answers)
    assert after["shadow_mismatches"] == 0


def test_an_operator_may_abort_everything(pair, prompts):
    server, _ = pair
    before = server.counters()
    answers = server.generate(prompts[:3], max_new_tokens=60, ignore_eos=True)
    checking(server)
    server.post("/abort_request", {"abort_all": True})
    after = checked(server)
    done = after["shadow_checks"] - before["shadow_checks"]
    dropped = after["shadow_dropped"] - before["shadow_dropped"]
    assert done + dropped == drafted(answers)
    assert dropped <= 1, "what waits is not aborted"
    assert after["shadow_mismatches"] == 0
    assert server.generate(prompts[:1])[0]["output_ids"], "the server goes on"


def test_nobody_hears_of_shadows(pair, prompts):
    server, _ = pair
    checked(server)
    log = server.log.read_text()
    assert RID_PREFIX not in log
    assert "Error" not in log


def test_wrong_answers_are_reported_with_place_and_margin(pair, prompts):
    _, server = pair
    answers = server.generate(prompts, ignore_eos=True)
    counters = checked(server)
    assert counters["shadow_checks"] == drafted(answers)
    assert counters["shadow_mismatches"] > 0
    lines = re.findall(
        r"shadow check of (\w+): output token (\d+) is (\d+), the full KV gives (\d+) "
        r"by (\S+) logits; prompt (\d+) tokens",
        server.log.read_text(),
    )
    assert len(lines) == counters["shadow_mismatches"]
    by_rid = {answer["meta_info"]["id"]: answer for answer in answers}
    for rid, position, served, full, margin, prompt in lines:
        answer = by_rid[rid]
        assert answer["output_ids"][int(position)] == int(served) != int(full)
        assert answer["meta_info"]["prompt_tokens"] == int(prompt)
        assert float(margin) > 0
