"""What the parts of the GPU command ask for, and how they judge answers."""

import argparse
import json
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from gpu.check import (
    Context,
    NotMetError,
    backend_flags,
    first_difference,
    shared_flags,
)
from gpu.parts import boot, lossless, throughput
from vericache_sglang.evaluation.options import check, draw_requests, parser
from vericache_sglang.evaluation.server import Server
from vericache_sglang.planning.models import read_model
from vericache_sglang.serving.launch import split_arguments


def context(tmp_path, device="cuda", fa3=True, carried=False):
    stack = {"device": "x", "name": "y", "carried": carried}
    stack["fa3_error"] = "" if fa3 else "ImportError"
    return Context(
        device=device,
        out=str(tmp_path),
        site=str(tmp_path / "site"),
        engine=["--cuda-graph-max-bs-decode", "8"],
        stack=stack,
        argv=[],
        source="",
    )


@pytest.fixture(scope="module")
def sglang_parser():
    from sglang.srt.server_args import ServerArgs

    made = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    ServerArgs.add_cli_args(made)
    return made


@pytest.mark.parametrize(
    ("given", "plain", "drafts", "codec"),
    [
        ({"device": "cpu", "fa3": False}, [], [], []),
        ({"fa3": True}, [], [], ["vericache"]),
        ({"fa3": False}, ["triton"], ["vericache"], ["vericache"]),
    ],
    ids=["cpu", "FA3", "no FA3"],
)
def test_defaults_serve_wherever_they_can(tmp_path, given, plain, drafts, codec):
    here = context(tmp_path, **given)
    assert backend_flags(here, drafts=False)[1:] == plain
    assert backend_flags(here, drafts=True)[1:] == drafts
    assert backend_flags(here, drafts=True, own=True)[1:] == codec


@pytest.mark.parametrize("fa3", [True, False])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_sglang_and_vericache_take_every_flag(tmp_path, sglang_parser, device, fa3):
    from vericache_sglang.attention.registry import register

    register()  # its name among SGLang's choices, as in a server
    here = context(tmp_path, device, fa3, carried=not fa3)
    lines = [boot.flags(here, one.name) for one in boot.checks(here)]
    rows = [lossless.ROWS[one.name] for one in lossless.checks(here)]
    lines += [lossless.flags(here, row) for row in rows]
    for flags in lines:
        given = ["--model-path", "x", *shared_flags(here), *flags]
        settings, rest = split_arguments(given)
        assert (settings is None) == ("--disable-vericache" in flags)
        sglang_parser.parse_args(rest)


def test_tokens_are_judged_by_plain_sglang_with_the_same_attention(tmp_path):
    def references(**given):
        here = context(tmp_path, **given)
        names = [one.name for one in lossless.checks(here)]
        found = {name: lossless.reference(here, lossless.ROWS[name]) for name in names}
        pairs = [(names.index(right), n) for n, right in found.items() if right]
        assert all(at < names.index(name) for at, name in pairs)
        return found

    fast, slow = references(fa3=True), references(fa3=False)
    assert (fast["planes"], slow["planes"]) == ("plain-own", "plain")
    assert fast["snapkv-host"] == slow["snapkv-host"] == "plain"
    assert fast["snapkv-default"] == "plain-default"
    assert not any(fast[name] for name in fast if name.startswith("plain"))


@pytest.mark.parametrize(
    ("wanted", "got", "at"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None)],
)
def test_answers_are_compared_token_by_token(wanted, got, at):
    assert first_difference(wanted, tuple(got)) == at


def test_tokens_behind_a_difference_are_counted():
    wanted = [[1, 2, 3], [4, 5, 6], [7]]
    assert lossless.differing(wanted, wanted) == "0 of 7"
    assert lossless.differing(wanted, [[1, 9, 3], [4, 5, 6], [7, 8]]) == "3 of 7"


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([5, 6, 7], "yes"),
        ([5, 9, 9], "up to a near tie at token 1 of 3, margin 0.20"),
        ([5, 6, 1], "no: token 2 of 3, margin 9.00, [1] for [7]"),
        ([1, 6, 7], "no: token 0 of 3, margin 4.00, [1, 6, 7] for [5, 6, 7]"),
    ],
)
def test_a_near_tie_is_no_wrong_answer(ids, said):
    right = {"ids": [5, 6, 7], "margins": [4.0, 0.2, 9.0]}
    assert boot.compared(right, ids) == said


