"""Multi-token prediction heads as inner drafters, of random models of every family.

The proposals of MiMo's are compared with transformers' Qwen2 layers, of which MiMo is
made, those of the others are right more often than by chance; answers are SGLang's.
"""

import json
from functools import cache
from pathlib import Path

import pytest
from live_server import faulty, run
from moe_heads import FAMILIES, write_checkpoint

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
def waves():
    texts = record_prompts(load_tokenizer(MODEL), spread(5, 150, 1200), 13)
    kinds = (
        [greedy(40, ignore_eos=True)],
        [{**SEEDED, "max_new_tokens": 40, "sampling_seed": i} for i in range(5)],
    )
    return [{"prompts": texts, "params": kind * (5 // len(kind))} for kind in kinds]


@pytest.fixture(scope="module")
def served(waves, tmp_path_factory):
    """Return a family's folder, what its writer returned, and plain answers."""
    define_missing_ops()
    from mimo_pair import shaped_like_mimo

    @cache
    def answered(family):
        folder = tmp_path_factory.mktemp(family)
        if family == "MiMo":
            written = shaped_like_mimo(folder)
        else:
            written = write_checkpoint(folder, family)
        plain = described("plain SGLang", None, ENGINE)
        return folder, written, run(plain, folder, waves)

    return answered


def serve(folder, waves, file, engine=None, more=None, **settings):
    environment = {
        **(more or {}),
        **faulty("inner_drafter"),
        "VERICACHE_TEST_DRAFTER": "mtp",
        "VERICACHE_TEST_PROPOSALS": str(file),
    }
    settings = {"draft_length": 8, "keep": 0.5, "inner_length": 3, **settings}
    engine = {**ENGINE, **(engine or {})}
    ours = system("mtp", engine=engine, environment=environment, **settings)
    return run(ours, folder, waves)


def test_a_head_proposes_what_it_does_in_transformers(served, waves, tmp_path):
    from mimo_pair import said_by

    folder, pair, plain = served("MiMo")
    ours = serve(folder, waves, tmp_path / "file", inner="mtp", min_prompt=1 << 20)
    assert compare(plain, ours) == []
    lines = [json.loads(line) for line in (tmp_path / "file").read_text().splitlines()]
    equal = asked = 0
    for text, skipped, found in lines[:: len(lines) // 20]:
        wanted = said_by(*pair, text, skipped, len(found))
        equal += sum(a == b for a, b in zip(found, wanted, strict=True))
        asked += len(found)
    assert equal > 0.9 * asked


PAGED = {"page_size": 16, "chunked_prefill_size": 256}
SYNCHRONOUS = {"disable_overlap_schedule": True}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("MiMo", {"engine": {**PAGED, "tp_size": 2}}),
        ("MiMo", {"engine": SYNCHRONOUS, "residency": "device"}),
        ("MiMo", {"engine": TIGHT, "more": RETRACTED}),
        ("GLM", {"engine": PAGED}),
        ("ERNIE", {"residency": "device"}),
        ("Qwen3-MoE", {}),
    ],
)
def test_tokens_are_plain_sglangs(family, settings, served, waves, tmp_path):
    folder, _, plain = served(family)
    ours = serve(folder, waves, tmp_path / "file", inner="mtp", **settings)
    assert compare(plain, ours) == []
    state = ours["state"]
    assert state["inner_errors"] == 0
    assert state["cycles"] > 0
    if family in FAMILIES:
        greedily = [answer["vericache"] for answer in ours["waves"][0]]
        asked = sum(each["inner_proposed"] for each in greedily)
        right = sum(each["inner_accepted"] for each in greedily)
        # By chance it is one of some hundred tokens.
        assert right > 0.05 * asked
