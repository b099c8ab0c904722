"""``python -m vericache_sglang.plan``: report, files, refusals."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vericache_sglang.config.files import load_config
from vericache_sglang.plan import main

ROOT = Path(__file__).parents[2]
QWEN = ["--model", "qwen3-32b", "--gpu", "rtx-pro-6000"]
LONG = [*QWEN, "--context", "24000", "--output", "512"]


@pytest.fixture
def run(capsys):
    def call(*arguments):
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return call


def test_report_names_settings_speed_limits_and_memory(run):
    status, out, err = run(*LONG)
    assert (status, err) == (0, "")
    for words in (
        "VeriCache, expected 2.",
        "--vericache-keep 0.",
        "--vericache-draft-length ",
        "--vericache-staging-tokens ",
        "--vericache-host-gb ",
        "Binds: ",
        "Bound: ",
        "full KV:   3 requests of ",
        "Assumed: acceptance of Qwen-32B",
    ):
        assert words in out


def test_saved_settings_are_the_printed_ones(run, tmp_path):
    path = tmp_path / "planned.yaml"
    status, out, _ = run(*LONG, "--keep", "0.2", "--save", path)
    assert status == 0
    config = load_config(path, {})
    assert config.keep == 0.2
    assert f"--vericache-draft-length {config.draft_length} " in out
    assert f"--vericache-host-gb {config.host_gb:g}\n" in out
    assert f"Saved: {path}" in out


def test_plot_is_written(run, tmp_path):
    pytest.importorskip("matplotlib", reason="only --plot needs it")
    path = tmp_path / "curve.png"
    status, out, _ = run(*LONG, "--keep", "0.2", "0.3", "--plot", path)
    assert (status, f"Drawn: {path}" in out) == (0, True)
    assert path.read_bytes()[:4] == b"\x89PNG"


REMOTE = ["--model", "mistral-small-24b", "--gpu", "rtx-pro-6000", "--remote", "1:4"]


def test_remote_pools_are_planned_and_both_sweeps_go_through_them(run, tmp_path):
    pytest.importorskip("matplotlib", reason="only --plot needs it")
    path = tmp_path / "pools.png"
    asked = [*REMOTE, "--context", "24414", "--output", "256"]
    status, out, _ = run(*asked, "--plot", path)
    assert status == 0
    assert path.read_bytes()[:4] == b"\x89PNG"
    (gain,) = re.findall(r"all six paths .* ([\d.]+)x", out)
    instances, arrival = (
        re.findall(r"([\d.]+)x", line)
        for line in out.splitlines()
        if line.startswith("over B1")
    )
    assert instances[3] == gain, "the fourth instance of the sweep is the cluster"
    assert min(map(float, instances + arrival)) >= 1
    assert max(map(float, arrival)) > float(arrival[0])
    assert out.count("(the paper: ") == 2
    assert "P1 by Eq. tp_inter" in out
    more = [*asked, "--near-gb", "80"]
    assert run(*more)[1] != out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--context", "24414"], "--output must be given"),
        (["--context", "99999999", "--output", "9"], "room for one full KV"),
        (["--context", "24414", "--output", "9", "--far-gb", "0"], "--far-gb"),
    ],
)
def test_remote_refuses_by_name(run, more, words):
    status, _, err = run(*REMOTE, *more)
    assert status == 2
    assert words in err


@pytest.mark.parametrize("pools", ["4", "0:4", "1:-1", "a:b"])
def test_pools_are_two_numbers(run, pools):
    with pytest.raises(SystemExit):
        run(*REMOTE[:-1], pools)


def test_plain_serving_is_recommended_and_not_saved(run, tmp_path):
    h200 = ["--model", "llama-3.1-8b", "--gpu", "h200"]
    slow = [*h200, "--context", "24000", "--output", "512", "--accept", "0.1"]
    status, out, _ = run(*slow)
    assert status == 0
    assert "Serve plainly" in out
    assert "nothing is prefetched" in out
    assert "--disable-vericache" in out
    status, _, err = run(*slow, "--save", tmp_path / "x.yaml")
    assert status == 2
    assert "--save" in err


def test_datasheet_rates_change_the_answer(run):
    assert run(*LONG)[1] != run(*LONG, "--datasheet")[1]
    assert "2x rtx-pro-6000" in run(*LONG, "--devices", 2)[1]
    assert "at most 2 requests" in run(*LONG, "--concurrency", 2)[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--model, --gpu, --context, --output"),
        ([*LONG, "--gpu", "h300"], "rtx-pro-6000"),
        ([*LONG, "--model", "qwen9"], "qwen3-32b"),
        ([*LONG, "--keep", "0"], "--keep"),
        ([*LONG, "--keep", "1.5"], "--keep"),
        ([*LONG, "--accept", "1.5"], "--accept"),
        ([*LONG, "--context", "0"], "--context"),
        ([*LONG, "--output", "-1"], "--output"),
        ([*LONG, "--concurrency", "0"], "--concurrency"),
        ([*LONG, "--devices", "0"], "--devices"),
        ([*LONG, "--context", "9000000"], "--context"),
        ([*LONG, "--save", "/no/such/folder/x.yaml"], "--save"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_values_name_the_flag(run, arguments, words):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert words in err


@pytest.mark.extended
def test_paper_prints_the_page_and_needs_nothing_else(run):
    stored = ROOT / "scripts" / "results" / "paper_vs_ours.md"
    assert run("--paper") == (0, stored.read_text(), "")


def test_the_page_has_the_memory_of_the_audited_deployments(run):
    status, out, _ = run("--memory")
    assert status == 0
    assert out.count("GiB") > 4 * 6
    assert out in (ROOT / "docs" / "planning.md").read_text("utf-8")


def test_module_runs_without_torch_or_sglang():
    check = (
        "import sys, vericache_sglang.plan; "
        "print(sorted({'torch', 'sglang', 'matplotlib', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0)


def test_memory_is_printed_for_the_flags_of_a_server(run):
    keep, running = ("--vericache-keep", 0.1), ("--max-running-requests", 9)
    server = ("--context", 24000, *keep, *running, "--port", 3000)
    status, out, err = run("--memory", *QWEN, *server)
    assert (status, err) == (0, "")
    for words in (
        "Device memory of qwen3-32b, 95.6 GiB a GPU: context 24000, 9 running",
        "attention backend vericache",
        "weights = weights / ranks",
        "kept = 0.1, ",
        "Not looked at: --port 3000",
    ):
        assert words in out
    assert "Too small" not in out


def test_memory_of_a_model_folder_on_a_gpu_of_so_many_gib(run, tmp_path):
    folder = ROOT / "configs" / "demo-model"
    settings = tmp_path / "settings.yaml"
    settings.write_text("draft_length: 15\n")
    flags = ["--vericache-config", settings, "--attention-backend", "fa3"]
    status, out, _ = run("--memory", "--model", folder, "--gpu", "7.5", *flags)
    assert status == 0
    assert "7.5 GiB a GPU" in out
    assert "drafts = 15, " in out
    assert "FlashAttentionBackend" in out
    assert "Too small: a GPU of 24.0" in run("--memory", *QWEN[:2], "--gpu", "24")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "qwen3-8b"], "--gpu must be given"),
        (["--model", "qwen3-8b", "--gpu", "h300"], "--gpu 'h300'"),
        ([*QWEN, "--vericache-keep", "2"], "--vericache-keep"),
    ],
)
def test_memory_refuses_by_flag(run, arguments, words):
    status, _, err = run("--memory", *arguments)
    assert status == 2
    assert words in err


def test_flags_of_a_server_are_for_memory_only(run):
    with pytest.raises(SystemExit):
        run(*LONG, "--max-running-requests", "9")
