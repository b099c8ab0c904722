"""Ask a long document several questions: full KV, compressed KV alone, VeriCache."""

from __future__ import annotations

import argparse
import platform
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from demo.page import Result, draw, marked, table
from demo.progress import console, step
from demo.question import Document, ask
from vericache_sglang.evaluation.altered import LOSSY, environment
from vericache_sglang.evaluation.fork_server import ForkServer
from vericache_sglang.evaluation.server import OwnServer, ServerError, free_port

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
FULL, ALONE, OURS = "full KV", "compressed KV alone", "VeriCache"
LAUNCHER = "vericache_sglang.launch_server"
BOOT_SECONDS = 300.0
LONGEST = 512
"""Most tokens of an answer."""

WARM = 64
"""Tokens of the answers that are not timed."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "configs/demo-model-long")
    parser.add_argument("--settings", type=Path, default=ROOT / "configs/demo.yaml")
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free one")
    parser.add_argument("--prompt-tokens", type=int, default=20000)
    parser.add_argument("--requests", type=int, default=6, help="questions at once")
    parser.add_argument("--calls", type=int, default=5, help="tool calls a question")
    parser.add_argument("--png", type=Path, default=Path("demo.png"))
    parser.add_argument("--once", action="store_true", help="stop after the comparison")
    return parser.parse_args(argv)


def start(
    options: argparse.Namespace, folder: Path, forks: ForkServer
) -> dict[str, OwnServer]:
    """Fork the three servers; they differ in VeriCache and in nothing else."""
    room = (options.requests + 2) * (options.prompt_tokens + LONGEST)
    shared = [
        *("--model-path", str(options.model), "--skip-server-warmup"),
        *("--max-total-tokens", str(room), "--log-level", "warning"),
        *("--max-running-requests", str(max(2, options.requests))),
        *("--context-length", str(options.prompt_tokens + LONGEST)),
        "--sleep-on-idle",  # an idle server takes no core from the one measured
    ]
    # Not left to what the throughput model measures while three servers boot at once.
    ours = [*shared, "--vericache-config", str(options.settings)]
    kinds: dict[str, tuple[list[str], dict[str, str]]] = {
        FULL: ([*shared, "--disable-vericache"], {}),
        ALONE: (
            [*ours, "--vericache-residency", "host"],
            environment(folder / "lossy", LOSSY),
        ),
        OURS: ([*ours, "--vericache-residency", "device"], {}),
    }
    servers = {}
    for name, (flags, more) in kinds.items():
        stays = name == OURS and not options.once
        port = (options.port if stays else 0) or free_port()
        where = ["--port", str(port), "--nccl-port", str(free_port())]
        command = [sys.executable, "-m", LAUNCHER, *flags, *where]
        log = folder / f"{port}.log"
        servers[name] = OwnServer(command, port, more, log, forks.start)
    return servers


def measure(servers: dict[str, OwnServer], document: Document) -> list[Result]:
    """Warm every server, then ask one after the other all questions at once."""
    prompts = [question.prompt for question in document.questions]
    reading = f"reading the document, {document.tokens} tokens, with each"
    # Prompts are in every prefix cache then, and no first call is timed.
    with step(reading), ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(lambda each: ask(each, prompts, WARM), servers.values()))
    results = []
    for name, server in servers.items():
        with step(f"asking {len(prompts)} questions at once: {name}"):
            began = time.perf_counter()
            answers = ask(server, prompts, LONGEST)
            seconds = time.perf_counter() - began
        results.append(Result(name, answers, seconds))
    return results


def show(results: Sequence[Result], document: Document, png: Path) -> None:
    """Print one question's answers and the table, and draw the picture."""
    full, alone, _ = results
    same = alone.same_as(full)
    at = same.index(False) if False in same else 0
    console.rule(f"one of the questions, about {document.records} records")
    console.print(document.questions[at].text)
    for result in results:
        right = result.answers[at].tokens == full.answers[at].tokens
        console.print(f"\n{result.name}{'' if right else ' (WRONG)'}:", style="bold")
        for line in marked(result.answers[at].text, full.answers[at].text):
            console.print(line)
    console.print()
    console.print(table(results, document.questions))
    title = (
        f"{len(document.questions)} questions about {document.tokens} tokens, "
        f"at once; prompts cached\n{platform.processor() or platform.machine()}, CPU"
    )
    draw(results, title, png)
    console.print(f"picture: {png}")


def run(options: argparse.Namespace) -> int:
    """Serve, ask, compare.

    Returns:
        0 only where VeriCache gave the full KV's tokens in every answer and the
        compressed KV alone did not.
    """
    document = Document(
        options.model, options.prompt_tokens, options.requests, options.calls
    )
    servers: dict[str, OwnServer] = {}
    with tempfile.TemporaryDirectory(prefix="vericache-demo-") as folder:
        # Nothing that is used is compiled: saves an import.
        forks = ForkServer(Path(folder, "forks.log"), {"TORCHDYNAMO_DISABLE": "1"})
        try:
            with step("starting three servers, forked from one import of SGLang"):
                servers = start(options, Path(folder), forks)
                for server in servers.values():
                    server.wait(BOOT_SECONDS)
            full, alone, ours = results = measure(servers, document)
            show(results, document, options.png)
            point = all(ours.same_as(full)) and not all(alone.same_as(full))
            if not point:
                console.print("this did not show what it should", style="bold red")
            if not options.once:
                for name in (FULL, ALONE):
                    servers.pop(name).close(at_once=True)
                console.print(f"\nserving on {servers[OURS].url}/v1 until Ctrl-C")
                while servers[OURS].process.poll() is None:
                    time.sleep(0.5)
            return 0 if point else 1
        finally:
            for server in servers.values():
                server.close(at_once=True)
            forks.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return its exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run(parse_args(argv))
    except ServerError as error:
        console.print(f"serve_demo: error: {error}", style="bold red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("\nstopped")
        return 0


if __name__ == "__main__":
    sys.exit(main())
