"""Serve the demo model, ask it one long-context question, compare with plain SGLang."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openai import OpenAI
from tokenizers import Tokenizer

from demo_model.records import Prompt, prompt_of_length

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
BOOT_SECONDS = 240
STOP_SECONDS = 15


class DemoError(Exception):
    """A server did not come up, or died; the message holds the end of its log."""


@dataclass(frozen=True)
class Answer:
    """What one server said, and how fast.

    Attributes:
        text: The answer as the client reads it.
        tokens: Its token ids, in order.
        first_s: Seconds from the request to the first token.
        total_s: Seconds from the request to the last token.
    """

    text: str
    tokens: list[int]
    first_s: float
    total_s: float

    def speed(self) -> str:
        """Describe the timing; the rate leaves the prompt's time out."""
        decoding = max(self.total_s - self.first_s, 1e-9)
        rate = (len(self.tokens) - 1) / decoding
        return (
            f"{len(self.tokens)} tokens, {rate:.1f} tokens/s, first token after "
            f"{self.first_s:.2f} s, {self.total_s:.2f} s in all"
        )


class Server:
    """One server process in a process group of its own, its output in a file."""

    def __init__(self, name: str, port: int, model: Path, flags: Sequence[str]) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.NamedTemporaryFile(  # noqa: SIM115  stop() closes it
            prefix="vericache-demo-", suffix=".log"
        )
        command = [
            *(sys.executable, "-m", "vericache_sglang.launch_server"),
            *("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)),
            # An idle server must not take the cores of the one being measured.
            "--sleep-on-idle",
            *flags,
        ]
        print(f"[{name}] {' '.join(command[1:])}", flush=True)
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_until_healthy(self) -> None:
        """Block until the server answers, with a line every five seconds.

        Raises:
            DemoError: The process ended, or ``BOOT_SECONDS`` are over.
        """
        started = time.monotonic()
        told = 0
        while (waited := time.monotonic() - started) < BOOT_SECONDS:
            if self._process.poll() is not None:
                raise DemoError(self._ended())
            if self._answers("/health"):
                print(f"[{self.name}] ready after {waited:.0f} s", flush=True)
                return
            if int(waited) >= told + 5:
                told = int(waited)
                print(f"[{self.name}] starting, {told} s", flush=True)
            time.sleep(0.5)
        raise DemoError(f"not ready after {BOOT_SECONDS} s\n{self._tail()}")

    def counters(self) -> dict[str, Any]:
        """Return VeriCache's counters, {} where the server has none."""
        with urllib.request.urlopen(f"{self.url}/server_info", timeout=30) as reply:
            info = json.load(reply)
        counters: dict[str, Any] = info["internal_states"][0].get("vericache", {})
        return counters

    def ask(self, prompt: Prompt) -> Answer:
        """Send one greedy chat request through the OpenAI client and time it.

        Raises:
            DemoError: The server died on it.
        """
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=300)
        text, tokens, first_s = "", [], 0.0
        started = time.monotonic()
        stream = client.chat.completions.create(
            model="demo",
            messages=[
                {"role": "system", "content": prompt.document},
                {"role": "user", "content": prompt.question},
            ],
            temperature=0,
            max_tokens=512,
            stream=True,
            extra_body={"return_output_ids_in_sglext": True},
        )
        for chunk in stream:
            extension = getattr(chunk, "sglext", None) or {}
            if extension.get("output_ids"):
                tokens = extension["output_ids"][0]
            if chunk.choices and chunk.choices[0].delta.content:
                first_s = first_s or time.monotonic() - started
                text += chunk.choices[0].delta.content
        if self._process.poll() is not None:
            raise DemoError(self._ended())
        return Answer(text, tokens, first_s, time.monotonic() - started)

    def wait(self) -> None:
        """Block until the server ends by itself."""
        self._process.wait()

    def stop(self) -> None:
        """End the server and everything it started; a second call does nothing."""
        if self._log.closed:
            return
        # The launcher first: it drains, and ends its children in order.
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_SECONDS)
        self._log.close()

    def _answers(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _ended(self) -> str:
        status = self._process.returncode
        return f"the server ended with status {status}\n{self._tail()}"

    def _tail(self) -> str:
        lines = Path(self._log.name).read_text(errors="replace").splitlines()
        return "\n".join(f"  | {line}" for line in lines[-30:])


def free_port() -> int:
    """Return a loopback TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def build_prompt(model: Path, tokens: int, calls: int) -> Prompt:
    """Draw a document of user records and a question that asks for tool calls.

    Args:
        model: Folder of the demo model; its tokenizer counts.
        tokens: Most tokens of the prompt.
        calls: How many calls the question asks for.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    prompt = prompt_of_length(random.Random(7), tokens, count, calls=calls)
    print(
        f"prompt: {count(prompt.text)} tokens, {len(prompt.records)} user records\n"
        f"question:\n{prompt.question}",
        flush=True,
    )
    return prompt


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "configs/demo-model-long")
    parser.add_argument("--settings", type=Path, default=ROOT / "configs/demo.yaml")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--prompt-tokens", type=int, default=7000)
    parser.add_argument("--calls", type=int, default=5, help="calls asked for at once")
    parser.add_argument("--once", action="store_true", help="stop after the comparison")
    return parser.parse_args(argv)


def report(answer: Answer, counters: dict[str, Any], prompt: Prompt) -> None:
    """Print what VeriCache answered and how it got there."""
    right = "as the records say" if answer.text == prompt.answer else "not as expected"
    print(f"\nanswer ({right}):\n{answer.text}\n")
    print(f"VeriCache on:  {answer.speed()}")
    print(
        f"  mean acceptance length {counters.get('mean_accepted', 0):.2f} tokens per "
        f"verification: {counters.get('rounds', 0)} verifications, "
        f"{counters.get('drafted', 0)} tokens drafted, "
        f"{counters.get('accepted', 0)} accepted, "
        f"{counters.get('staged_bytes', 0) / 1e6:.1f} MB staged",
        flush=True,
    )


def ask_warm(server: Server, prompt: Prompt) -> Answer:
    """Ask after a one-line request, so that no first call is timed."""
    line = prompt.document.partition("\n")[0]
    server.ask(replace(prompt, document=line, question="verify user 0000"))
    return server.ask(prompt)


def run(options: argparse.Namespace) -> int:
    """Serve, ask, compare; return 0 only where both servers gave the same tokens."""
    prompt = build_prompt(options.model, options.prompt_tokens, options.calls)
    servers: list[Server] = []
    try:
        settings = ("--vericache-config", str(options.settings))
        port = options.port or free_port()
        served = Server("vericache", port, options.model, settings)
        servers.append(served)
        served.wait_until_healthy()
        answer = ask_warm(served, prompt)
        report(answer, served.counters(), prompt)

        plain = Server("plain", free_port(), options.model, ("--disable-vericache",))
        servers.append(plain)
        plain.wait_until_healthy()
        reference = ask_warm(plain, prompt)
        plain.stop()
        print(f"VeriCache off: {reference.speed()}")

        same = bool(answer.tokens) and answer.tokens == reference.tokens
        print(f"same tokens: {'yes' if same else 'NO'}", flush=True)
        if not same:
            print(f"plain answer:\n{reference.text}", flush=True)
        if not options.once:
            print(f"\nserving on {served.url}/v1 until Ctrl-C", flush=True)
            served.wait()
        return 0 if same else 1
    finally:
        for server in servers:
            server.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return its exit status."""
    try:
        return run(parse_args(argv))
    except DemoError as error:
        print(f"serve_demo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped")
        return 0


if __name__ == "__main__":
    sys.exit(main())
