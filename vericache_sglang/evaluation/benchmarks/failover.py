"""Drafters and a verifier under streams, while their processes are killed in turn.

All have a store with the prompts' KV; the drafters' link to it is EMULATED. The clients
are what a router in front of drafters is: a stream that its drafter's end cut off is
asked for again at another drafter, one that a verifier's end concerns must go on
without an error. Every answer is compared with plain SGLang's; a request that plain
SGLang answers differently in a batch than alone is not asked.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from vericache_sglang.errors import VeriCacheError
from vericache_sglang.evaluation.attack import HELD
from vericache_sglang.evaluation.benchmark import DEMO, Benchmark
from vericache_sglang.evaluation.client import events_of, open_session
from vericache_sglang.evaluation.fleet import (
    BOOT_SECONDS,
    ONE_THREAD,
    QUIET,
    served,
    starter,
)
from vericache_sglang.evaluation.prefix_store import link, write
from vericache_sglang.evaluation.server import OwnServer, ServerError, free_port
from vericache_sglang.evaluation.systems import command, described
from vericache_sglang.evaluation.workload import (
    load_tokenizer,
    record_prompts,
    spread,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from vericache_sglang.evaluation.benchmark import Results

KINDS: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "seeded": {"temperature": 0.8, "sampling_seed": 7, "ignore_eos": True},
    "grammar": {"temperature": 0.0, "regex": r"[ -~]{300}"},
    "stop string": {"temperature": 0.0, "stop": ["0"]},
}
"""Kinds of requests that travel, all with one right answer."""

ENGINE = {
    "enable_deterministic_inference": True,
    "max_running_requests": 256,
    "chunked_prefill_size": 2048,
}
SETTINGS = {"min_prompt": 64, "residency": "host", "lease_s": 5.0}
DOWN_SECONDS = 5.0
"""Time between a kill and the start of the next process in its place."""

ANSWER_SECONDS = 900.0
SETTLE_SECONDS = 60.0


class Member:
    """One server of the pools: killed, and started again at the same addresses.

    Args:
        folder: For its logs.
        settings: VeriCache's, by field name.
        store: SGLang's arguments that open the store.
    """

    def __init__(
        self,
        name: str,
        options: argparse.Namespace,
        folder: Path,
        settings: Mapping[str, Any],
        store: Mapping[str, str],
    ) -> None:
        engine = {**ENGINE, **store, "max_total_tokens": options.slots}
        system = described(name, {**SETTINGS, **settings}, engine)
        self.name = name
        self.starts = 0
        self._port, self._log = free_port(), folder / f"{name}.log"
        shared = [*QUIET, "--nccl-port", str(free_port())]
        self._command = command(system, str(options.model), self._port, shared, ())
        self.start()

    def start(self) -> None:
        """Start its process."""
        log = self._log.with_suffix(f".{self.starts}")
        self.server = OwnServer(self._command, self._port, ONE_THREAD, log, starter())
        self.starts += 1
        self.up = False

    def wait(self) -> None:
        """Wait until it answers.

        Raises:
            ServerError: It does not; the message ends with the end of its log.
        """
        try:
            self.server.wait(BOOT_SECONDS)
        except ServerError as error:
            tail = self.server.output()[-3000:]
            raise ServerError(f"{self.name}: {error}\n{tail}") from error
        self.up = True

    def kill(self) -> None:
        """Kill all its processes, as a machine's end does."""
        self.up = False
        self.server.close(at_once=True)


@dataclass
class Outcome:
    """What became of the streams.

    Attributes:
        asked: Streams begun, by kind.
        paths: Finished streams by the path that their answer tells.
        again: Streams asked for again because their drafter was killed.
        wrong: Answers that are not plain SGLang's.
        lost: Streams that failed although their drafter ran.
        kills: By member.
    """

    asked: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    again: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)


