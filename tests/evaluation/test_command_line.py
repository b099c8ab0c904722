"""Systems by name, by flags and by URL; and every wrong flag by its name."""

import sys
from pathlib import Path

import pytest

from vericache_sglang.evaluation.command import main
from vericache_sglang.evaluation.systems import (
    BUILT_IN,
    chosen_systems,
    command,
    speculation_lacks,
    weighted,
)
from vericache_sglang.serving.launch import given_fields, split_arguments

MODEL = str(Path(__file__).parents[2] / "configs" / "demo-model")


def settings_of(name, *ours):
    system = weighted(BUILT_IN[name], "m", "head")
    words = command(system, "m", 1234, ["--page-size", "4"], ours)
    assert words[:3] == [sys.executable, "-m", "vericache_sglang.launch_server"]
    config, rest = split_arguments(words[3:])
    assert rest[:8] == [
        *("--model-path", "m", "--host", "127.0.0.1", "--port", "1234"),
        *("--page-size", "4"),
    ]
    return config, rest[8:]


def test_built_in_systems_are_what_they_say_to_the_launcher():
    assert settings_of("plain") == (None, [])
    ours = ("--vericache-keep", "0.5", "--vericache-draft-length", "9")
    config, rest = settings_of("vericache", *ours)
    assert (config.residency, config.keep, config.draft_length) == ("auto", 0.5, 9)
    assert rest == []
    assert settings_of("sparse", *ours)[0].residency == "device"
    assert settings_of("lossy", *ours)[0].residency == "host"
    offload, _ = settings_of("offload", *ours)
    assert (offload.residency, offload.draft_length) == ("host", 1)


HEAD = ["--speculative-draft-model-path", "head"]


