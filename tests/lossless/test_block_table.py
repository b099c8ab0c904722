"""There is one block table: nothing in the engine reads or holds another one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from live_server import faulty, run

from vericache_sglang.evaluation.lossless import greedy
from vericache_sglang.evaluation.matrix import system

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"

pytestmark = [pytest.mark.server, pytest.mark.extended]


def test_no_object_of_the_engine_refers_to_another_block_table(tmp_path):
    listed = tmp_path / "tables"
    watched = replace(
        system("listed tables", draft_length=4, engine={"max_running_requests": 16}),
        environment={**faulty("listed_tables"), "VERICACHE_TEST_TABLES": str(listed)},
    )
    run(watched, MODEL, [{"prompts": ["one"], "params": [greedy(2)]}])
    ((shape, is_the_pools),) = json.loads(listed.read_text())
    assert is_the_pools
    assert shape[0] == 1 + 2 * 16 + 2, "padding, requests, drafts and 2 verifications"
