"""Whatever an inner drafter proposes, the tokens are those of plain SGLang.

An oracle proposes what will be said, so most draft iterations are saved; others propose
anything, or fail. Requests draft on the host's or the device's residual KV, or are
never compressed, so that the drafter serves them alone.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from live_server import informed, run
from safetensors.torch import load_file, save_file

from demo_model import checkpoint, eagle3
from demo_model.eagle3 import LAYERS
from vericache_sglang.evaluation.lossless import compare, greedy
from vericache_sglang.evaluation.matrix import PLAIN, RETRACTED, TIGHT, system
from vericache_sglang.evaluation.sampled import REGEX, logprob_gap
from vericache_sglang.evaluation.server import ServerError
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import (
    code_prompts,
    load_tokenizer,
    record_prompts,
    spread,
)

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"
HEAD = MODEL.with_name("demo-model-eagle3")
WEIGHTS = {
    "model": ("model", MODEL.with_name("demo-model-draft")),
    "itself": ("model", MODEL),
    "eagle3": ("eagle3", HEAD),
    "nan": ("eagle3", HEAD),
}
"""Setting and weights by the drafter's name; the served model knows what it will say,
and the last one reads features that are no numbers."""
HELD = ("kept_slots", "staging_slots", "host_bytes", "query_tails", "running")
LENGTH = 4
GAP = 5e-4
"""See ``test_sampling.py``."""

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def waves():
    """Two waves; the second one repeats prompts and ends where answers end."""
    tokenizer = load_tokenizer(MODEL)
    texts = record_prompts(tokenizer, spread(5, 200, 1800), 11)
    texts += code_prompts(tokenizer, spread(2, 200, 1200), 11)
    lengths = [32 + i % 3 * 12 for i in range(len(texts))]
    return [
        {"prompts": texts, "params": [greedy(n, ignore_eos=True) for n in lengths]},
        {"prompts": texts, "params": [greedy(36) for _ in texts]},
    ]


@pytest.fixture(scope="module")
def plain(waves):
    return run(PLAIN, MODEL, waves)


@pytest.fixture(scope="module")
def texts(waves, plain, tmp_path_factory):
    return informed(waves, plain, tmp_path_factory.mktemp("texts"))


def extended(*values, **options):
    return pytest.param(*values, marks=pytest.mark.extended, **options)


PAIR = "snapkv+split-planes:exponent_bits=3,mantissa_bits=2"
"""Kept tokens are packed: a draft row begins with codes."""
ALONE = {"min_prompt": 1 << 20}
"""No prompt is long enough to be compressed."""
WHOLE = {"inner_window": 4096}
"""A small model reads whole texts, but for those that are longer."""
SEEDED = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 60}
SYNCHRONOUS = {"disable_overlap_schedule": True}


def serve(drafter, waves, texts, engine=None, more=None, **settings):
    """Return the answers and counters of a server with the named drafter.

    ``texts`` is the environment from ``informed``.
    """
    environment = {
        **texts,
        "VERICACHE_TEST_DRAFTER": drafter,
        **(more or {}),
    }
    settings = {"draft_length": 16, "keep": 0.5, "inner_length": LENGTH, **settings}
    inner, weights = WEIGHTS.get(drafter, ("ngram", None))
    if weights is not None:
        engine = {**(engine or {}), "speculative_draft_model_path": str(weights)}
    served = system(
        drafter, engine=engine, environment=environment, inner=inner, **settings
    )
    ours = run(served, MODEL, waves)
    held = {name: ours["state"][name] for name in HELD}
    assert held == dict.fromkeys(HELD, 0)
    return ours


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ({"page_size": 16, "chunked_prefill_size": 256}, {}),
        extended(SYNCHRONOUS, {"residency": "device"}),
        ({}, {"compressor": PAIR}),
        extended({"page_size": 16}, {"compressor": PAIR, "residency": "device"}),
        extended(SYNCHRONOUS, {"compressor": "kivi:bits=4"}),
    ],
)
def test_an_oracle_saves_most_draft_iterations(engine, settings, waves, plain, texts):
    ours = serve("oracle", waves, texts, engine, **settings)
    assert compare(plain, ours) == []
    state = ours["state"]
    assert state["cycles"] > 20
    # Below 1 + LENGTH, as a cycle's first rows may be its last ones too.
    assert state["drafted"] >= 2 * state["draft_rows"]


@pytest.mark.parametrize(
    ("drafter", "engine", "settings"),
    [
        ("oracle", {}, {}),
        extended("itself", SYNCHRONOUS, WHOLE),
    ],
)
def test_an_oracle_serves_requests_that_are_never_compressed(
    drafter, engine, settings, waves, plain, texts
):
    ours = serve(drafter, waves, texts, engine, **ALONE, **settings)
    assert compare(plain, ours) == []
    state = ours["state"]
    assert state["cycles"] == 0
    tokens = sum(len(answer["ids"]) for wave in ours["waves"] for answer in wave)
    assert tokens >= 3 * state["plain_rows"]


@pytest.mark.parametrize(
    ("drafter", "engine", "settings"),
    [
        ("ngram", {}, {}),
        ("model", {"page_size": 16}, {}),
        ("eagle3", {"page_size": 16, "chunked_prefill_size": 256}, {}),
        extended(
            "random",
            {"page_size": 16, "chunked_prefill_size": 256},
            {"residency": "device", "pacing": "lockstep"},
        ),
        extended("ngram", {**SYNCHRONOUS, "page_size": 16}, ALONE),
        extended("model", SYNCHRONOUS, {"residency": "device"}),
        extended("eagle3", SYNCHRONOUS, ALONE),
        extended("eagle3", {}, {"compressor": PAIR}),
        extended("model", {"page_size": 16}, {"compressor": "kivi:bits=2"}),
        extended("nan", {}, {}),
        extended("stale", {}, {}),
    ],
)
def test_any_proposals_leave_the_tokens_alone(
    drafter, engine, settings, waves, plain, texts
):
    ours = serve(drafter, waves, texts, engine, **settings)
    assert compare(plain, ours) == []
    state = ours["state"]
    assert state["inner_errors"] == 0
    kinds = ("draft", "verify", "plain")
    accepted = sum(state[f"inner_accepted_{kind}"] for kind in kinds)
    proposed = sum(state[f"inner_proposed_{kind}"] for kind in kinds)
    if drafter == "model":
        assert accepted > 100
    if drafter == "eagle3":
        assert accepted > proposed / 3


def said_by(head, net, window, text, skipped, depth):
    """Return what a head proposes after a text: its whole text in one forward each."""
    ids = torch.tensor([text])
    outputs = net.hidden(ids[:, :-1])[1]
    hidden = head.fc(torch.cat([outputs[i] for i in LAYERS], -1)[:, skipped:])
    embeds, found = net.model.embed_tokens(ids)[:, skipped + 1 :], []
    first = max(0, hidden.shape[1] + depth - 1 - window)
    for _ in range(depth):
        positions = torch.arange(first, hidden.shape[1])[None]
        logits, own = head(embeds[:, first:], hidden[:, first:], positions, [])
        chosen = logits[0, -1].argmax()
        found.append(int(chosen + head.d2t[chosen]))
        embeds = torch.cat(
            [embeds, net.model.embed_tokens(torch.tensor([found[-1:]]))], 1
        )
        hidden = torch.cat([hidden, own[:, -1:]], 1)
    return found


@pytest.mark.extended
@torch.no_grad()
def test_a_head_proposes_what_it_does_in_plain_torch(waves, plain, texts, tmp_path):
    """Features of the second wave's cached prompts are missing, but for the last."""
    file = tmp_path / "proposals"
    more = {"VERICACHE_TEST_PROPOSALS": str(file)}
    ours = serve("eagle3", waves, texts, more=more, **ALONE)
    assert compare(plain, ours) == []
    net, head = checkpoint.load(MODEL), eagle3.load(HEAD)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    cached = [line for line in lines if 64 <= len(line[0]) - line[1] < 100]
    assert cached
    equal = asked = 0
    for text, skipped, found in [*lines[:: len(lines) // 16], *cached[:4]]:
        wanted = said_by(head, net, 512, text, skipped, len(found))
        equal += sum(a == b for a, b in zip(found, wanted, strict=True))
        asked += len(found)
    assert equal > 0.95 * asked


def asked_for(**options):
    return greedy(72, ignore_eos=True, custom_params={"vericache": options})


KINDS = {
    "free": greedy(72, ignore_eos=True),
    "a grammar": greedy(72, regex=REGEX),
    "log-probabilities": greedy(72, ignore_eos=True),
    "never compressed": asked_for(enabled=False),
    "no drafter": asked_for(inner=False),
}
EACH = 3
"""Requests of a kind."""


@pytest.fixture(scope="module")
def mixed():
    """One wave of requests of all kinds by turns."""
    tokenizer, kinds = load_tokenizer(MODEL), [*KINDS] * EACH
    return {
        "prompts": record_prompts(tokenizer, spread(len(kinds), 200, 1500), 12),
        "params": [KINDS[kind] for kind in kinds],
        "more": {"return_logprob": [kind == "log-probabilities" for kind in kinds]},
    }


@pytest.fixture(scope="module")
def plain_mixed(mixed):
    return run(PLAIN, MODEL, [mixed])


@pytest.mark.parametrize(
    ("drafter", "engine", "settings"),
    [
        ("oracle", {}, {}),
        extended("oracle", SYNCHRONOUS, {"residency": "device"}),
        extended("oracle", {"page_size": 16}, ALONE),
        extended("random", {}, {}),
    ],
)
def test_requests_of_every_kind_have_proposals_unless_they_want_none(
    drafter, engine, settings, mixed, plain_mixed, tmp_path
):
    texts = informed([mixed], plain_mixed, tmp_path)
    ours = serve(drafter, [mixed], texts, engine, **settings)
    assert compare(plain_mixed, ours) == []
    assert logprob_gap(plain_mixed, ours) < GAP
    stats = [answer["vericache"] for answer in ours["waves"][0]]
    for i, kind in enumerate(KINDS):
        own = stats[i :: len(KINDS)]
        proposed = sum(each["inner_proposed"] for each in own)
        accepted = sum(each["inner_accepted"] for each in own)
        wanted = kind != "no drafter"
        assert (proposed > 0) == wanted, kind
        assert drafter == "random" or (accepted > 30) == wanted, kind
        assert kind != "never compressed" or not any(each["cycles"] for each in own)


MOVES = {"VERICACHE_TEST_RESTLESS": "1"}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("drafter", "engine", "environment"),
    [
        *((drafter, {}, MOVES) for drafter in ("oracle", "ngram", "model")),
        ("eagle3", TIGHT, RETRACTED),  # It keeps KV and hidden states of its own.
    ],
)
def test_tokens_are_identical_while_everything_moves(
    drafter, engine, environment, waves, plain, texts
):
    ours = serve(drafter, waves[:1], texts, engine, environment)
    assert compare({"waves": plain["waves"][:1]}, ours) == []


DETERMINISTIC = {"enable_deterministic_inference": True}


@pytest.fixture(scope="module")
def seeded(waves):
    """Return a wave of seeded requests, and what plain SGLang answers."""
    prompts = waves[0]["prompts"]
    params = [{**SEEDED, "sampling_seed": i} for i in range(len(prompts))]
    wave = {"prompts": prompts, "params": params}
    plain = described("plain SGLang", None, DETERMINISTIC)
    return wave, run(plain, MODEL, [wave])


@pytest.mark.extended
@pytest.mark.parametrize("drafter", ["random", "model", "eagle3"])
def test_seeded_requests_say_what_they_say_without_a_drafter(drafter, seeded, texts):
    wave, plain = seeded
    ours = serve(drafter, [wave], texts, DETERMINISTIC)
    assert compare(plain, ours) == []
    assert ours["state"]["cycles"] > 0


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "kept", "message"),
    [
        ("d2t", slice(300), "d2t lists 300 of the head's 320 tokens"),
        ("fc.weight", (slice(None), slice(256)), "do not fit their config.json"),
    ],
)
def test_a_head_with_other_shapes_is_refused_at_start(name, kept, message, tmp_path):
    weights = load_file(HEAD / "model.safetensors")
    weights[name] = weights[name][kept].contiguous()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    shutil.copy(HEAD / "config.json", tmp_path)
    engine = {"speculative_draft_model_path": str(tmp_path)}
    with pytest.raises(ServerError, match=message):
        run(system("eagle3", engine=engine, inner="eagle3"), MODEL, [])


@pytest.mark.parametrize("engine", [{}, extended(SYNCHRONOUS)])
def test_a_drafter_that_raises_is_switched_off(engine, waves, plain, texts):
    ours = serve("raising", waves, texts, engine)
    assert compare(plain, ours) == []
    assert ours["state"]["inner_errors"] == 1
    assert ours["state"]["reprefills"] == 0
