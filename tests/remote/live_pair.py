"""A drafter, a verifier and plain SGLang on loopback, and streams of their answers."""

import http.client
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial

import pytest
from live_server import LiveServer
from proxy import Proxy

from vericache_sglang.evaluation.server import free_port

BOTH = ("--max-total-tokens", "30000", "--enable-deterministic-inference")
LEASE_S = 40
"""A process that stalls for some seconds is no silent verifier in these tests."""
OURS = (
    *("--vericache-min-prompt", "64", "--vericache-draft-length", "8"),
    *("--vericache-residency", "host", "--vericache-lease-s", str(LEASE_S)),
    "--enable-metrics",
)
WAIT_S = 120
OF_OUTPUT = {"more": {"return_logprob": True, "top_logprobs_num": 2}}
"""As OpenAI's API asks: SGLang then starts at the prompt's end, not nowhere."""
LOGPROBS = {"more": {**OF_OUTPUT["more"], "token_ids_logprob": [5, 7]}}


class Pair:
    """A verifier, a drafter that reaches it through a proxy, and plain SGLang.

    Args:
        folder: Of the logs of the two.
        plain: Plain SGLang's server, which others use too.
        flags: Of verifier and drafter.
        drafts: Of the drafter alone.
        environment: Of the drafter.
        other: Port of another verifier, which a test may start.
    """

    def __init__(self, folder, plain, flags=(), drafts=(), environment=None, other=0):
        self.folder, self.plain, self.flags = folder, plain, flags
        self.port = free_port()
        self.verifier = self.start_verifier(self.port)
        self.proxy = Proxy(f"tcp://127.0.0.1:{self.port}", 0.0)
        known = [self.proxy.endpoint, f"tcp://127.0.0.1:{other}"][: 1 + bool(other)]
        address = ("--vericache-verifiers", ",".join(known))
        role = ("--vericache-role", "drafter", *address)
        self.drafter = LiveServer(
            folder, *OURS, *BOTH, *role, *flags, *drafts, environment=environment
        )

    def start_verifier(self, port):
        address = f"tcp://127.0.0.1:{port}"
        role = ("--vericache-role", "verifier", "--vericache-peer-bind", address)
        return LiveServer(self.folder, *OURS, *BOTH, *role, *self.flags)

    @contextmanager
    def started(self):
        """Wait until both serve; close them at last."""
        try:
            for server in (self.verifier, self.drafter):
                server.wait()
            self.connected()
            yield self
        finally:
            for server in (self.drafter, self.verifier):
                server.close()
            self.proxy.close()

    def until(self, server, holds):
        """Wait until a server's counters are as they should be; return them."""
        deadline = time.monotonic() + WAIT_S
        while not holds(counters := server.counters()):
            assert time.monotonic() < deadline, counters
            time.sleep(0.1)
        return counters

    def keep(self, texts):
        """Have the verifier prefill prompts and write their KV to its store."""
        self.verifier.generate(texts)
        self.verifier.settle("cache_store_waiting")

    def restart_verifier(self):
        """Start the verifier again that a test has killed."""
        self.verifier = self.start_verifier(self.port)
        self.verifier.wait()
        self.connected()

    def connected(self):
        return self.until(self.drafter, lambda c: c["remote_verifiers"] == 1)

    def events(self):
        """Return what verifier and drafter have logged of each other."""
        told = [*self.verifier.output().splitlines(), "--"]
        told += self.drafter.output().splitlines()
        return "\n".join(each for each in told if "VeriCache: " in each or each == "--")

    def compare(self, texts, path=None, **params):
        """Assert equal answers; return those of the drafter."""
        return self.compare_kinds({"": params}, texts, path)[""]

    def compare_kinds(self, kinds, texts, path=None, **shared):
        """Assert equal answers of texts under each of several parameters, all at once.

        Args:
            texts: Of every kind, or by kind.

        Returns:
            The drafter's answers to all texts, by kind.
        """
        own = texts if isinstance(texts, dict) else dict.fromkeys(kinds, texts)
        asked = [json.dumps([own[kind], {**shared, **kinds[kind]}]) for kind in kinds]
        with ThreadPoolExecutor(len(asked)) as clients:
            got = [*clients.map(partial(answers_of, self.drafter), asked)]
            wanted = [*clients.map(partial(plain_answers, self.plain), asked)]
        for kind, ours, plain in zip(kinds, got, wanted, strict=True):
            for one, other in zip(ours, plain, strict=True):
                assert one["output_ids"] == other["output_ids"], kind
                assert one["text"] == other["text"], kind
                told, expected = one["meta_info"], other["meta_info"]
                assert told["finish_reason"] == expected["finish_reason"], kind
                close = pytest.approx(logprobs(expected), abs=1e-4)
                assert logprobs(told) == close, kind
                if path:
                    assert told["vericache"]["path"] == path, (kind, self.events())
        return dict(zip(kinds, got, strict=True))


def answers_of(server, asked):
    texts, params = json.loads(asked)
    return server.generate(texts, **params)


plain_answers = cache(answers_of)
"""What plain SGLang answers is the same every time."""


def logprobs(info):
    """Return all log-probabilities of an answer: of its tokens, and of others."""
    found = [each[0] for each in info.get("output_token_logprobs", ())]
    for kind in ("top", "token_ids"):
        for others in info.get(f"output_{kind}_logprobs") or ():
            found += [each[0] for each in others]
    return found


def begin(server, text, tokens, **params):
    """Ask for a stream; return the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    sampling |= params
    body = {"text": text, "sampling_params": sampling, "stream": True}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/generate", json.dumps(body), headers)
    return connection


def stream(server, text, tokens, params, result):
    """Stream an answer; append each chunk, parsed, to ``result``."""
    for line in begin(server, text, tokens, **params).getresponse():
        if line.startswith(b"data: {"):
            result.append(json.loads(line[6:]))
    return result


class Streams:
    """Streams of all prompts, running in threads."""

    def __init__(self, server, prompts, tokens, params=()):
        params = params or [{}] * len(prompts)
        self._pool = ThreadPoolExecutor(len(prompts))
        self.chunks = [[] for _ in prompts]
        self._runs = [
            self._pool.submit(stream, server, text, tokens, own, chunks)
            for text, own, chunks in zip(prompts, params, self.chunks, strict=True)
        ]

    def under_way(self):
        """Wait until every stream has some tokens."""
        deadline = time.monotonic() + WAIT_S
        while not all(len(each) > 2 for each in self.chunks):
            assert time.monotonic() < deadline, [len(each) for each in self.chunks]
            time.sleep(0.02)

    def texts(self):
        for run in self._runs:
            run.result(WAIT_S)
        return [each[-1]["text"] for each in self.chunks]


def kill(server):
    """End all processes of a server at once."""
    os.killpg(server.process.pid, signal.SIGKILL)
    server.close()


def pause(*servers, seconds):
    """Have all processes of servers stand still; the first goes on a little earlier."""
    for server in servers:
        server.hold()
    time.sleep(seconds)
    for server in servers:
        server.go_on()
        time.sleep(0.1)


MOVED = (
    {},
    # Filtered: SGLang draws other noise for a seed beside greedy requests, as they are.
    {"temperature": 0.9, "top_p": 0.95, "sampling_seed": 3},
    {"logit_bias": {"20": 3.0, "40": -50.0}},
    {"regex": "[a-z0-9 ]{150}"},
)
"""What the state of a request depends on that moves in the middle."""