@pytest.mark.parametrize(
    ("drafter", "weights"),
    [("ngram", []), ("model", HEAD), ("eagle3", HEAD), ("mtp", [])],
)
def test_every_inner_drafter_serves_alone_and_with_vericache(drafter, weights):
    for name, least in ((f"vericache-{drafter}", 2048), (f"{drafter}-alone", 1 << 20)):
        config, rest = settings_of(name)
        assert (config.inner, config.min_prompt, rest) == (drafter, least, weights)


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ngram", "--speculative-algorithm NGRAM"),
        (
            "standalone",
            "--speculative-algorithm STANDALONE --speculative-draft-model-path head",
        ),
        (
            "eagle3",
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path head",
        ),
        ("mtp", "--speculative-algorithm EAGLE --speculative-draft-model-path m"),
    ],
)
def test_sglangs_own_drafters_are_what_its_parser_takes(name, line):
    """Its parser, and whether it knows the algorithm and what it is asked of it."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    config, rest = settings_of(f"sglang-{name}")
    assert (config, " ".join(rest)) == (None, line)
    given = given_fields(["--model-path", "m", *rest])
    algorithm = SpeculativeAlgorithm.from_string(given["speculative_algorithm"])
    assert algorithm.is_ngram() is (name == "ngram")
    assert algorithm.is_standalone() is (name == "standalone")
    assert algorithm.is_eagle3() is (name == "eagle3")
    assert algorithm.is_eagle() is (name in ("eagle3", "mtp"))


def test_shared_settings_are_not_for_systems_without_vericache():
    words = command(BUILT_IN["plain"], "m", 1, [], ["--vericache-keep", "0.5"])
    assert not [word for word in words if word.startswith("--vericache")]


def test_variants_and_urls_join_the_names():
    found = chosen_systems(
        ["plain", "mine"],
        ["short=--vericache-draft-length 4 --vericache-keep '0.5'"],
        ["mine=http://host:1/", "plain=http://host:2"],
    )
    assert [system.name for system in found] == ["plain", "mine", "short"]
    assert [system.url for system in found] == ["http://host:2", "http://host:1", ""]
    assert found[2].flags == (
        *("--vericache-draft-length", "4", "--vericache-keep", "0.5"),
    )


GIVEN = ["--systems", "a", "--base-url", "a=http://h:1"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--model is needed for systems"),
        (["--systems", "magic"], "--systems magic; known: plain"),
        (["--systems", ","], "--systems is empty"),
        (["--systems", "plain,plain"], "plain is given twice"),
        (["--system", "plain=--x"], "plain is given twice"),
        (["--system", "x"], "--system must be NAME=..."),
        (["--system", "x='open"], "--system"),
        (["--system", "../x=--y"], "letters, digits"),
        (["--base-url", "plain=nowhere"], "http://"),
        (["--base-url", "sparse=http://h:1"], "not in --systems"),
        (["--model", MODEL, "--engine", "'open"], "--engine"),
        (["--model", MODEL, "--vericache", "'open"], "--vericache"),
        (GIVEN, "--model is needed to draw prompts"),
        (["--model", MODEL, "--count", "0"], "--count must be >= 1"),
        (["--model", MODEL, "--output", "0"], "--output must be >= 1"),
        (["--model", MODEL, "--repeats", "0"], "--repeats must be >= 1"),
        (["--model", MODEL, "--context", "9", "0"], "--context must be >= 1"),
        (["--model", MODEL, "--concurrency", "0"], "--concurrency must be >= 1"),
        (["--model", MODEL, "--rates", "1", "0"], "--rates must be > 0"),
        (["--model", MODEL, "--rates", "nan"], "--rates must be > 0"),
        (["--model", MODEL, "--rates", "inf"], "--rates must be > 0"),
        (["--model", MODEL, "--kl-requests", "-1"], "--kl-requests must be >= 0"),
        (["--model", MODEL, "--top-k", "0"], "--top-k must be >= 1"),
        (["--model", MODEL, "--memory-gbps", "0"], "--memory-gbps must be > 0"),
        (["--model", MODEL, "--timeout", "0"], "--timeout must be > 0"),
        (["--model", MODEL, "--boot-seconds", "0"], "--boot-seconds must be > 0"),
        (["--model", MODEL, "--requests", "/nowhere"], "--requests /nowhere"),
        (
            ["--model", MODEL, "--requests", "x", "--random-prompts"],
            "exclude each other",
        ),
        (["--model", "/tmp"], "--requests FILE or --random-prompts"),
        (["--model", "/nowhere", "--random-prompts"], "vocab_size"),
        (
            ["--model", MODEL, "--simulated-acceptance", "1.5"],
            "--simulated-acceptance must be",
        ),
        (
            [
                *("--model", MODEL, "--systems", "plain,sglang-ngram"),
                *("--simulated-acceptance", "0.9"),
            ],
            "sglang-ngram would be measured beside simulated",
        ),
        (
            ["--model", MODEL, "--engine", "--load-format dummy"],
            "give --simulated-acceptance P",
        ),
        (
            ["--model", MODEL, "--engine=--load-format=dummy"],
            "give --simulated-acceptance P",
        ),
    ],
)
def test_a_wrong_value_names_its_flag_before_anything_starts(
    flags, named, capsys, tmp_path
):
    assert main(["--out", str(tmp_path / "out"), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert named in error


@pytest.mark.parametrize("name", ["sglang-eagle3", "vericache-eagle3", "model-alone"])
def test_a_system_without_its_weights_names_the_flag(name, capsys, tmp_path):
    flags = ["--model", MODEL, "--systems", name, "--out", str(tmp_path / "out")]
    assert main(flags) == 2
    assert f"--systems {name} needs --draft-model" in capsys.readouterr().err


@pytest.mark.skipif(not speculation_lacks(), reason="this machine lacks nothing")
def test_sglangs_own_drafters_say_what_this_machine_lacks(capsys, tmp_path):
    flags = [
        *("--model", MODEL, "--systems", "plain,sglang-eagle3"),
        *("--draft-model", MODEL, "--out", str(tmp_path / "out")),
    ]
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert f"SGLang's own speculation needs {speculation_lacks()}" in error
    assert "--base-url sglang-eagle3=URL" in error


def test_a_folder_that_cannot_be_made_is_named(capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert main(["--model", MODEL, "--out", str(file)]) == 2
    assert "--out" in capsys.readouterr().err
