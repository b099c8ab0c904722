"""Finished requests are replayed with speculation disabled while the server is idle."""

import re
import time

import pytest
from live_server import MODEL, LiveServer, faulty

from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.observability.consistency_check import REPLAY_PREFIX
from vericache_sglang.serving.live_page import FRESH_S

FLAGS = (
    *("--vericache-min-prompt", "64", "--vericache-draft-length", "8"),
    *("--vericache-residency", "host", "--vericache-consistency-check-rate", "1.0"),
    # Longer prompts are prefilled in pieces, replays as well.
    *("--chunked-prefill-size", "512", "--max-total-tokens", "30000"),
    "--enable-metrics",
)

pytestmark = [pytest.mark.server, pytest.mark.extended]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return (a sound server, one that sends drafts out unverified)."""
    folder = tmp_path_factory.mktemp("check")
    sound = LiveServer(folder, *FLAGS)
    lossy = LiveServer(folder, *FLAGS, environment=faulty("unverified_drafts"))
    try:
        yield sound.wait(), lossy.wait()
    finally:
        sound.close()
        lossy.close()


def figures(server):
    """Return the report with the check's figures, as the live page gets it."""
    time.sleep(1.2 * FRESH_S)  # viewers share an answer: not one from before
    (scheduler,) = server.get("/vericache/state")
    return scheduler["report"]


def checked(server, seconds=120):
    """Wait until no check is outstanding; return the figures."""
    deadline = time.monotonic() + seconds
    while (found := figures(server))["consistency_pending"]:
        assert time.monotonic() < deadline, f"still checking: {found}"
    return found


def drafted(answers):
    """Count the answers that came from drafts."""
    return sum(answer["meta_info"]["vericache"]["cycles"] > 0 for answer in answers)


def answers_being_checked(server, prompts, seconds=240):
    """Return answers whose replays have begun, with more to come.

    Replays can be over before a busy machine lets this process look: then it asks
    again, and all answers are returned.
    """
    deadline = time.monotonic() + seconds
    answers = []
    while time.monotonic() < deadline:
        answers += server.generate(prompts, max_new_tokens=120, ignore_eos=True)
        while (found := figures(server))["consistency_pending"] > 1:
            lanes = found["lanes"]
            if any(lane["rid"].startswith(REPLAY_PREFIX) for lane in lanes):
                return answers
    raise AssertionError(f"no check seen: {found}")


def test_every_drafted_answer_is_checked(pair, prompts):
    server, _ = pair
    answers = server.generate(prompts)
    answers += server.generate(prompts[:2], temperature=1.0)
    wanted = drafted(answers[: len(prompts)])
    assert wanted >= len(prompts) - 1
    found = checked(server)
    assert found["consistency_checks"] == wanted, "sampled requests are not checked"
    assert found["consistency_mismatches"] == 0
    assert found["consistency_dropped"] == 0
    text = server.get("/metrics").decode()
    assert re.search(
        rf"^vericache_consistency_checks_total{{.*}} {wanted}\.0$", text, re.M
    )


def test_stops_and_penalties_are_repeated(pair, prompts):
    server, _ = pair
    before = checked(server)
    answers = server.generate(prompts[:2], stop=['"'])
    answers += server.generate(prompts[2:4], frequency_penalty=0.7, ignore_eos=True)
    answers += server.generate(prompts[4:], regex=r"\{\"name\":\"[a-z_]+\"\}")
    after = checked(server)
    assert after["consistency_checks"] == before["consistency_checks"] + drafted(
        answers
    )
    assert after["consistency_mismatches"] == 0


def test_a_replay_is_withdrawn_for_clients_and_made_later(pair, prompts):
    server, _ = pair
    before = checked(server)
    answers = answers_being_checked(server, prompts[:3])
    fresh = [f"{i} {prompt}" for i, prompt in enumerate(prompts[2:4])]
    beside = server.generate(fresh, ignore_eos=True)
    checked(server)
    alone = server.generate(fresh, ignore_eos=True)
    assert [b["output_ids"] for b in beside] == [a["output_ids"] for a in alone]
    after = checked(server)
    done = after["consistency_checks"] - before["consistency_checks"]
    wanted = drafted([*answers, *beside, *alone])
    assert done == wanted, "a withdrawn check is made later"
    assert after["consistency_mismatches"] == after["consistency_dropped"] == 0


def test_a_replay_leaves_nothing_in_the_prefix_cache(pair, prompts):
    server, _ = pair
    checked(server)
    server.flush()
    assert figures(server)["cache_device_tokens"] == 0
    before = figures(server)["consistency_checks"]
    answer = server.generate(f"alone {prompts[3]}", ignore_eos=True)
    found = checked(server)
    assert found["consistency_checks"] == before + 1
    meta = answer["meta_info"]
    most = (meta["prompt_tokens"] + meta["completion_tokens"]) // SEGMENT * SEGMENT
    assert 0 < found["cache_device_tokens"] <= most, "more than one request's prefix"


def test_a_replay_makes_way_for_a_flush(pair, prompts):
    server, _ = pair
    before = checked(server)
    answers = answers_being_checked(server, prompts[:3])
    server.post("/flush_cache", {})  # raises unless it succeeds
    after = checked(server)
    done = after["consistency_checks"] - before["consistency_checks"]
    assert done == drafted(answers)
    assert after["consistency_mismatches"] == after["consistency_dropped"] == 0


def test_new_weights_end_the_checks_of_old_answers(pair, prompts):
    server, _ = pair
    before = checked(server)
    answers = answers_being_checked(server, prompts[:3])
    reply = server.post("/update_weights_from_disk", {"model_path": str(MODEL)})
    assert reply["success"], reply
    after = checked(server)
    dropped = after["consistency_dropped"] - before["consistency_dropped"]
    assert 0 < dropped <= drafted(answers)
    done = after["consistency_checks"] - before["consistency_checks"]
    assert done + dropped == drafted(answers)
    assert after["consistency_mismatches"] == 0


def test_an_operator_may_abort_everything(pair, prompts):
    server, _ = pair
    before = checked(server)
    answers = answers_being_checked(server, prompts[:3])
    server.post("/abort_request", {"abort_all": True})
    after = checked(server)
    done = after["consistency_checks"] - before["consistency_checks"]
    assert done == drafted(answers), "an aborted replay is made again"
    assert after["consistency_mismatches"] == 0
    assert server.generate(prompts[:1])[0]["output_ids"], "the server goes on"


def test_replays_and_errors_are_not_in_the_log(pair, prompts):
    server, _ = pair
    checked(server)
    log = server.log.read_text()
    assert REPLAY_PREFIX not in log
    assert "Error" not in log


def test_wrong_answers_are_reported_with_place_and_margin(pair, prompts):
    _, server = pair
    answers = server.generate(prompts, ignore_eos=True)
    found = checked(server)
    assert found["consistency_checks"] == drafted(answers)
    assert found["consistency_mismatches"] > 0
    lines = re.findall(
        r"consistency check of (\w+): output token (\d+) is (\d+), the full KV gives "
        r"(\d+) by (\S+) logits; prompt (\d+) tokens",
        server.log.read_text(),
    )
    assert len(lines) == found["consistency_mismatches"]
    by_rid = {answer["meta_info"]["id"]: answer for answer in answers}
    for rid, position, served, full, margin, prompt in lines:
        answer = by_rid[rid]
        assert answer["output_ids"][int(position)] == int(served) != int(full)
        assert answer["meta_info"]["prompt_tokens"] == int(prompt)
        assert float(margin) > 0
