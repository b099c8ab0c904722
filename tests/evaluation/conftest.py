"""The live servers of the end-to-end tests, and reports made by hand."""

import sys
from pathlib import Path

import pytest

from vericache_sglang.evaluation.client import Answer, Pass
from vericache_sglang.evaluation.experiment import Experiment
from vericache_sglang.evaluation.figures import pass_figures
from vericache_sglang.evaluation.options import check, parser
from vericache_sglang.evaluation.report import as_json

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))

ORIGIN = {
    "argv": ["--out", "x"],
    "command": "python -m vericache_sglang.bench --out x",
    "commit": "abc1234",
    "date": "2026-11-21T00:00:00+00:00",
    "versions": {"python": "3.11"},
    "hardware": {
        "cpu": "a CPU",
        "cores": 2,
        "memory_gb": 8.0,
        "load_average": 0.5,
        "omp_threads": "1",
        "gpus": [],
    },
}


def answer(ids, *, sent=0.0, first=0.5, each=0.01, **more):
    """Return an answer whose tokens came one by one."""
    times = tuple((sent + first + each * i, i + 1) for i in range(len(ids)))
    ended = times[-1][0] if times else sent
    return Answer(sent=sent, times=times, ended=ended, ids=tuple(ids), **more)


def counters(rounds=10, accepted=57, staged=4000):
    return {
        "cycles": rounds,
        "accepted": accepted,
        "staged_bytes": staged,
        "offloaded_bytes": 1000,
        "prefetch_seconds": 0.25,
        "kv_read_bytes_per_s": 2e9,
    }


def one_pass(ids, seconds, after=None):
    done = Pass(tuple(answer(each) for each in ids), seconds)
    return done, pass_figures(done, {}, after or {}, memory_gbps=4.0)


@pytest.fixture
def build_report(tmp_path):
    """Return a function that reports two rounds of plain, vericache and lossy."""

    def build(*flags):
        words = ["--out", str(tmp_path / "out"), "--model", "m"]
        words += ["--systems", "plain,vericache,lossy", *flags]
        options = parser().parse_args(words)
        systems = check(options)
        found = Experiment(options, systems, [], None)
        same, other = [[1, 2, 3], [4, 5, 6]], [[1, 2, 9], [4, 5, 6]]
        found.rounds = [
            {
                "plain": one_pass(same, 2.0),
                "vericache": one_pass(same, 1.0, counters()),
                "lossy": one_pass(other, 0.5, counters(0, 0, 0)),
            },
            {
                "plain": one_pass(same, 3.0),
                "vericache": one_pass(same, 2.0, counters()),
                "lossy": one_pass(other, 1.0, counters(0, 0, 0)),
            },
        ]
        found.tuning["plain"] = {2: 2.5, 4: 2.9}
        found.open["vericache"] = [
            {"rate": rate, **one_pass(same, 1.0)[1]} for rate in (0.5, 1.0)
        ]
        found.divergences["lossy"] = {
            "top_k": 20,
            "requests": 2,
            "nats_per_token": 0.1234,
            "max_nats": 9.87,
            "nats_per_request": 4.56,
            "same_argmax": 0.75,
            "positions": 4,
        }
        return as_json(options, systems, found.results(), ORIGIN)

    return build
