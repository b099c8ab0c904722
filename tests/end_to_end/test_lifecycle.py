"""What happens to running requests when they or their server are interfered with.

Both servers have a small pool and four seats: requests queue, go to the host and are
parked. Whatever is done to them, answers are plain SGLang's and all is given back.
"""

import json
import shutil
import signal
import threading
import time

import psutil
import pytest
import torch
from live_server import MODEL, LiveServer
from safetensors.torch import load_file, save_file

from vericache_sglang.evaluation.workload import load_tokenizer

pytestmark = pytest.mark.server

HELD = ("kept_slots", "staging_slots", "host_bytes", "running")
LONG = {"max_new_tokens": 160, "ignore_eos": True}
SHORT = {"max_new_tokens": 60, "ignore_eos": True}
FLAGS = (
    *("--max-total-tokens", "3600", "--max-running-requests", "4"),
    *("--enable-priority-scheduling", "--incremental-streaming-output"),
    *("--enable-lora", "--lora-backend", "torch_native", "--max-loras-per-batch", "3"),
)
OURS = ("--vericache-min-prompt", "64", "--vericache-draft-length", "8")
PLANES = "split-planes:exponent_bits=3,mantissa_bits=1"
PLACES = {
    "on the host": ("--vericache-residency", "host"),
    "packed, on the device": (
        *("--vericache-residency", "device", "--vericache-compressor", PLANES),
    ),
}
SIZES = dict.fromkeys(("k_proj", "v_proj"), (128, 128)) | {
    "q_proj": (128, 256),
    "o_proj": (256, 128),
}
"""Inputs and outputs of the demo model's projections that the adapters change."""


def write_adapter(folder, seed):
    """Write a random adapter of rank 4 that changes the demo model's answers."""
    folder.mkdir()
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(4):
        for name, (inputs, outputs) in SIZES.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}."
            for side, shape in (("A", (4, inputs)), ("B", (outputs, 4))):
                noise = 0.2 * torch.randn(*shape, generator=draw)
                weights[f"{at}lora_{side}.weight"] = noise
    save_file(weights, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}
    about["target_modules"] = list(SIZES)
    (folder / "adapter_config.json").write_text(json.dumps(about))


