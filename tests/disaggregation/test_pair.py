"""The promise for a prefill/decode pair: the answers of one plain SGLang server.

SGLang does not send the ``token_ids_logprob`` of the first token, so the waves do not
ask for it. But for one row the wire is the tests' own, below SGLang's Mooncake backend.
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
from vericache_sglang.evaluation.server import free_port
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts, spread

GAP = 5e-4
"""As in lossless/test_sampling.py."""

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"
SEEDED = ("--enable-deterministic-inference", "--enable-custom-logit-processor")
SMALL = ("--vericache-min-prompt", "64", "--vericache-draft-length", "6")
KEYNORM = (*SMALL, "--vericache-compressor", "keynorm", "--vericache-keep", "0.25")
ON_HOST = ("--vericache-residency", "host")
COMPRESSED_BY = (*SMALL, *ON_HOST, "--vericache-compressor")
HELD = ("kept_slots", "staging_slots", "host_bytes", "query_tails", "running")
NOTHING = dict.fromkeys(HELD, 0)

pytestmark = pytest.mark.server


def held(state):
    return {name: state[name] for name in HELD}


def waves(usual):
    drawn = sampled_waves(load_tokenizer(MODEL), each=3, longest=500, tokens=14, seed=3)
    for wave in drawn:
        wave["more"] = {
            name: given
            for name, given in wave.get("more", {}).items()
            if name != "token_ids_logprob"
        }
    return [wave for wave in drawn if (wave["kind"] in SOME) == usual]


SOME = {
    *("temperature", "frequency and presence penalty", "all penalties, greedy"),
    *("JSON schema", "log-probabilities, greedy", "log-probabilities"),
}


@pytest.mark.parametrize(
    "usual",
    [True, pytest.param(False, marks=pytest.mark.extended)],
    ids=["usual", "others"],
)
def test_every_kind_of_request_is_answered_as_by_one_server(usual, tmp_path):
    engine = {name[2:].replace("-", "_"): True for name in SEEDED}
    asked = waves(usual)
    plain = run(described("plain", None, engine), MODEL, asked)
    with Pair(tmp_path, *KEYNORM, *ON_HOST, engine=SEEDED) as pair:
        ours = pair.run(asked)
    assert compare(plain, ours) == []
    assert logprob_gap(plain, ours) < GAP
    state = ours["state"]
    assert state["drafted"] >= 50
    assert 0 < state["accepted"] < state["drafted"]
    assert held(state) == NOTHING


@pytest.mark.extended
def test_log_probabilities_are_nearly_those_of_one_server(tmp_path):
    """As in SGLang's ``PDLogprobParityMixin``, which allows 0.05: one at a time."""
    texts = record_prompts(load_tokenizer(MODEL), spread(64, 100, 600), 17)
    wave = {
        "prompts": texts,
        "params": [greedy(16, ignore_eos=True)] * len(texts),
        "more": {"return_logprob": True, "top_logprobs_num": 5},
        "at_once": 1,
    }
    plain = run(PLAIN, MODEL, [wave])
    with Pair(tmp_path, *KEYNORM, *ON_HOST) as pair:
        ours = pair.run([wave])
    assert compare(plain, ours) == []
    assert logprob_gap(plain, ours) < 1e-4
    assert ours["state"]["drafted"] > 64
    assert held(ours["state"]) == NOTHING


@pytest.fixture(scope="module")
def greedy_waves():
    texts = record_prompts(load_tokenizer(MODEL), spread(12, 200, 1500), 11)
    return [{"prompts": texts, "params": [greedy(60, ignore_eos=True)] * len(texts)}]


@pytest.fixture(scope="module")
def plain(greedy_waves):
    return run(PLAIN, MODEL, greedy_waves)


LINES = {
    "mooncake's own wire": (KEYNORM, None),
    "on the device, no overlap": (
        (*KEYNORM, "--vericache-residency", "device", "--disable-overlap-schedule"),
        WIRE,
    ),
    "snapkv, which runs ends again": ((*COMPRESSED_BY, "snapkv"), WIRE),
    "kvzip, which probes": ((*COMPRESSED_BY, "kvzip"), WIRE),
    "a codec": ((*COMPRESSED_BY, "kivi:bits=4"), WIRE),
    "prompt lookup, pages of 16": (
        (*KEYNORM, *ON_HOST, "--vericache-inner", "ngram"),
        WIRE,
    ),
}


