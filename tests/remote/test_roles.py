"""A drafter and a verifier on loopback answer what plain SGLang answers.

The tests share servers and run in order: the last ones kill them.
"""

import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import zmq
from histories import HELLO
from live_pair import (
    LEASE_S,
    LOGPROBS,
    MOVED,
    OF_OUTPUT,
    WAIT_S,
    Pair,
    Streams,
    begin,
    kill,
    pause,
)
from msgspec.structs import replace

from vericache_sglang.remote.messages import decode_to_drafter, encode
from vericache_sglang.remote.verifiers import DEAD

pytestmark = pytest.mark.server
extended = pytest.mark.extended


@pytest.fixture(scope="module")
def pair(tmp_path_factory, plain):
    with Pair(tmp_path_factory.mktemp("roles"), plain).started() as found:
        yield found


SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
KINDS = {
    "greedy": {},
    "n of 2": {"temperature": 0.9, "top_p": 0.8, "n": 2},
    "stop strings": {"stop": ["0", " the"]},
    "stop tokens": {"stop_token_ids": list(range(40, 60))},
    "biased": {"logit_bias": {"20": 5.0, "40": -50.0}},
    "not drafted": {"custom_params": {"vericache": {"enabled": False}}},
    "longer": {"min_new_tokens": 20},
    "grammar": {"json_schema": SCHEMA},
    "log-probabilities": LOGPROBS,
}
OF_PROMPT = {"more": {"return_logprob": True, "logprob_start_len": 0}}


def test_every_kind_of_request_is_answered_as_by_sglang(pair, prompts):
    pair.compare_kinds(KINDS, prompts[:2], "b1")
    # Plain SGLang draws and counts otherwise beside others.
    pair.compare(prompts, "b1", temperature=0.8, sampling_seed=7)
    pair.compare(prompts, "b1", frequency_penalty=0.7)


@extended
def test_log_probabilities_of_a_prompt_are_computed_where_it_is(pair, prompts):
    pair.compare(prompts, "local", **OF_PROMPT)


def wanted(pair, prompts, tokens):
    answers = pair.plain.generate(prompts, max_new_tokens=tokens, ignore_eos=True)
    return [answer["text"] for answer in answers]


@extended
def test_streams_grow_and_end_like_answers(pair, prompts):
    before = pair.connected()
    streams = Streams(pair.drafter, prompts, 240)
    assert streams.texts() == wanted(pair, prompts, 240)
    after = pair.drafter.counters()
    assert after["remote_b1"] == before["remote_b1"] + len(prompts)
    lasts = [chunks[-1]["meta_info"]["vericache"]["path"] for chunks in streams.chunks]
    # Requests return from a verifier that stands still for seconds.
    returned = after["remote_returns"] - before["remote_returns"]
    assert sorted(lasts) == ["b1"] * (len(lasts) - returned) + ["local"] * returned
    for chunks in streams.chunks:
        assert len(chunks) > 4
        texts = [chunk["text"] for chunk in chunks]
        assert all(b.startswith(a) for a, b in pairwise(texts))


def test_an_aborted_request_ends_its_guest(pair, prompts):
    before = pair.drafter.counters()
    client = begin(pair.drafter, prompts[0], 5000)
    pair.until(pair.verifier, lambda c: c["remote_guests"] == 1)
    client.close()
    pair.until(pair.verifier, lambda c: c["remote_guests"] == c["running"] == 0)
    after = pair.drafter.counters()
    assert after["remote_b1"] == before["remote_b1"] + 1
    assert after["remote_returns"] == before["remote_returns"]


@extended
def test_lost_repeated_and_reordered_messages_change_no_answer(pair, prompts):
    before = pair.drafter.counters()
    pair.proxy.share = 0.05
    passed = pair.proxy.altered
    try:
        for _ in range(2):
            pair.compare(prompts, max_new_tokens=64, ignore_eos=True)
    finally:
        pair.proxy.share = 0.0
    assert pair.proxy.altered > passed + 5
    after = pair.connected()
    assert after["remote_resends"] > before["remote_resends"]


