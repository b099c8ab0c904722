"""Serve from two pools: a verifier beside a store, two drafters, and a router."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from demo.progress import console, step
from demo.question import Document, ask
from vericache_sglang.evaluation.fork_server import ForkServer
from vericache_sglang.evaluation.prefix_store import link, write
from vericache_sglang.evaluation.server import (
    OwnServer,
    Server,
    ServerError,
    free_port,
)
from vericache_sglang.evaluation.systems import engine_flags

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = "vericache_sglang.launch_server"
PLAIN, VERIFIER, DRAFTERS = "plain SGLang", "verifier", ("drafter 1", "drafter 2")
BOOT_SECONDS = 300.0
LONGEST = 200
"""Most tokens of an answer."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "configs/demo-model")
    parser.add_argument("--router", type=Path, required=True, help="sglang-router")
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free one")
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--requests", type=int, default=4, help="questions, in turn")
    parser.add_argument("--once", action="store_true", help="stop after the comparison")
    return parser.parse_args(argv)


def start(
    options: argparse.Namespace, folder: Path, store: Sequence[str], forks: ForkServer
) -> dict[str, OwnServer]:
    """Fork plain SGLang, a verifier that reads the store, and two drafters."""
    key = folder / "peer.key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    shared = [
        *("--model-path", str(options.model), "--skip-server-warmup"),
        *("--max-total-tokens", str(4 * options.prompt_tokens), "--sleep-on-idle"),
        *("--max-running-requests", "4", "--log-level", "warning"),
    ]
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    peer = ["--vericache-peer-key", str(key), "--vericache-role"]
    roles: dict[str, list[str]] = {
        PLAIN: ["--disable-vericache"],
        VERIFIER: [*peer, "verifier", "--vericache-peer-bind", endpoint, *store],
    }
    for name in DRAFTERS:
        roles[name] = [*peer, "drafter", "--vericache-verifiers", endpoint]
    servers = {}
    for name, flags in roles.items():
        port = free_port()
        where = ["--port", str(port), "--nccl-port", str(free_port())]
        command = [sys.executable, "-m", LAUNCHER, *shared, *flags, *where]
        log = folder / f"{port}.log"
        servers[name] = OwnServer(command, port, {}, log, forks.start)
    return servers


def start_router(
    options: argparse.Namespace, folder: Path, servers: dict[str, OwnServer]
) -> OwnServer:
    """Start SGLang's router in front of the drafters."""
    port = options.port or free_port()
    urls = [servers[name].url for name in DRAFTERS]
    command = [
        *(str(options.router), "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--policy", "cache_aware", "--worker-urls", *urls),
        *("--prometheus-port", str(free_port())),
    ]
    return OwnServer(command, port, {}, folder / "router.log")


def compared(front: Server, servers: dict[str, OwnServer], document: Document) -> bool:
    """Ask through the router and plain SGLang; return whether all tokens are equal."""
    same = True
    for number, question in enumerate(document.questions):
        (wanted,) = ask(servers[PLAIN], [question.prompt], LONGEST)
        began = time.perf_counter()
        (got,) = ask(front, [question.prompt], LONGEST)
        seconds = time.perf_counter() - began
        equal = got.tokens == wanted.tokens
        same = same and equal
        console.print(
            f"question {number + 1}: {len(got.tokens)} tokens in {seconds:.1f} s, "
            f"{'equal to plain SGLang' if equal else 'NOT those of plain SGLang'}"
        )
        console.print(f"  {got.text}")
    return same


def run(options: argparse.Namespace) -> int:
    """Serve, ask, compare.

    Returns:
        0 only where all answers were plain SGLang's, the verifier computed them, and it
        had the document from the store.
    """
    document = Document(options.model, options.prompt_tokens, options.requests, 1)
    servers: dict[str, OwnServer] = {}
    with tempfile.TemporaryDirectory(prefix="vericache-pools-") as name:
        folder = Path(name)
        stored = str(folder / "store")
        with step("writing the document's KV to the store"):
            try:
                write(options.model, [document.text], stored)
            except RuntimeError as error:
                console.print(str(error), markup=False)
                return 1
        store = engine_flags(link(stored))
        forks = ForkServer(folder / "forks.log", {"TORCHDYNAMO_DISABLE": "1"})
        try:
            with step("starting a verifier, two drafters and plain SGLang"):
                servers = start(options, folder, store, forks)
                for server in servers.values():
                    server.wait(BOOT_SECONDS)
            with step("connecting drafters and verifier"):
                for name in DRAFTERS:
                    connected(servers[name])
            with step("starting the router"):
                servers["router"] = front = start_router(options, folder, servers)
                front.wait(BOOT_SECONDS)
            same = compared(front, servers, document)
            counters = servers[VERIFIER].counters()
            tokens = counters["cache_match_store_tokens"]
            console.print(
                f"the verifier took {tokens} tokens of the document from the store"
            )
            if not options.once:
                console.print(f"\nserving on {front.url} until Ctrl-C")
                while front.process.poll() is None:
                    time.sleep(0.5)
            return 0 if same and tokens else 1
        finally:
            for server in reversed(servers.values()):
                server.close(at_once=True)
            forks.close()


def connected(drafter: OwnServer) -> None:
    """Wait until a drafter has its verifier.

    Raises:
        ServerError: It has none after the time that a server has to boot.
    """
    deadline = time.monotonic() + BOOT_SECONDS
    while not drafter.counters()["remote_verifiers"]:
        if time.monotonic() > deadline:
            raise ServerError(f"{drafter.url} finds no verifier")
        time.sleep(0.2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; return its exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run(parse_args(argv))
    except ServerError as error:
        console.print(f"two_pools: error: {error}", style="bold red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("\nstopped")
        return 0


if __name__ == "__main__":
    sys.exit(main())