def _bodies(options: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    tokenizer = load_tokenizer(options.model)
    lengths = spread(options.prompts, 600, options.tokens)
    prompts = record_prompts(tokenizer, lengths, options.seed)
    return [
        (kind, {"text": text, "sampling_params": {**params, "max_new_tokens": 40 + i}})
        for (i, text), (kind, params) in zip(
            enumerate(prompts), cycle(KINDS.items()), strict=False
        )
    ]


async def _stream(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the last event of a stream that finished.

    Raises:
        VeriCacheError: It was refused, aborted or cut off.
    """
    last: dict[str, Any] = {}
    try:
        async with session.post(
            f"{url}/generate", json={**body, "stream": True}
        ) as reply:
            if reply.status != 200:
                raise VeriCacheError(f"HTTP {reply.status}: {await reply.text()}")
            async for last in events_of(reply):
                if "error" in last:
                    raise VeriCacheError(str(last["error"]))
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
        raise VeriCacheError(f"{type(error).__name__}: {error}") from error
    finish = last.get("meta_info", {}).get("finish_reason")
    if not finish or finish["type"] == "abort":
        raise VeriCacheError(f"ended with {finish}")
    return last


class Streams:
    """Streams at the drafters until the time is up.

    Args:
        bodies: (kind, body) of every request.
        wanted: Its tokens on plain SGLang.
    """

    def __init__(
        self,
        drafters: Sequence[Member],
        bodies: Sequence[tuple[str, dict[str, Any]]],
        wanted: Sequence[list[int]],
        seed: int,
    ) -> None:
        self.outcome = Outcome()
        self._drafters, self._bodies, self._wanted = drafters, bodies, wanted
        self._random = random.Random(seed)
        self._next = cycle(drafters)

    async def client(self, session: aiohttp.ClientSession, end: float) -> None:
        """Ask for one stream after another until ``end`` on the monotonic clock."""
        while time.monotonic() < end:
            at = self._random.randrange(len(self._bodies))
            self.outcome.asked[self._bodies[at][0]] += 1
            await self._answered(session, at)

    async def _answered(self, session: aiohttp.ClientSession, at: int) -> None:
        kind, body = self._bodies[at]
        while True:
            drafter = await self._running()
            started = drafter.starts
            try:
                last = await _stream(session, drafter.server.url, body)
            except VeriCacheError as error:
                if drafter.up and drafter.starts == started:
                    self.outcome.lost.append(f"{kind}: {error}"[:300])
                    return
                self.outcome.again += 1
                continue
            path = last["meta_info"].get("vericache", {}).get("path", "none")
            self.outcome.paths[path] += 1
            if last["output_ids"] != self._wanted[at]:
                self.outcome.wrong.append(f"{kind}, request {at}, {path}")
            return

    async def _running(self) -> Member:
        """Return the next drafter that runs."""
        while True:
            for _ in self._drafters:
                if (drafter := next(self._next)).up:
                    return drafter
            await asyncio.sleep(0.2)


async def _killer(
    members: Sequence[Member], outcome: Outcome, every: float, end: float
) -> None:
    """Kill a member every ``every`` seconds, and start another in its place.

    One that starts more slowly delays the next kill.
    """
    due = time.monotonic()
    for member in cycle(members):
        due = max(due + every, time.monotonic())
        if due > end:
            return
        await asyncio.sleep(due - time.monotonic())
        outcome.kills[member.name] += 1
        await asyncio.to_thread(member.kill)
        await asyncio.sleep(DOWN_SECONDS)
        member.start()
        await asyncio.to_thread(member.wait)


async def _run(
    options: argparse.Namespace,
    members: Sequence[Member],
    load: Streams,
) -> None:
    end = time.monotonic() + 60 * options.minutes
    async with open_session(ANSWER_SECONDS) as session:
        killing = asyncio.create_task(
            _killer(members, load.outcome, options.every, end)
        )
        clients = [load.client(session, end) for _ in range(options.at_once)]
        await asyncio.gather(*clients)
        await killing


def _held(members: Sequence[Member]) -> dict[str, int]:
    """Return what servers without requests still hold, after some time to let go."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        held = {
            f"{member.name} {name}": counters[name]
            for member in members
            for counters in [member.server.counters()]
            for name in (*HELD, "remote_guests")
            if counters.get(name)
        }
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(0.5)


def _measure(options: argparse.Namespace, results: Results) -> None:
    every = _bodies(options)
    engine = {**ENGINE, "max_total_tokens": options.slots}
    with served(described("plain", None, engine), options.model) as plain:
        alone = [plain.generate(body)["output_ids"] for _, body in every]
        with ThreadPoolExecutor(len(every)) as pool:
            together = list(pool.map(plain.generate, [body for _, body in every]))
    # Rows of a batch round differently than one alone; a near tie has no right answer.
    sure = [i for i, answer in enumerate(together) if answer["output_ids"] == alone[i]]
    bodies, wanted = [every[i] for i in sure], [alone[i] for i in sure]
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as running:
        name = running.enter_context(tempfile.TemporaryDirectory(prefix="vericache-"))
        stored = running.enter_context(tempfile.TemporaryDirectory())
        texts = [body["text"] for _, body in bodies]
        write(options.model, texts, stored, options.compressor)
        verifying = {"role": "verifier", "peer_bind": endpoint}
        named = {"verifier": (verifying, link(stored))}
        for path in options.paths.split(","):
            drafting = {"role": "drafter", "verifiers": endpoint, "remote_path": path}
            far = link(stored, options.far)
            named[f"drafter-{len(named)} ({path})"] = drafting, far
        members = []
        for each, (settings, store) in named.items():
            ours = {"compressor": options.compressor, **settings}
            members.append(Member(each, options, Path(name), ours, store))
            running.callback(members[-1].kill)
        for member in members:
            member.wait()
        load = Streams(members[1:], bodies, wanted, options.seed)
        asyncio.run(_run(options, members, load))
        held = _held(members)
        counters = {member.name: member.server.counters() for member in members}
    outcome = load.outcome
    results.figures = {
        "left_out_as_plain_sglang_differs_from_itself": len(every) - len(sure),
        "asked": dict(outcome.asked),
        "paths": dict(outcome.paths),
        "kills": dict(outcome.kills),
        "asked_again": outcome.again,
        "wrong": outcome.wrong,
        "lost": outcome.lost,
        "held": held,
        "counters_since_last_start": {
            name: {key: n for key, n in each.items() if key.startswith("remote_")}
            for name, each in counters.items()
        },
    }
    for failed in ("wrong", "lost", "held"):
        results.require(
            not results.figures[failed], f"{failed}: {results.figures[failed]}"
        )
    results.require(bool(outcome.kills), "no process was killed")


FAILOVER = Benchmark(
    about="A verifier and drafters under streams, one of all killed in turn. "
    "Fails where an answer differs from plain SGLang's, a stream ends although its "
    "drafter runs, or something is held at the end.",
    model=DEMO,
    seed=5,
    options={
        "minutes": (10.0, "of streams"),
        "at-once": (200, "streams"),
        "every": (60.0, "seconds between kills, and a start in between"),
        "prompts": (48, "different requests"),
        "tokens": (2000, "of the longest prompt"),
        "slots": (150_000, "of each server's KV pool"),
        "paths": ("p1,p2", "of each drafter, as --vericache-remote-path"),
        "far": (40.0, "MB/s from the store to each drafter, EMULATED"),
        "compressor": ("keynorm", "as --vericache-compressor"),
    },
    measure=_measure,
)
