"""Through the CUDA graphs of a GPU server: SGLang's runner, ours, and real requests.

The servers run on the CPU and play what a graph does (``played_graphs.py`` of the
faults): capture, padding, static buffers, replays and their results are as on a GPU,
under HTTP, overlap and chunked prefill. Answers must be those of plain SGLang.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
from live_server import LiveServer, faulty

sys.path.insert(0, str(Path(__file__).parent))

from conftest import BOTH, OURS

from vericache_sglang.planning.graph_sizes import graph_tokens

pytestmark = [pytest.mark.server, pytest.mark.extended]

GRAPHS = (
    *("--cuda-graph-backend-decode", "full"),
    *("--cuda-graph-bs-decode", "1", "2", "4", "8", "16"),
)
SERVERS = {
    "chunked prefill, overlap": ("--chunked-prefill-size", "256"),
    "page 16, no overlap": ("--page-size", "16", "--disable-overlap-schedule"),
    "codes": ("--vericache-compressor", "kivi:bits=4"),
}
CODES = {"rows begin with codes"}


class GraphServer(LiveServer):
    """A server that plays graphs and logs their captures and replays."""

    def __init__(self, folder, *flags):
        self.graph_log = folder / "graphs"
        self.graph_log.touch()
        environment = {
            **faulty("played_graphs"),
            "VERICACHE_TEST_LOG": str(self.graph_log),
        }
        super().__init__(folder, *OURS, *BOTH, *GRAPHS, *flags, environment=environment)

    def noted(self, what):
        """Count captures or replays by (kind of forward, rows or tokens)."""
        lines = [line.split() for line in self.graph_log.read_text().splitlines()]
        return Counter((mode, int(size)) for did, mode, size in lines if did == what)


@pytest.fixture(scope="module", params=list(SERVERS))
def graphs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    server = GraphServer(folder, *SERVERS[request.param])
    server.expected_reasons = CODES if request.param == "codes" else set()
    try:
        yield server.wait()
    finally:
        server.close()


def ids(answers):
    return [
        (answer["output_ids"], answer["meta_info"]["finish_reason"])
        for answer in answers
    ]


@pytest.mark.parametrize(
    "params",
    [
        {"ignore_eos": True, "max_new_tokens": 70},
        {"temperature": 0.8, "top_p": 0.95, "sampling_seed": 7, "ignore_eos": True},
        {"repetition_penalty": 1.3, "ignore_eos": True},
        {"regex": r"\{\"name\":\"[a-z_]+\"\}"},
    ],
    ids=["greedy", "seeded", "penalised", "constrained"],
)
def test_answers_are_plain_ones_whether_prompts_are_cached_or_not(
    graphs, servers, prompts, params
):
    wanted = ids(servers[1].generate(prompts, **params))
    first = graphs.generate(prompts, **params)
    again = graphs.generate(prompts, **params)
    assert ids(first) == ids(again) == wanted
    cached = [answer["meta_info"]["cached_tokens"] for answer in again]
    assert [n for n in cached if n > 100] == cached


def test_a_batch_that_only_decodes_runs_sglangs_own_graphs(graphs, servers):
    short = ["user 1234", "verify user 77", "code 8812 of user 5"]
    params = {"ignore_eos": True, "max_new_tokens": 30}
    wanted = ids(servers[1].generate(short, **params))
    graphs.settle()
    before = graphs.noted("replay")
    assert ids(graphs.generate(short, **params)) == wanted
    graphs.settle()
    kinds = {kind for kind, _ in graphs.noted("replay") - before}
    assert kinds == {"DECODE"}


def test_only_what_can_occur_is_captured(graphs):
    captured = graphs.noted("capture")
    assert set(captured.values()) == {1}
    mixed = {size for kind, size in captured if kind == "TARGET_VERIFY"}
    assert mixed == set(graph_tokens(16, 8, 2))
    assert max(mixed) == 16 + 2 * 8, "16 requests, two of them verified"
    assert {size for kind, size in captured if kind == "DECODE"} == {1, 2, 4, 8, 16}


def test_forwards_were_replayed_and_what_was_not_says_why(graphs, servers, prompts):
    graphs.generate(prompts, ignore_eos=True)
    state = graphs.settle()
    replays = graphs.noted("replay")
    mixed = sum(n for (kind, _), n in replays.items() if kind == "TARGET_VERIFY")
    assert mixed > 20
    assert replays.total() == state["graph_forwards"]
    assert set(state["eager_reasons"]) == graphs.expected_reasons
    assert sum(state["eager_reasons"].values()) == state["eager_forwards"]
    assert state["cycles"] > 20, "nothing was verified: this run proves nothing"
    said = graphs.log.read_text().count("run without CUDA graphs")
    assert said == len(graphs.expected_reasons), "one line for a reason"
