"""The command against live servers of the demo model: two honest, two altered."""

import json

import pytest
from live_server import MODEL, LiveServer

from vericache_sglang.evaluation import altered
from vericache_sglang.evaluation.command import main

pytestmark = [pytest.mark.server, pytest.mark.extended]

SHARED = ("--max-total-tokens", "20000")
DRAFTING = ("--vericache-min-prompt", "64", "--vericache-keep", "0.125")
HOST = ("--vericache-residency", "host")
LOAD = [
    *("--model", str(MODEL), "--count", "3", "--context", "500", "900"),
    *("--output", "48", "--concurrency", "3"),
]


DICE = altered.simulated(0.5)


def altered_server(folder, alteration):
    folder.mkdir()
    environment = altered.environment(folder, alteration)
    return LiveServer(folder, *SHARED, *DRAFTING, *HOST, environment=environment)


class Servers(dict):
    """The URL of each server, by the name of the system it is; started when asked."""

    def __init__(self, folder):
        self.folder, self.started = folder, []

    def __missing__(self, name):
        server = {
            "plain": lambda: LiveServer(self.folder, "--disable-vericache", *SHARED),
            "vericache": lambda: LiveServer(self.folder, *SHARED, *DRAFTING, *HOST),
            "lossy": lambda: altered_server(self.folder / "lossy", altered.LOSSY),
            "dice": lambda: altered_server(
                self.folder / "dice", altered.simulated(0.5)
            ),
        }[name]()
        self.started.append(server)
        self[name] = server.wait().url
        return self[name]


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    servers = Servers(tmp_path_factory.mktemp("bench"))
    try:
        yield servers
    finally:
        for server in servers.started:
            server.close()


def bench(urls, folder, names, *flags):
    """Run the command; ``names`` are system -> server. Returns status and report."""
    given = [f"--base-url={name}={urls[server]}" for name, server in names.items()]
    words = [*LOAD, "--systems", ",".join(names), *given, "--out", str(folder), *flags]
    return main(words), json.loads((folder / "bench.json").read_text())


def test_three_systems_take_turns(urls, tmp_path, capsys):
    names = {name: name for name in ("plain", "vericache", "lossy")}
    more = ("--repeats", "1", "--rates", "4", "--kl-requests", "2")
    status, report = bench(urls, tmp_path, names, *more)
    assert status == 0, capsys.readouterr()
    systems = report["systems"]
    for row in systems.values():
        assert row["failed_requests"] == 0
        assert [each["output_tokens"] for each in row["rounds"]] == [3 * 48]
        # Prompts are computed in every pass: only a document's beginning is shared.
        for each in row["rounds"]:
            assert each["cached_prompt_tokens"] < 0.2 * each["prompt_tokens"]
        assert [each["rate"] for each in row["open_loop"]] == [4.0]
    assert systems["vericache"]["mismatches"] == 0
    # The server's counters and what it tells with each answer are the same sums.
    counted = [each["counters"] for each in systems["vericache"]["rounds"]]
    told = systems["vericache"]["accepted"]
    assert told["n"] == sum(each["cycles"] for each in counted) > 6
    accepted = sum(each["accepted"] for each in counted)
    assert told["mean"] * told["n"] == pytest.approx(accepted)
    assert systems["vericache"]["moved_bytes_per_token"] > 0
    assert 0 < systems["vericache"]["link_share"] < 1
    assert systems["plain"]["accepted_per_verify"] is None
    lossy = systems["lossy"]
    assert lossy["mismatches"] > 0
    for each in lossy["rounds"]:
        assert each["counters"]["verify_rows"] == 0
        assert each["counters"]["staged_bytes"] == 0
        assert each["counters"]["draft_rows"] > 100
    assert lossy["divergence"]["positions"] == 2 * 47
    assert lossy["divergence"]["nats_per_token"] > 1e-3
    assert 0.5 < lossy["divergence"]["same_argmax"] < 1
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "| vericache " in (tmp_path / "bench.md").read_text()
    assert report["label"] == ""


def test_simulated_acceptance_comes_out_as_asked(urls, tmp_path):
    names = {"plain": "plain", "vericache": "dice"}
    flags = ("--repeats", "1", "--simulated-acceptance", "0.5")
    status, report = bench(urls, tmp_path, names, *flags)
    assert status == 0
    row = report["systems"]["vericache"]
    cycles = row["rounds"][0]["counters"]["cycles"]
    assert cycles > 30
    # At most 1 draft of 2 on the average, whatever the model says of them.
    assert 0.3 < row["accepted_per_verify"] < 1.5
    assert row["mismatches"] is None
    assert report["label"].startswith("SIMULATED ACCEPTANCE")


@pytest.mark.parametrize(
    ("name", "url", "flags"),
    [
        ("vericache", "lossy", ()),
        ("lossy", "vericache", ()),
        ("vericache", "vericache", ("--simulated-acceptance", "0.5")),
        ("plain", "dice", ()),
    ],
)
def test_a_server_that_is_not_what_its_label_says_is_left_out(
    urls, tmp_path, name, url, flags
):
    status, report = bench(urls, tmp_path, {name: url}, *flags)
    assert status == 1
    assert "altered" in report["systems"][name]["skipped"]
    assert report["systems"][name]["tokens_per_s"] is None


def test_a_server_that_does_not_answer_is_left_out(urls, tmp_path):
    there = {"vericache": urls["vericache"], "gone": "http://127.0.0.1:9"}
    names = {"vericache": "vericache", "sparse": "gone"}
    status, report = bench(there, tmp_path, names, "--repeats", "1")
    assert status == 1
    assert "does not answer" in report["systems"]["sparse"]["skipped"]
    vericache = report["systems"]["vericache"]
    assert vericache["tokens_per_s"]["median"] > 0
    assert vericache["ratio"] is None  # without plain there is nothing to compare
    assert vericache["mismatches"] is None
