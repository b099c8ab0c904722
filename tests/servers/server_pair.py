"""A plain prefill server and a VeriCache decode server, asked as by SGLang's router."""

import itertools
import os
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from urllib.error import HTTPError

from live_server import PATHS, POOL, ROOT, LiveServer

from vericache_sglang.evaluation import lossless
from vericache_sglang.evaluation.server import free_port

WIRE = ROOT / "tests" / "disaggregation" / "wire"
QUIET = ("--skip-server-warmup", *POOL)
SENT = ("--disaggregation-transfer-backend", "mooncake_tcp")


class Pair:
    """Both servers, on one machine.

    Args:
        folder: For their logs.
        wire: Folder with another ``mooncake`` than the installed one; None: the latter.
        engine: Flags of both.
        flags: Flags of the decode server.
        environment: Variables of the decode server.
    """

    def __init__(self, folder, *flags, wire=WIRE, engine=(), environment=None):
        bootstrap = str(free_port())
        shared = [*QUIET, *SENT, "--disaggregation-bootstrap-port", bootstrap, *engine]
        path = {"PYTHONPATH": PATHS + (f"{os.pathsep}{wire}" if wire else "")}
        self.rooms = itertools.count(random.getrandbits(60), 64)
        self.address = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": int(bootstrap),
        }
        self.prefill = LiveServer(
            folder,
            *("--disable-vericache", "--disaggregation-mode", "prefill", *shared),
            environment=path,
        )
        self.decode = LiveServer(
            folder,
            *("--disaggregation-mode", "decode", *shared, *flags),
            environment={**path, **(environment or {})},
        )

    def __enter__(self):
        self.prefill.wait()
        self.decode.wait()
        return self

    def __exit__(self, *raised):
        self.decode.close()
        self.prefill.close()

    def generate(self, body):
        """Send one body, which may hold several requests, to both servers."""
        whole = {**body, **self.address, "bootstrap_room": next(self.rooms)}
        with ThreadPoolExecutor(1) as other:
            prefilled = other.submit(self.prefill.post, "/generate", whole)
            try:
                return self.decode.post("/generate", whole)
            finally:
                with suppress(HTTPError):  # where a test has a transfer fail
                    prefilled.result()

    def run(self, waves):
        """Answer waves; return what ``lossless.run`` does, and check what is held."""
        answers = [lossless.answer(self, wave) for wave in waves]
        return {"waves": answers, "state": self.decode.settle()}