def write_model(folder, changed, strength):
    """Copy the demo model with noise on the weights whose names end in ``changed``."""
    shutil.copytree(MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if name.endswith(changed):
            weight *= 1 + strength * torch.randn(weight.shape, generator=draw)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return model folders: ``all`` has other KV, ``norm`` only other answers."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "all", ".weight", 0.05)
    write_model(folder / "norm", "model.norm.weight", 0.5)
    return {name: str(folder / name) for name in ("all", "norm")}


@pytest.fixture(
    scope="module",
    params=[
        "on the host",
        pytest.param("packed, on the device", marks=pytest.mark.extended),
    ],
)
def pair(request, tmp_path_factory):
    """Return (ours, plain); these tests pause, alter and at last kill them."""
    folder = tmp_path_factory.mktemp("lifecycle")
    for seed, name in enumerate("ab"):
        write_adapter(folder / name, seed)
    paths = ("--lora-paths", *(f"{name}={folder / name}" for name in "ab"))
    both = (*FLAGS, *paths)
    servers = (
        LiveServer(folder, *OURS, *PLACES[request.param], *both),
        LiveServer(folder, "--disable-vericache", *both),
    )
    try:
        yield servers[0].wait(), servers[1].wait()
    finally:
        for server in servers:
            server.close()


@pytest.fixture(scope="module")
def wanted(pair, prompts):
    """Return plain SGLang's undisturbed answers, [6] lists of 160 tokens."""
    return ids(pair[1].generate(prompts, **LONG))


def ids(answers):
    return [answer["output_ids"] for answer in answers]


class Asked:
    """Requests of one client, on their way: they arrive together."""

    def __init__(self, server, prompts, **params):
        self.server = server
        self.cycles = server.counters()["cycles"]
        self.answers = None
        self.thread = threading.Thread(
            target=self._ask, args=(prompts, params), daemon=True
        )
        self.thread.start()

    def _ask(self, prompts, params):
        rids = [self.rid(i) for i in range(len(prompts))]
        more = {"rid": rids, **params.get("more", {})}
        self.answers = self.server.generate(prompts, **{**params, "more": more})

    def rid(self, i):
        return f"{id(self)}-{i}"

    def drafting(self, cycles=6):
        """Return these requests when so many of their drafts have been verified."""
        deadline = time.monotonic() + 120
        while self.server.counters()["cycles"] < self.cycles + cycles:
            assert time.monotonic() < deadline, "nothing is drafted"
            time.sleep(0.02)
        return self

    def result(self):
        self.thread.join(240)
        return self.answers


here = pytest.mark.parametrize("pair", ["on the host"], indirect=True)
"""For what happens outside a request's KV, wherever that is."""


def expect_nothing_held(server):
    counters = server.settle()
    assert {name: counters[name] for name in HELD} == dict.fromkeys(HELD, 0)


def test_aborted_requests_give_everything_back(pair, prompts, wanted):
    """By id, by all, while drafting or queued; the others go on."""
    ours, _ = pair
    asked = Asked(ours, prompts, **LONG).drafting()
    for i in (1, 3):
        ours.post("/abort_request", {"rid": asked.rid(i)})
    answers = asked.result()
    for i, answer in enumerate(answers):
        kind = "abort" if i in (1, 3) else "length"
        assert answer["meta_info"]["finish_reason"]["type"] == kind
        got = answer["output_ids"]
        assert got == wanted[i][: len(got)]
    asked = Asked(ours, prompts, **LONG).drafting()
    ours.post("/abort_request", {"rid": "", "abort_all": True})
    for answer in asked.result():
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    expect_nothing_held(ours)
    assert ids(ours.generate(prompts, **LONG)) == wanted


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("in_place", marks=pytest.mark.extended),
        "retract",
        pytest.param("abort", marks=pytest.mark.extended),
    ],
)
def test_paused_requests_go_on_as_if_nothing_was(pair, prompts, wanted, mode):
    ours, _ = pair
    asked = Asked(ours, prompts, **LONG).drafting()
    ours.post("/pause_generation", {"mode": mode})
    running = ours.counters()["running"]
    assert bool(running) == (mode == "in_place")
    time.sleep(0.2)
    assert ours.counters()["running"] == running
    ours.post("/continue_generation", {})
    got = ids(asked.result())
    lengths = [len(tokens) if mode == "abort" else 160 for tokens in got]
    assert got == [w[:n] for w, n in zip(wanted, lengths, strict=True)]
    expect_nothing_held(ours)


@pytest.mark.extended
def test_requests_aborted_while_they_are_paused(pair, prompts, wanted):
    ours, _ = pair
    for mode in ("in_place", "retract"):
        asked = Asked(ours, prompts, **LONG).drafting()
        ours.post("/pause_generation", {"mode": mode})
        ours.post("/abort_request", {"rid": "", "abort_all": True})
        ours.post("/continue_generation", {})
        for answer, w in zip(asked.result(), wanted, strict=True):
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            assert answer["output_ids"] == w[: len(answer["output_ids"])]
        expect_nothing_held(ours)


@pytest.mark.extended
def test_preempted_requests_end_with_the_same_tokens(pair, prompts, wanted):
    """Urgent requests take the seats of drafting ones, of which one may have ended."""
    ours, _ = pair
    low = Asked(ours, prompts[:4], **LONG, more={"priority": 0}).drafting()
    high = Asked(ours, prompts[4:], **LONG, more={"priority": 100})
    answers = low.result()
    assert ids(high.result()) == wanted[4:]
    assert ids(answers) == wanted[:4]
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) >= 1
    expect_nothing_held(ours)


def update(server, model, **options):
    reply = server.post("/update_weights_from_disk", {"model_path": model, **options})
    assert reply["success"]


