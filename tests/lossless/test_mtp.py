"""A multi-token prediction head as inner drafter, of a random model shaped like MiMo.

Its proposals are compared with transformers' Qwen2 layers, of which MiMo is made, and
the answers with plain SGLang's.
"""

import json
from pathlib import Path

import pytest
from live_server import faulty, run

from vericache_sglang.evaluation.lossless import compare, greedy
from vericache_sglang.evaluation.matrix import RETRACTED, TIGHT, system
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts, spread
from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"

ENGINE = {"enable_deterministic_inference": True, "dtype": "float32"}
"""Without the first SGLang drops seeds; in float16 two random logits may be equal."""
SEEDED = {"temperature": 0.9, "top_p": 0.9, "ignore_eos": True}

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    define_missing_ops()
    from mimo_pair import shaped_like_mimo

    folder = tmp_path_factory.mktemp("mimo")
    return folder, *shaped_like_mimo(folder)


@pytest.fixture(scope="module")
def waves():
    texts = record_prompts(load_tokenizer(MODEL), spread(5, 150, 1200), 13)
    kinds = (
        [greedy(60, ignore_eos=True)],
        [{**SEEDED, "max_new_tokens": 60, "sampling_seed": i} for i in range(5)],
    )
    return [{"prompts": texts, "params": kind * (5 // len(kind))} for kind in kinds]


@pytest.fixture(scope="module")
def served(pair, waves):
    """Return the pair, the waves and plain SGLang's answers."""
    return pair, waves, run(described("plain SGLang", None, ENGINE), pair[0], waves)


def serve(pair, waves, file, engine=None, more=None, **settings):
    environment = {
        **(more or {}),
        **faulty("inner_drafter"),
        "VERICACHE_TEST_DRAFTER": "mtp",
        "VERICACHE_TEST_PROPOSALS": str(file),
    }
    settings = {"draft_length": 8, "keep": 0.5, "inner_length": 3, **settings}
    engine = {**ENGINE, **(engine or {})}
    ours = system("mtp", engine=engine, environment=environment, **settings)
    return run(ours, pair[0], waves)


def test_a_head_proposes_what_it_does_in_transformers(served, tmp_path):
    from mimo_pair import said_by

    pair, waves, plain = served
    ours = serve(pair, waves, tmp_path / "file", inner="mtp", min_prompt=1 << 20)
    assert compare(plain, ours) == []
    lines = [json.loads(line) for line in (tmp_path / "file").read_text().splitlines()]
    equal = asked = 0
    for text, skipped, found in lines[:: len(lines) // 20]:
        wanted = said_by(*pair[1:], text, skipped, len(found))
        equal += sum(a == b for a, b in zip(found, wanted, strict=True))
        asked += len(found)
    assert equal > 0.9 * asked


@pytest.mark.extended
@pytest.mark.parametrize(
    ("engine", "more", "settings"),
    [
        ({"page_size": 16, "chunked_prefill_size": 256}, {}, {}),
        ({"disable_overlap_schedule": True}, {}, {"residency": "device"}),
        (TIGHT, RETRACTED, {}),
    ],
    ids=["host", "device", "retraction"],
)
def test_tokens_are_plain_sglangs(engine, more, settings, served, tmp_path):
    pair, waves, plain = served
    file = tmp_path / "file"
    ours = serve(pair, waves, file, engine, more, inner="mtp", **settings)
    assert compare(plain, ours) == []
    assert ours["state"]["inner_errors"] == 0
    assert ours["state"]["cycles"] > 0