# -- throughput ----------------------------------------------------------------


@pytest.mark.parametrize("name", throughput.SYSTEMS)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_benchmark_takes_the_command_line_and_labels_it(tmp_path, device, name):
    here = context(tmp_path, device)
    model = throughput.random_model(tmp_path / "model")
    load = throughput.LOADS[device][-1]
    words = throughput.words(here, tmp_path, model, name, load)
    options = parser().parse_args(words)
    (system,) = check(options)
    assert system.has_vericache == (name != "plain")
    assert ("dummy" in options.engine) == (device == "cuda")
    requests = draw_requests(options)
    assert len(requests) == load[0]
    assert {len(request.prompt) for request in requests} == {load[1]}
    split_arguments([*system.flags])
    for one in throughput.checks(here):
        assert one.about.startswith("SIMULATED ACCEPTANCE, p = 0.97")


def test_the_random_model_has_qwen3_8bs_shape(tmp_path):
    from transformers import AutoConfig

    folder = throughput.random_model(tmp_path / "model")
    assert not list(folder.glob("*.safetensors"))
    shape = read_model(folder)
    assert shape.kv_bytes_per_token == 147456
    assert 16.3e9 < shape.weight_bytes < 16.5e9
    config = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.vocab_size) == ("qwen3", 151936)
    most = max(sum(load[1:]) for load in throughput.LOADS["cuda"])
    assert config.max_position_embeddings >= most


def figures(rate, **counters):
    return {
        "decode_tokens_per_s": rate,
        "tokens_per_s": 40.0,
        "accepted_per_verify": 20.4 if counters else None,
        "counters": counters,
    }


def test_a_row_has_the_ratio_to_plain_and_how_much_was_drafted():
    plain = [figures(rate) for rate in (400.0, 390.0, 410.0)]
    counted = {"plain_rows": 1, "draft_rows": 18, "verify_rows": 1}
    ours = [figures(rate, **counted) for rate in (100.0, 900.0, 910.0)]
    assert throughput.cells(ours, plain) == {
        "decode tokens/s": "100 900 910",
        "x plain": "2.25",
        "tokens/s": "40",
        "accepted a cycle": "20.4",
        "rows drafting": "95%",
    }
    assert throughput.cells(plain, plain)["x plain"] == "1.00"
    alone = throughput.cells([figures(None)], None)
    assert (alone["decode tokens/s"], alone["x plain"]) == ("-", "-")


# -- boot ----------------------------------------------------------------------

ANSWER = {
    "output_ids": [7] * boot.OUTPUT,
    "meta_info": {"prompt_tokens": 600, "cached_tokens": 500},
}


class Stub(BaseHTTPRequestHandler):
    """Answers short prompts; does not answer long ones."""

    def do_GET(self):
        self.reply({"internal_states": [{"vericache": {"cycles": 0}}]})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if len(json.loads(body)["text"]) > 3000:
            time.sleep(20)
        self.reply(ANSWER)

    def reply(self, content):
        self.send_response(200)
        self.end_headers()
        with suppress(BrokenPipeError):
            self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_):
        pass


def test_a_question_that_is_not_answered_does_not_stop_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(boot, "ANSWER_SECONDS", 12)
    started = []

    class Up(Server):
        def close(self):
            started.append("closed")

    def serve(model, flags):
        stub = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
        threading.Thread(target=stub.serve_forever, daemon=True).start()
        started.append(stub.server_port)
        return Up(f"http://127.0.0.1:{stub.server_port}")

    job = SimpleNamespace(
        context=context(tmp_path, "cpu", fa3=False),
        log=tmp_path / "server.log",
        figures={},
        serve=serve,
        found=lambda name, key: None,
    )
    job.log.write_text("one\nCUDAError: illegal address\ntwo\n")
    with pytest.raises(NotMetError) as told:
        boot.asked(job, name="default")
    first, *more = str(told.value).splitlines()
    assert first.startswith("long prompt: ")
    assert first.endswith("no answer after 12 s")
    assert more == ["one", "CUDAError: illegal address"]
    rows = [(row["asked"], row["result"]) for row in job.figures["rows"]]
    assert rows == [
        ("short prompt", "ok"),
        ("long prompt", "failed"),
        ("prefix hit", "ok"),
    ]
    assert [*map(type, started)] == [int, str, int]
