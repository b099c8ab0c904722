"""SGLang's own test kits, unmodified, against our server.

``kit_table.py`` says which run, with which attributes, and why the rest cannot.
"""

import json
import random

import pytest
from host_case import run_method
from kit_table import ROWS, WITHOUT_METHODS, shipped
from stand_ins import import_kit

pytestmark = [pytest.mark.server, pytest.mark.extended]


def _cases():
    methods = shipped()
    for row in ROWS:
        for method in methods.get(row.kit, {}).get(row.mixin, ()):
            reason = row.why_dropped(method)
            marks = [pytest.mark.skip(reason=reason)] if reason else []
            yield pytest.param(row, method, id=f"{row.mixin}-{method}", marks=marks)


@pytest.fixture(scope="module")
def data_set(kit_servers):
    """Give the KL kit prompts of its own cache, where LongBench would be."""
    utils = import_kit("kl_test_utils")
    draw = random.Random(3)
    prompts = [[draw.randint(8, 585) for _ in range(200)] for _ in range(4)]
    key = (
        f"{kit_servers.model}_{utils.DEFAULT_PROMPT_TOKENS}_{utils.DEFAULT_NUM_SAMPLES}"
    )
    utils._cached_input_ids[key] = prompts


@pytest.mark.usefixtures("data_set")
@pytest.mark.parametrize(("row", "method"), _cases())
def test_kit(row, method, kit_servers):
    wrong = run_method(row, method, kit_servers, "kits")
    if not wrong and method not in row.plain_fails:
        return
    if method in row.needs_drafts:
        pytest.fail(wrong)
    plain = run_method(row, method, kit_servers, "plain")
    assert plain, f"passes on plain SGLang, fails on ours: {wrong}"
    assert method in row.plain_fails, f"fails on plain SGLang too, not listed: {plain}"
    assert wrong == plain


def test_drafting_is_what_the_kits_exercise(kit_servers):
    server = kit_servers["kits"]
    before = server.settle()
    row = next(row for row in ROWS if row.mixin == "SpecLogprobKit")
    assert not run_method(row, "test_logprob_decode_match_prefill", kit_servers, "kits")
    after = server.settle()
    assert after["verify_rows"] > before["verify_rows"]
    assert after["drafted"] > before["drafted"]


def test_radix_tree(kit_servers):
    random.seed(7)
    tree = import_kit("kits.radix_cache_server_kit").gen_radix_tree(40, 96)
    request = {
        "input_ids": [node["input_ids"] for node in tree],
        "sampling_params": [
            {"max_new_tokens": min(node["decode_len"], 48), "temperature": 0}
            for node in tree
        ],
    }
    ours, plain = (
        [
            answer["output_ids"]
            for answer in kit_servers[name].post("/generate", request)
        ]
        for name in ("kits", "plain")
    )
    assert ours == plain


def test_multiturn_cache_hit(kit_servers, tmp_path):
    talk = [{"value": "user 1234 name " * 20}, {"value": "city " * 20}]
    data = tmp_path / "conversations.json"
    data.write_text(json.dumps([{"conversations": talk}] * 16))
    report = import_kit("kits.cache_hit_kit").run_multiturn_cache_hit_test(
        kit_servers["kits"].url,
        str(kit_servers.model),
        num_clients=4,
        request_length=96,
        output_length=16,
        dataset_path=str(data),
    )
    assert report["overall"]["cache_hit_rate"] > 0.4


def test_every_shipped_kit_is_in_the_table():
    found = shipped()
    listed = {(row.kit, row.mixin) for row in ROWS}
    assert listed == {(kit, mixin) for kit in found for mixin in found[kit]}
    assert set(WITHOUT_METHODS) == {kit for kit in found if not found[kit]}
    for row in ROWS:
        named = {*row.dropped, *row.plain_fails, *row.needs_drafts} - {"*"}
        assert named <= set(found[row.kit][row.mixin]), row.mixin