@pytest.fixture
def own_weights(pair):
    """Give both servers the demo model back."""
    yield
    for server in pair:
        update(server, str(MODEL))


@here
@pytest.mark.extended
@pytest.mark.usefixtures("own_weights")
def test_new_weights_forget_all_kv(pair, prompts, wanted, models):
    """The update waits for what runs; then no kept part or complement is left."""
    ours, plain = pair
    asked = Asked(ours, prompts, **LONG).drafting()
    update(ours, models["all"])
    assert ids(asked.result()) == wanted
    expect_nothing_held(ours)
    update(plain, models["all"])
    got, other = (ids(server.generate(prompts, **LONG)) for server in pair)
    assert got == other
    assert got != wanted


@here
@pytest.mark.extended
@pytest.mark.usefixtures("own_weights")
@pytest.mark.parametrize(
    "case",
    [("retract", "all", True), ("in_place", "norm", False)],
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def test_weights_changed_while_requests_are_paused(pair, prompts, wanted, models, case):
    """Up to the pause the old model answers, from there on the new one.

    The model ``norm`` has the old one's KV, so requests that keep theirs are compared
    too; with it plain SGLang can be asked how an answer would have gone on.
    """
    (ours, plain), (mode, name, flush) = pair, case
    asked = Asked(ours, prompts[:4], **LONG).drafting()
    ours.post("/pause_generation", {"mode": mode})
    update(ours, models[name], flush_cache=flush)
    ours.post("/continue_generation", {})
    answers = ids(asked.result())
    expect_nothing_held(ours)
    update(plain, models[name])
    tokenizer = load_tokenizer(MODEL)
    sampling = {"temperature": 0.0, "ignore_eos": True}
    changed = 0
    for prompt, got, old in zip(prompts, answers, wanted, strict=False):
        same = next((i for i in range(160) if got[i] != old[i]), 160)
        if same < 160:
            body = {"input_ids": tokenizer.encode(prompt) + got[:same]}
            body["sampling_params"] = {**sampling, "max_new_tokens": 160 - same}
            assert plain.post("/generate", body)["output_ids"] == got[same:]
            changed += 1
    assert changed, "no request saw the new weights"


@here
@pytest.mark.extended
def test_memory_released_and_resumed(pair, prompts, wanted):
    """On a CPU nothing is given back but the caches, as on plain SGLang."""
    for server in pair:
        assert server.post("/release_memory_occupation", {}) == b"null"
        assert server.post("/resume_memory_occupation", {}) == b"null"
    again = pair[0].generate(prompts, **LONG)
    assert ids(again) == wanted
    assert again[0]["meta_info"]["cached_tokens"] == 0


@here
def test_adapters_draft_for_themselves(pair, prompts, wanted):
    """Requests with different adapters, and with none, share forwards and seats."""
    ours, _ = pair
    names = ["a", "b", None, "a", None, "b"]
    rounds = ours.counters()["cycles"]
    answers = [
        ids(server.generate(prompts, **SHORT, more={"lora_path": names}))
        for server in pair
    ]
    assert answers[0] == answers[1]
    assert ours.counters()["cycles"] > rounds + 20
    plainly = [a == w[:60] for a, w in zip(answers[0], wanted, strict=True)]
    assert plainly == [name is None for name in names]
    expect_nothing_held(ours)


@here
def test_a_dead_scheduler_takes_the_server_down(pair):
    """The last test: it leaves nothing to ask."""
    codes = []
    for server in pair:
        family = psutil.Process(server.process.pid).children(recursive=True)
        # SGLang starts the scheduler before the detokenizer.
        scheduler, _ = sorted(family, key=lambda process: process.create_time())
        scheduler.send_signal(signal.SIGKILL)
        codes.append(server.process.wait(60))
        _, alive = psutil.wait_procs(family, timeout=60)
        assert alive == []
    assert codes[0] == codes[1] != 0
