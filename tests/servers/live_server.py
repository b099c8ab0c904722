"""Servers of the tests: on a free loopback port, forked or fresh."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from vericache_sglang.evaluation import lossless
from vericache_sglang.evaluation.fleet import CHECKED, ONE_THREAD
from vericache_sglang.evaluation.fork_server import forks_with
from vericache_sglang.evaluation.server import OwnServer, free_port, spawn
from vericache_sglang.evaluation.workload import load_tokenizer

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "configs" / "demo-model"
FAULTS = ROOT / "tests" / "faults" / "plugin"

PATHS = os.pathsep.join(
    [
        str(ROOT / "tests" / "compressors"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
)
"""Import path of servers: the tests' own compressors, and ours."""

POOL = ("--max-total-tokens", "40000")
"""A server clears its pool before it serves: a benchmark's takes most of a second."""

SERVERS = {**ONE_THREAD, **CHECKED}
"""Environment of every server, with SGLang's strict memory checks."""


def fork(command, environment, log):
    """Start ``python -m ...`` off the fork server."""
    forks = forks_with(**ONE_THREAD)
    return forks.start(command, {**CHECKED, "PYTHONPATH": PATHS, **environment}, log)


def run(system, model, waves):
    """Do what ``lossless.run`` does, with a server forked, and a small pool."""
    small = replace(system, flags=(*POOL, *system.flags))
    return lossless.run(small, model, waves, start=fork)


def faulty(fault, paths=PATHS):
    """Return the environment that installs one of the tests' faults in a server.

    Args:
        fault: Module of ``vericache_test_faults``.
        paths: What else it imports from.
    """
    return {"VERICACHE_TEST_FAULT": fault, "PYTHONPATH": f"{paths}{os.pathsep}{FAULTS}"}


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def informed(waves, plain, folder, drafter="oracle"):
    """Return the environment that installs a test's inner drafter.

    Args:
        waves: As given to ``run``, with prompts as text.
        plain: What plain SGLang answered; the oracle knows it.
        folder: Of a file with the texts.
        drafter: As in ``vericache_test_faults.inner_drafter``.
    """
    tokenizer = load_tokenizer(MODEL)
    known = [
        [*tokenizer.encode(prompt), *answer["ids"]]
        for wave, answers in zip(waves, plain["waves"], strict=True)
        for prompt, answer in zip(wave["prompts"], answers, strict=True)
    ]
    path = folder / "texts.json"
    path.write_text(json.dumps(known))
    return {
        **faulty("inner_drafter"),
        "VERICACHE_TEST_DRAFTER": drafter,
        "VERICACHE_TEST_TEXTS": str(path),
    }


class LiveServer(OwnServer):
    """``python -m vericache_sglang.launch_server`` with strict memory checks."""

    def __init__(self, folder, *flags, environment=None, fresh=False):
        """Start it: ``fresh`` as a user would, else forked."""
        port = free_port()
        command = [sys.executable, "-m", "vericache_sglang.launch_server"]
        command += ["--model-path", str(MODEL), "--port", str(port)]
        command += ["--nccl-port", str(free_port())]
        # An idle server takes no core from those that are asked.
        command += ["--max-running-requests", "16", "--sleep-on-idle"]
        command += ["--log-level", "warning", *flags]
        super().__init__(
            command,
            port,
            {**SERVERS, "PYTHONPATH": PATHS, **(environment or {})},
            folder / f"server-{port}.log",
            spawn if fresh else fork,
        )
        self.port = port

    def wait(self, seconds=600):
        super().wait(seconds)
        return self

    def close(self, *, at_once=True):
        super().close(at_once=at_once)

    def get(self, path):
        return self.post(path, None)

    def post(self, path, body):
        """Return the reply, parsed where it is JSON; an error status is an error."""
        text = self.fetch(path, body)
        return json.loads(text) if text.startswith((b"{", b"[")) else text

    def generate(self, texts, **params):
        """Answer ``texts`` at once, greedily unless ``params`` say otherwise."""
        sampling = {"temperature": 0.0, "max_new_tokens": 40, **params}
        more = sampling.pop("more", {})
        return self.post(
            "/generate", {"text": texts, "sampling_params": sampling, **more}
        )

    def settle(self, *more, seconds=120):
        """Wait until nothing runs; return the counters.

        Args:
            more: Further counters that are to become 0.
            seconds: Most.
        """
        deadline = time.monotonic() + seconds
        while any(map((counters := self.counters()).get, ("running", *more))):
            assert time.monotonic() < deadline, f"still running: {counters}"
            time.sleep(0.1)
        return counters
