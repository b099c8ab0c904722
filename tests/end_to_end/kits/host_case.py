"""A ``unittest`` case around one kit mixin, and one of its methods run on a server.

SGLang's fixtures start a server and hold the requests that some kits send. Here the
servers are ours and the requests shorter; the mixins are SGLang's, as they are.
"""

import contextlib
import io
import random
import unittest

import openai
import requests
from stand_ins import import_kit

from vericache_sglang.evaluation.workload import load_tokenizer

STORY = "Human: Write a travel blog post to Hawaii.\n\nAssistant:"
SEED = 17


class Host:
    """What SGLang's ``SpecEagleServerBase`` gives the kits, with shorter answers."""

    def run_decode(self, sampling_params):
        reply = requests.post(
            f"{self.base_url}/generate",
            json={
                "text": STORY,
                "sampling_params": {
                    "max_new_tokens": 48,
                    "temperature": 0.7,
                    **sampling_params,
                },
                "return_logprob": True,
                "top_logprobs_num": 5,
                "return_text_in_logprobs": True,
                "logprob_start_len": 0,
            },
            timeout=120,
        )
        assert reply.status_code == 200, reply.text

    def send_request(self):
        assert self._story(128, 120).status_code == 200

    def send_requests_abort(self):
        """Ask for a long answer and hang up."""
        with contextlib.suppress(requests.exceptions.Timeout):
            self._story(1024, 0.4)

    def _story(self, tokens, timeout):
        greedy = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return requests.post(
            f"{self.base_url}/generate",
            json={"text": STORY, "sampling_params": greedy},
            timeout=timeout,
        )

    @property
    def parity_ref_outputs(self):
        """What plain SGLang answers to the prompts of ``SpecParityKit``."""
        greedy = import_kit("kits.spec_server_kits")._greedy
        return {
            prompt: greedy(self.plain_url, prompt) for prompt in self.parity_prompts
        }

    @classmethod
    def flush_cache(cls):
        requests.post(f"{cls.base_url}/flush_cache", timeout=30)


class Result(unittest.TestResult):
    """Keeps the exceptions of a run, those of subtests too."""

    def __init__(self):
        super().__init__()
        self.raised = []

    def addError(self, test, err):  # noqa: N802
        self.raised.append(err[1])

    def addFailure(self, test, err):  # noqa: N802
        self.raised.append(err[1])

    def addSubTest(self, test, subtest, err):  # noqa: N802
        if err is not None:
            self.raised.append(err[1])


def run_method(row, method, servers, name):
    """Run one method of a kit against a live server.

    Args:
        row: The kit's ``Row`` of the table.
        method: Name of the mixin's method.
        servers: The ``kit_servers``.
        name: Which of them; it must be alive afterwards.

    Returns:
        The first exception raised, as ``Type: message``; empty where it passed.
    """
    server = servers[name]
    mixin = getattr(import_kit(f"kits.{row.kit}"), row.mixin)
    contents = {
        "base_url": server.url,
        "model": str(servers.model),
        "process": server.process,
        "tokenizer": load_tokenizer(servers.model),
        "api_key": "EMPTY",
        "client": openai.Client(api_key="EMPTY", base_url=f"{server.url}/v1"),
        **row.attributes,
    }
    if row.mixin == "SpecParityKit":
        contents["plain_url"] = servers["plain"].url
    case = type(row.mixin, (mixin, Host, unittest.TestCase), contents)(method)
    random.seed(SEED)
    result, printed = Result(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        case.run(result)
    assert server.process.poll() is None, server.log.read_text()[-4000:]
    if not result.raised:
        return ""
    first = result.raised[0]
    return f"{type(first).__name__}: {first}"