@extended
def test_garbage_and_strangers_on_the_socket_hinder_nothing(pair, prompts):
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(f"tcp://127.0.0.1:{pair.port}")
    peer.send(encode(replace(HELLO, instance=secrets.token_bytes(16))))
    assert peer.poll(1000 * WAIT_S)
    refusal = decode_to_drafter(peer.recv())
    assert "fingerprint is 'model', here" in refusal.reason
    for _ in range(20):
        peer.send(secrets.token_bytes(64))
        with socket.create_connection(("127.0.0.1", pair.port)) as raw:
            raw.sendall(secrets.token_bytes(512))
    pair.compare(prompts, "b1")
    context.destroy(linger=0)
    pair.until(pair.verifier, lambda c: c["remote_malformed"] >= 10)
    assert "a peer is ignored for a while: " in pair.verifier.output()
    assert "a drafter was refused: " in pair.verifier.output()


@extended
def test_a_machine_that_stands_still_for_a_while_moves_no_request(pair, prompts):
    expected = wanted(pair, prompts, 400)
    before = pair.drafter.counters()
    streams = Streams(pair.drafter, prompts, 400)
    streams.under_way()
    pause(pair.drafter, pair.verifier, seconds=2 * DEAD * LEASE_S)
    assert streams.texts() == expected
    after = pair.drafter.counters()
    for name in ("remote_failovers", "remote_returns", "remote_local"):
        assert after[name] == before[name]
    assert after["remote_b1"] == before["remote_b1"] + len(prompts)


@extended
def test_a_verifier_that_is_killed_costs_no_client_anything(pair, prompts):
    texts = [*prompts, *(prompt[: len(prompt) // 2] for prompt in prompts)]
    params = [MOVED[i % len(MOVED)] for i in range(len(texts))]
    expected = Streams(pair.plain, texts, 160, params).texts()
    streams = Streams(pair.drafter, texts, 160, params)
    streams.under_way()
    kill(pair.verifier)
    assert streams.texts() == expected
    lasts = [chunks[-1]["meta_info"] for chunks in streams.chunks]
    assert {last["finish_reason"]["type"] for last in lasts} <= {"length", "stop"}
    assert "local" in {last["vericache"]["path"] for last in lasts}
    pair.compare(prompts, "local")
    pair.restart_verifier()
    pair.compare(prompts, "b1")


@extended
def test_log_probabilities_go_on_where_a_killed_verifier_has_left_them(pair, prompts):
    before = pair.drafter.counters()["remote_relayed_tokens"]
    with ThreadPoolExecutor(1) as pool:
        asked = {"max_new_tokens": 300, "ignore_eos": True, **OF_OUTPUT}
        run = pool.submit(pair.compare, prompts, "local", **asked)
        pair.until(pair.drafter, lambda c: c["remote_relayed_tokens"] > before + 20)
        kill(pair.verifier)
        run.result()
    pair.restart_verifier()


@extended
def test_a_drafter_that_is_killed_leaves_no_guest(pair, prompts):
    clients = [begin(pair.drafter, text, 5000) for text in prompts]
    held = pair.until(pair.verifier, lambda c: c["remote_guests"] == len(prompts))
    kill(pair.drafter)
    for client in clients:
        client.close()
    counters = pair.until(pair.verifier, lambda c: c["remote_guests"] == 0)
    expired = counters["remote_lease_expiries"] - held["remote_lease_expiries"]
    assert expired == len(prompts)
    pair.verifier.settle()
    pair.verifier.flush()  # with strict checks: not a slot is missing
    answers = pair.verifier.generate(prompts)
    plain = pair.plain.generate(prompts)
    assert [a["output_ids"] for a in answers] == [p["output_ids"] for p in plain]
