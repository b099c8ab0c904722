"""The promise for a prefill/decode pair: the answers of one plain SGLang server.

SGLang's own tests know the first token's ``token_ids_logprob`` to be missing from a
pair, so the waves do not ask for it.
"""

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError

import pytest
from live_server import run
from server_pair import WIRE, Pair

from vericache_sglang.evaluation import lossless
from vericache_sglang.evaluation.lossless import compare, greedy
from vericache_sglang.evaluation.matrix import PLAIN
from vericache_sglang.evaluation.sampled import logprob_gap, sampled_waves
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts, spread

GAP = 5e-4
"""As in lossless/test_sampling.py."""

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"
SEEDED = ("--enable-deterministic-inference", "--enable-custom-logit-processor")
SMALL = ("--vericache-min-prompt", "64", "--vericache-draft-length", "6")
KEYNORM = (*SMALL, "--vericache-compressor", "keynorm", "--vericache-keep", "0.25")
ON_HOST = ("--vericache-residency", "host")
HELD = ("kept_slots", "staging_slots", "host_bytes", "query_tails", "running")
NOTHING = dict.fromkeys(HELD, 0)

pytestmark = pytest.mark.server


def held(state):
    return {name: state[name] for name in HELD}


@pytest.fixture(scope="module")
def waves():
    drawn = sampled_waves(load_tokenizer(MODEL), each=3, longest=500, tokens=14, seed=3)
    for wave in drawn:
        wave["more"] = {
            name: given
            for name, given in wave.get("more", {}).items()
            if name != "token_ids_logprob"
        }
    return drawn


def test_every_kind_of_request_is_answered_as_by_one_server(waves, tmp_path):
    engine = {name[2:].replace("-", "_"): True for name in SEEDED}
    plain = run(described("plain", None, engine), MODEL, waves)
    with Pair(tmp_path, *KEYNORM, *ON_HOST, engine=SEEDED) as pair:
        ours = pair.run(waves)
    assert compare(plain, ours) == []
    assert logprob_gap(plain, ours) < GAP
    state = ours["state"]
    assert state["drafted"] >= 200
    assert 0 < state["accepted"] < state["drafted"]
    assert held(state) == NOTHING


@pytest.fixture(scope="module")
def greedy_waves():
    texts = record_prompts(load_tokenizer(MODEL), spread(12, 200, 1500), 11)
    return [{"prompts": texts, "params": [greedy(60, ignore_eos=True)] * len(texts)}]


@pytest.fixture(scope="module")
def plain(greedy_waves):
    return run(PLAIN, MODEL, greedy_waves)


LINES = {
    "mooncake's own wire": (KEYNORM, None),
    "residual KV on the device": ((*KEYNORM, "--vericache-residency", "device"), WIRE),
    "no overlap": ((*KEYNORM, "--disable-overlap-schedule"), WIRE),
    "kvzip, which probes": ((*SMALL, "--vericache-compressor", "kvzip"), WIRE),
    "a codec": ((*SMALL, "--vericache-compressor", "kivi:bits=4"), WIRE),
    "prompt lookup": ((*KEYNORM, "--vericache-inner", "ngram"), WIRE),
    "streaming tokens only": ((*SMALL, "--vericache-compressor", "recency"), WIRE),
}


@pytest.mark.extended
@pytest.mark.parametrize("line", LINES)
def test_greedy_answers_are_those_of_one_server(line, greedy_waves, plain, tmp_path):
    flags, wire = LINES[line]
    if wire is None and find_spec("mooncake") is None:
        pytest.skip("mooncake-transfer-engine-non-cuda is not installed")
    with Pair(tmp_path, *flags, wire=wire) as pair:
        ours = pair.run(greedy_waves)
    assert compare(plain, ours) == []
    assert ours["state"]["drafted"] > 0
    assert held(ours["state"]) == NOTHING


@pytest.mark.extended
def test_retracted_requests_are_sent_again(greedy_waves, plain, tmp_path):
    often = {
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "12",
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "100",
    }
    with Pair(tmp_path, *KEYNORM, *ON_HOST, environment=often) as pair:
        ours = pair.run(greedy_waves)
        log = pair.decode.output()
    assert log.count("Testing retraction") >= 2
    assert compare(plain, ours) == []
    assert held(ours["state"]) == NOTHING


@pytest.mark.extended
def test_a_failed_transfer_costs_its_request_alone(greedy_waves, plain, tmp_path):
    failing = {"SGLANG_TEST_DISAGG_FAILURE_PROB": "0.02"}
    (wave,) = greedy_waves
    with Pair(tmp_path, *KEYNORM, *ON_HOST, environment=failing) as pair:

        def ask(body):
            try:
                return pair.generate(body)["output_ids"]
            except HTTPError as error:
                return error.code

        bodies = lossless.bodies(wave) * 3
        with ThreadPoolExecutor(12) as clients:
            got = list(clients.map(ask, bodies))
        state = pair.decode.settle()
    wanted = [answer["ids"] for answer in plain["waves"][0]] * 3
    failed = [ids for ids in got if ids == 500]
    assert 0 < len(failed) < len(got) / 2
    assert [i for i, ids in enumerate(got) if ids != wanted[i] and ids != 500] == []
    assert held(state) == NOTHING


@pytest.mark.extended
def test_an_abort_ends_a_request_that_waits_for_kv_alone(greedy_waves, plain, tmp_path):
    """The KV of one never comes; its id begins the other's, and SGLang's next one's."""
    (wave,) = greedy_waves
    body, wanted = lossless.bodies(wave)[0], plain["waves"][0][0]["ids"]
    with Pair(tmp_path, *KEYNORM, *ON_HOST) as pair, ThreadPoolExecutor(2) as clients:

        def alone():
            room = {**pair.address, "bootstrap_room": next(pair.rooms)}
            with pytest.raises(HTTPError) as caught:
                pair.decode.post("/generate", {**body, **room, "rid": "a"})
            return caught.value.code

        waiting = clients.submit(alone)
        answered = clients.submit(pair.generate, {**body, "rid": "ab"})
        assert answered.result()["output_ids"] == wanted
        second = clients.submit(pair.generate, {**body, "rid": "ac"})
        while not waiting.done():
            pair.decode.post("/abort_request", {"rid": "a"})
        assert waiting.result() == 500
        assert second.result()["output_ids"] == wanted
        assert held(pair.decode.settle()) == NOTHING
