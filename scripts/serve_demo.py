"""Ask a long document several questions: full KV, compressed KV alone, VeriCache."""

from __future__ import annotations

import argparse
import platform
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from demo.page import Result, draw, marked, table
from demo.question import Document
from demo.servers import DemoError, Server, import_sglang
from vericache_sglang.evaluation.altered import LOSSY, environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
FULL, ALONE, OURS = "full KV", "compressed KV alone", "VeriCache"
LONGEST = 512
"""Tokens of an answer."""

TICK_SECONDS = 10.0
console = Console(highlight=False, soft_wrap=True)


@contextmanager
def step(label: str) -> Iterator[None]:
    """Say what is being waited for, every ten seconds, and how long it took."""
    began, done = time.monotonic(), threading.Event()

    def tick() -> None:
        while not done.wait(TICK_SECONDS):
            console.print(f"  {label}: {time.monotonic() - began:.0f} s ...")

    ticker = threading.Thread(target=tick, daemon=True)
    console.print(f"{label} ...")
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()  # nothing runs beside a fork
    console.print(f"  {label}: done in {time.monotonic() - began:.1f} s")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "configs/demo-model-long")
    parser.add_argument("--settings", type=Path, default=ROOT / "configs/demo.yaml")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--prompt-tokens", type=int, default=16000)
    parser.add_argument("--requests", type=int, default=6, help="questions at once")
    parser.add_argument("--calls", type=int, default=5, help="tool calls a question")
    parser.add_argument("--png", type=Path, default=Path("demo.png"))
    parser.add_argument("--once", action="store_true", help="stop after the comparison")
    return parser.parse_args(argv)


def start(options: argparse.Namespace, folder: Path) -> dict[str, Server]:
    """Fork the three servers; they differ in VeriCache and in nothing else."""
    room = (options.requests + 2) * (options.prompt_tokens + LONGEST)
    shared = [
        *("--model-path", str(options.model), "--skip-server-warmup"),
        *("--max-total-tokens", str(room), "--log-level", "warning"),
        *("--max-running-requests", str(max(2, options.requests))),
        *("--context-length", str(options.prompt_tokens + LONGEST)),
        "--sleep-on-idle",  # an idle server takes no core from the one measured
    ]
    ours = [*shared, "--vericache-config", str(options.settings)]
    lossy = environment(folder / "lossy", LOSSY)
    alone = [*ours, "--vericache-residency", "host"]
    return {
        FULL: Server([*shared, "--disable-vericache"], {}, folder / "full.log"),
        ALONE: Server(alone, lossy, folder / "alone.log"),
        OURS: Server(ours, {}, folder / "ours.log", options.port),
    }


def ask(servers: dict[str, Server], document: Document) -> list[Result]:
    """Warm every server, then ask one after the other all questions at once."""
    prompts = [question.prompt for question in document.questions]
    reading = f"reading the document, {document.tokens} tokens, with each"
    # Prompts are in every prefix cache then, and no first call is timed.
    with step(reading), ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(lambda each: each.generate(prompts, 16), servers.values()))
    results = []
    for name, server in servers.items():
        with step(f"asking {len(prompts)} questions at once: {name}"):
            began = time.perf_counter()
            answers = server.generate(prompts, LONGEST)
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
    with step("importing SGLang, once for all servers"):
        import_sglang()
    servers: dict[str, Server] = {}
    with tempfile.TemporaryDirectory(prefix="vericache-demo-") as folder:
        try:
            servers = start(options, Path(folder))
            with step("starting three servers"):
                for server in servers.values():
                    server.wait_until_healthy()
            full, alone, ours = results = ask(servers, document)
            show(results, document, options.png)
            point = all(ours.same_as(full)) and not all(alone.same_as(full))
            if not point:
                console.print("this did not show what it should", style="bold red")
            if not options.once:
                servers.pop(FULL).stop()
                servers.pop(ALONE).stop()
                console.print(f"\nserving on {servers[OURS].url}/v1 until Ctrl-C")
                while not servers[OURS].has_ended():
                    time.sleep(0.5)
            return 0 if point else 1
        finally:
            for server in servers.values():
                server.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return its exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run(parse_args(argv))
    except DemoError as error:
        console.print(f"serve_demo: error: {error}", style="bold red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("\nstopped")
        return 0


if __name__ == "__main__":
    sys.exit(main())
