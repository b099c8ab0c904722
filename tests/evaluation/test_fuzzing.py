"""Bodies drawn from SGLang's own document: bad, extreme, and the same for a seed."""

import json
import sys
from collections import Counter

import pytest

from vericache_sglang.evaluation.command import main
from vericache_sglang.evaluation.fuzzing import CUT, OTHERS, Body, draw
from vericache_sglang.evaluation.left_out import LEFT_OUT, left_out
from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

PROMPTS = ["verify user 1234", "reset the code of user 0001"]


@pytest.fixture(scope="module")
def openapi():
    define_missing_ops()
    from sglang.srt.entrypoints.http_server import app

    return app.openapi()


@pytest.fixture(scope="module")
def bodies(openapi):
    return draw(openapi, PROMPTS, 150, seed=5)


@pytest.mark.extended
def test_a_seed_gives_the_same_bodies(openapi):
    once, again = (draw(openapi, PROMPTS, 10, seed=6) for _ in range(2))
    assert once == again


@pytest.mark.extended
def test_most_are_right_requests_with_something_changed(bodies):
    paths = Counter(body.path for body in bodies)
    assert paths["/generate"] > 0.35 * len(bodies)
    assert set(paths) & set(OTHERS)
    asked = [content(body) for body in bodies if body.path == "/generate"]
    texts = [each for each in asked if each and each.get("text") in PROMPTS]
    assert len(texts) > 0.4 * len(asked)
    params = [each["sampling_params"] for each in texts]
    changed = Counter(name for each in params for name in each)
    assert len(changed) > 8, "many fields"
    assert any(each.get("temperature") != 0 for each in params)
    assert {body.sending for body in bodies} == {"whole", *CUT}
    assert any(content(body) is None for body in bodies), "no JSON at all"


def content(body):
    """Return the object a body holds; None where it holds none."""
    try:
        found = json.loads(body.data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@pytest.mark.extended
def test_what_ends_plain_sglang_is_not_sent(bodies):
    sent = [found for body in bodies if (found := content(body)) is not None]
    assert not [each for each in sent if left_out(each)]


@pytest.mark.parametrize(
    "fields",
    [
        {"input_ids": [1, 586]},
        {"input_ids": []},
        {"input_ids": [[20], []]},
        {"logit_bias": {"20": "a"}},
        {"temperature": 0.5, "logit_bias": {"20": float("inf")}},
        {"temperature": 0.5, "repetition_penalty": 1e-30},
        {"sampling_params": {"regex": 5}},
        {"sampling_params": {"n": 10**9}},
        {"return_logprob": [True]},
        {"logprob_start_len": -2},
        {"top_logprobs_num": 587},
        {"top_k": 2**40},
    ],
)
def test_every_rule_covers_what_it_names(fields):
    assert left_out(fields)
    assert (
        sum(
            crashes({**fields, **fields.get("sampling_params", {})})
            for crashes in LEFT_OUT.values()
        )
        == 1
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "a", "sampling_params": {"temperature": 0, "max_new_tokens": 4}},
        {"input_ids": [0, 585], "top_logprobs_num": 586, "logprob_start_len": -1},
        {"temperature": 0, "logit_bias": {"20": 1e308}, "n": 2},
        {"prompt": "a", "top_k": -1, "logprobs": 5},
    ],
)
def test_other_requests_are_sent(fields):
    assert not left_out(fields)


def test_without_schemathesis_nothing_starts(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "schemathesis", None)
    assert main(["fuzz", "--model", "/nowhere"]) == 2
    assert "schemathesis draws the bodies and is missing" in capsys.readouterr().err


def test_an_abort_of_all_is_known():
    assert Body("/abort_request", b'{"abort_all": true}').aborts_all
    assert not Body("/abort_request", b'{"rid": "a"}').aborts_all
