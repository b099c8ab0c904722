"""The launcher: which arguments are ours, what it adds, how it says no."""

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from live_server import fork

from vericache_sglang.config.files import ENV, OFF, active_config
from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.errors import ConfigError, UnsupportedError
from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops
from vericache_sglang.serving import launch, refused_flags
from vericache_sglang.serving.launch import complete, given_fields, split_arguments

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "configs" / "demo-model")
CPU = "--device cpu --attention-backend vericache --dtype float32"
CPU += " --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled"
CPU += " --max-total-tokens 131072 --max-running-requests 64"
ON = "--speculative-algorithm VERICACHE"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.delenv(ENV, raising=False)
    active_config.cache_clear()
    yield
    active_config.cache_clear()


def test_ours_are_taken_out_and_the_rest_is_left_in_order():
    config, rest = split_arguments(
        ["--model-path", "m", "--vericache-keep", "0.5", "--port", "1", "--tp=2"]
    )
    assert config == VeriCacheConfig(keep=0.5)
    assert rest == ["--model-path", "m", "--port", "1", "--tp=2"]


def test_a_flag_may_carry_its_value_after_an_equals_sign():
    config, rest = split_arguments(["--vericache-draft-length=8"])
    assert config == VeriCacheConfig(draft_length=8)
    assert rest == []


def test_flags_win_over_the_settings_file(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("keep: 0.5\nseed: 3\n")
    config, rest = split_arguments(
        ["--vericache-keep", "0.125", "--vericache-config", str(path)]
    )
    assert config == VeriCacheConfig(keep=0.125, seed=3)
    assert rest == []


def test_vericache_can_be_switched_off():
    assert split_arguments(["--disable-vericache", "--port", "1"]) == (
        None,
        ["--port", "1"],
    )


def test_the_environment_can_switch_it_off_and_flags_on_again(monkeypatch):
    monkeypatch.setenv(ENV, OFF)
    assert split_arguments([]) == (None, [])
    assert split_arguments(["--vericache-keep", "1"])[0] == VeriCacheConfig(keep=1)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--vericache-keeep", "3"], "did you mean --vericache-keep?"),
        (["--vericache-keeep=3"], "did you mean --vericache-keep?"),
        (["--vericache-draft-len", "3"], "did you mean --vericache-draft-length?"),
        (["--vericache-x" * 9], "known: --vericache-config, --vericache-compressor"),
    ],
)
def test_misspelled_and_shortened_flags_are_refused(words, hint):
    with pytest.raises(ConfigError, match="unknown flag") as caught:
        split_arguments(words)
    assert f"unknown flag {words[0]}; {hint}" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "enabled", "cuda", "added"),
    [
        ({}, True, False, f"{CPU} {ON}"),
        ({}, False, False, CPU),
        ({}, True, True, ON),
        ({}, False, True, ""),
        ({"device": "cuda"}, True, False, ON),
        (
            {
                "device": "cpu",
                "dtype": "bfloat16",
                "disable_cuda_graph": True,
                "mem_fraction_static": 0.5,
            },
            False,
            True,
            "--attention-backend vericache --max-running-requests 64",
        ),
        ({"speculative_algorithm": "VERICACHE"}, True, True, ""),
    ],
)
def test_only_what_the_user_left_out_is_added(given, enabled, cuda, added):
    words = complete(["--x"], given, enabled=enabled, cuda=cuda)
    assert words == ["--x", *added.split()]


@pytest.mark.parametrize(
    "field",
    ["speculative_num_steps", "speculative_num_draft_tokens", "speculative_eagle_topk"],
)
def test_what_our_flags_decide_cannot_be_set_by_sglangs(field):
    with pytest.raises(UnsupportedError, match="--vericache-draft-length"):
        complete([], {field: 4}, enabled=True, cuda=True)


@pytest.mark.sglang
def test_what_is_added_are_flags_of_sglang():
    define_missing_ops()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    words = [*CPU.split(), *ON.split()]
    known = {action.dest for action in parser._actions}
    assert {word for word in words if word.startswith("--")} <= set(
        parser._option_string_actions
    )
    assert {*launch.CPU_DEFAULTS, *launch.OWNED_FLAGS} <= known


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("argv", "fields"),
    [
        (["--device=cpu", "--dtype", "bfloat16"], {"device", "dtype"}),
        (["--chunked-prefill-s", "64"], {"chunked_prefill_size"}),
        ([], set()),
    ],
    ids=["both-spellings", "abbreviation", "nothing"],
)
def test_sglangs_own_parser_tells_what_was_given(argv, fields):
    define_missing_ops()
    given = given_fields(["--model-path", "m", *argv])
    assert set(given) - {"model_path"} == fields


