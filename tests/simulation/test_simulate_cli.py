"""The command line: tables, files, labels and errors that name the flag."""

import json

import pytest

from vericache_sglang.simulate import main
from vericache_sglang.simulation.policies import policies
from vericache_sglang.simulation.presets import PRESETS, costs_of

QUICK = ["--requests", "6", "--output", "40", "--context", "8000"]


def test_every_policy_has_its_row_and_everything_says_simulated(tmp_path, capsys):
    json_file, page = tmp_path / "s.json", tmp_path / "s.md"
    flags = ["--json", str(json_file), "--markdown", str(page), "--share", "2"]
    assert main([*QUICK, *flags]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("SIMULATED")
    assert "python -m vericache_sglang.simulate --requests 6" in printed
    names = list(policies(0.25))
    found = json.loads(json_file.read_text())
    (preset,) = found["presets"].values()
    assert found["label"].startswith("SIMULATED")
    assert found["provenance"]["command"] in printed
    assert [row["name"] for row in preset["policies"]] == names
    assert preset["assumptions"]["context"] == [8000]
    for row in preset["policies"]:
        assert row["result"]["tokens_per_s"] > 0
        assert row["result"]["finished"] >= 6
    for text in (printed, page.read_text()):
        assert all(f"| {name} " in text for name in names)
    assert page.read_text().count("SIMULATED") >= 2


def test_presets_can_be_listed_and_the_link_be_set(capsys):
    flags = ["--preset", "all", "--policies", "full-kv,staggered", "--link", "40"]
    assert main([*QUICK, *flags]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name}\n" in printed for name in PRESETS)
    assert "lock-step" not in printed


def test_a_preset_is_the_papers_machine():
    costs = costs_of(PRESETS["llama-70b-2xh100-nvl"], 64.0, 0.001)
    assert costs.link_bytes_per_s == 2 * 64e9
    assert costs.token_bytes == 2 * 80 * 8 * 128 * 2
    assert costs.weight_bytes == pytest.approx(141e9, rel=0.01)
    assert costs.flops_per_product == 4 * 64 * 128 * 80
    # 90 % of 2 x 94 GB without the weights.
    assert costs.slots * costs.token_bytes == pytest.approx(28.1e9, rel=0.01)


def test_a_plot_is_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "s.png"
    flags = ["--policies", "staggered", "--plot", str(file), "--plot-seconds", "1"]
    assert main([*QUICK, *flags]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert 10_000 < file.stat().st_size < 1_000_000


def test_a_trace_is_played(tmp_path, capsys):
    file = tmp_path / "trace.jsonl"
    line = '{"arrival_s": 0.1, "prompt_tokens": 500, "output_tokens": 9, "p": 1}\n'
    file.write_text(3 * line)
    assert main(["--trace", str(file), "--policies", "full-kv"]) == 0
    assert "| full-kv |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--preset", "tpu"], "--preset tpu; known: mistral-24b"),
        (["--preset", ","], "--preset is empty"),
        (["--policies", "magic"], "--policies magic; known: full-kv"),
        (["--policies", ""], "--policies is empty"),
        (["--link", "0"], "--link"),
        (["--overhead-ms", "-1"], "--overhead-ms"),
        (["--keep", "1"], "--keep"),
        (["--accept", "2"], "--accept"),
        (["--accept-spread", "-1"], "--accept-spread"),
        (["--planes-accept", "-1"], "--planes-accept"),
        (["--context", "0"], "--context"),
        (["--context", "9000000", "--requests", "1"], "--context"),
        (["--output", "0"], "--output"),
        (["--requests", "0"], "--requests"),
        (["--concurrency", "0"], "--concurrency"),
        (["--rate", "-2"], "--rate"),
        (["--share", "0"], "--share"),
        (["--draft-length", "0"], "--draft-length"),
        (["--max-verifies", "0"], "--max-verifies"),
        (["--staged", "-1"], "--staged"),
        (["--reserve", "2"], "--reserve"),
        (["--host-gb", "-1"], "--host-gb"),
        (["--trace", "/nowhere"], "--trace"),
        ([*QUICK, "--policies", "full-kv", "--json", "/nowhere/x"], "--json"),
        ([*QUICK, "--policies", "full-kv", "--markdown", "/nowhere/x"], "--markdown"),
    ],
)
def test_a_wrong_value_names_its_flag(flags, named, capsys):
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert named in error