@pytest.mark.extended
@pytest.mark.parametrize("line", LINES)
def test_greedy_answers_are_those_of_one_server(line, greedy_waves, plain, tmp_path):
    flags, wire = LINES[line]
    if wire is None and find_spec("mooncake") is None:
        pytest.skip("mooncake-transfer-engine-non-cuda is not installed")
    engine = ("--page-size", "16") if line.endswith("pages of 16") else ()
    with Pair(tmp_path, *flags, wire=wire, engine=engine) as pair:
        ours = pair.run(greedy_waves)
    assert compare(plain, ours) == []
    assert ours["state"]["drafted"] > 0
    assert held(ours["state"]) == NOTHING


@pytest.mark.extended
def test_parity_while_requests_are_retracted_and_transfers_fail(tmp_path):
    """A request whose transfer fails ends alone, with status 500; it is asked again.

    SGLang lets each look at a waiting request fail at this rate.
    """
    faults = {
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "24",
        "SGLANG_TEST_DISAGG_FAILURE_PROB": "0.003",
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "10",
    }
    texts = record_prompts(load_tokenizer(MODEL), spread(24, 200, 1500), 12)
    wave = {
        "prompts": texts,
        "params": [greedy(40, ignore_eos=True)] * len(texts),
        "more": {"return_logprob": True},
    }
    plain = run(PLAIN, MODEL, [wave])
    answers, seen = {}, 0
    with Pair(tmp_path, *KEYNORM, *ON_HOST, environment=faults) as pair:

        def ask(i):
            alone = {name: wave[name][i : i + 1] for name in ("prompts", "params")}
            try:
                return lossless.answer(pair, {**wave, **alone})
            except HTTPError as error:
                return error.code

        for _ in range(8):
            # Chance, and how often a machine looks, say when the first one fails.
            left = [i for i in range(len(texts)) if not seen or i not in answers]
            with ThreadPoolExecutor(16) as clients:
                found = dict(zip(left, clients.map(ask, left), strict=True))
            failed = {i: code for i, code in found.items() if code == 500}
            seen += len(failed)
            answers |= {i: found[i][0] for i in found.keys() - failed.keys()}
        state = pair.decode.settle()
        log = pair.decode.output()
    assert seen
    assert log.count("Testing retraction") >= 2
    ours = {"waves": [[answers[i] for i in range(len(texts))]]}
    assert compare(plain, ours) == []
    assert logprob_gap(plain, ours) < GAP
    assert state["drafted"] > 0
    assert held(state) == NOTHING


@pytest.mark.extended
def test_an_abort_ends_one_request_wherever_it_is(greedy_waves, plain, tmp_path):
    """Aborted ids begin those of others, which SGLang alone would end too."""
    body, wanted = lossless.bodies(greedy_waves[0])[0], plain["waves"][0][0]["ids"]
    with Pair(tmp_path, *KEYNORM, *ON_HOST) as pair, ThreadPoolExecutor(4) as clients:

        def alone(rid, **address):
            room = {**pair.address, "bootstrap_room": next(pair.rooms), **address}
            with pytest.raises(HTTPError) as caught:
                pair.decode.post("/generate", {**body, **room, "rid": rid})
            return caught.value.code

        # No prefill server is there, none knows the request, and one that decodes.
        waiting = {
            "a": clients.submit(alone, "a", bootstrap_port=free_port()),
            "b": clients.submit(alone, "b"),
        }
        long = {**body, "rid": "c", "sampling_params": greedy(8000, ignore_eos=True)}
        decoding = clients.submit(pair.generate, long)
        while not pair.decode.counters()["running"]:
            assert not decoding.done()
        others = [clients.submit(pair.generate, {**body, "rid": "ab"})]
        for rid, asked in [*waiting.items(), ("c", decoding)]:
            others.append(clients.submit(pair.generate, {**body, "rid": f"{rid}c"}))
            while not asked.done():
                pair.decode.post("/abort_request", {"rid": rid})
        assert [asked.result() for asked in waiting.values()] == [500, 500]
        assert decoding.result()["meta_info"]["finish_reason"]["type"] == "abort"
        assert [other.result()["output_ids"] for other in others] == [wanted] * 4
        assert held(pair.decode.settle()) == NOTHING