def test_a_wrong_setting_ends_with_status_2_and_its_flag(capsys):
    assert launch.main(["--model-path", "m", "--vericache-keep", "2"]) == 2
    assert "--vericache-keep" in capsys.readouterr().err


def test_settings_reach_the_environment_before_sglang_is_touched(monkeypatch):
    def stop():
        raise UnsupportedError(os.environ[ENV])

    monkeypatch.setattr(launch, "check_sglang_version", stop)
    monkeypatch.setenv(ENV, "")
    assert launch.main(["--vericache-draft-length", "8"]) == 2
    assert json.loads(os.environ[ENV])["draft_length"] == 8
    assert launch.main(["--disable-vericache"]) == 2
    assert os.environ[ENV] == OFF


@pytest.fixture
def start(tmp_path):
    """Return a function that runs a module, the launcher, to its end in a fork."""

    def run(*argv, module="vericache_sglang.launch_server"):
        log = tmp_path / "log"
        paths = os.pathsep.join([str(tmp_path), *sys.path])
        command = [sys.executable, "-m", module, *argv]
        status = fork(command, {"PYTHONPATH": paths}, log).wait(120)
        return status, log.read_text()

    return run


@pytest.mark.sglang
def test_help_shows_our_flags_and_sglangs(start):
    status, shown = start("--help")
    assert status == 0, shown
    for word in ("--vericache-keep", "--disable-vericache", "--tensor-parallel-size"):
        assert word in shown


@pytest.mark.parametrize(
    ("host", "key", "warns"),
    [
        ("127.0.0.1", None, False),
        ("127.8.0.1", None, False),
        ("::1", None, False),
        ("[::1]", None, False),
        ("localhost", None, False),
        ("0.0.0.0", None, True),
        ("::", None, True),
        ("192.168.0.7", None, True),
        ("server.example", None, True),
        ("0.0.0.0", "", True),
        ("0.0.0.0", "key", False),
    ],
)
def test_a_server_is_open_beyond_its_machine_without_a_key(host, key, warns):
    assert launch.is_open(host, key) is warns


@pytest.mark.sglang
@pytest.mark.parametrize(("key", "warned"), [((), 1), (("--api-key", "k"), 0)])
def test_the_start_of_an_open_server_warns(start, tmp_path, key, warned):
    (tmp_path / "ready.py").write_text(
        "from vericache_sglang.serving import launch\n"
        "launch._run = lambda args: None\n"
        "raise SystemExit(launch.main())\n"
    )
    argv = ("--model-path", MODEL, "--host", "0.0.0.0", *key)
    status, shown = start(*argv, module="ready")
    assert status == 0, shown
    assert shown.count("VeriCache: compressor=") == 1
    assert shown.count("VeriCache: warning: whoever reaches 0.0.0.0:") == warned


WINDOW = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 1024,
}


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("argv", "config", "named"),
    [
        (("--pp-size", "2"), {}, "--pp-size"),
        (("--speculative-algorithm", "EAGLE"), {}, "--speculative-algorithm"),
        ((), WINDOW, "sliding-window"),
    ],
    ids=["flag", "algorithm", "model"],
)
def test_what_is_refused_keeps_the_server_from_starting(
    start, tmp_path, argv, config, named
):
    config = json.loads(Path(MODEL, "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, shown = start("--model-path", str(tmp_path), *argv)
    assert status == 2
    assert "vericache: error:" in shown
    assert named in shown
    assert "Traceback" not in shown


@pytest.mark.sglang
def test_the_names_in_the_tables_are_the_registered_ones():
    define_missing_ops()
    from vericache_sglang.attention import layer as attention_layer
    from vericache_sglang.runtime import algorithm

    assert algorithm.NAME == refused_flags.ALGORITHM
    assert attention_layer.BACKEND_NAME == refused_flags.BACKEND


@pytest.mark.parametrize("workers", [1, 2])
def test_several_tokenizer_processes_are_told_what_they_lack(
    monkeypatch, capsys, workers
):
    """The launcher extends its own process's application; others import theirs."""
    define_missing_ops()
    from sglang import launch_server
    from sglang.srt import utils
    from sglang.srt.entrypoints import http_server

    served, router = [], http_server.app.router
    before = router.lifespan_context
    monkeypatch.setattr(launch_server, "run_server", served.append)
    monkeypatch.setattr(utils, "kill_process_tree", lambda *args, **kwargs: None)
    monkeypatch.setattr(router, "lifespan_context", before)
    arguments = SimpleNamespace(tokenizer_worker_num=workers)
    launch._run(arguments)
    assert served == [arguments]
    assert (router.lifespan_context is before) is (workers > 1)
    assert ("--tokenizer-worker-num 1" in capsys.readouterr().err) is (workers > 1)
