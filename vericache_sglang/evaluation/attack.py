"""Hostile requests against a live server, with healthy ones among them."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from vericache_sglang.evaluation.client import events_of, open_session
from vericache_sglang.evaluation.fuzzing import CUT, Reply, send
from vericache_sglang.evaluation.server import OwnServer, ServerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import aiohttp

    from vericache_sglang.evaluation.fuzzing import Body
    from vericache_sglang.evaluation.server import Server

AT_ONCE = 8

REFUSED = b"not supported with speculative decoding"
"""SGLang refuses beams and sampling masks under every speculative algorithm."""

HELD = ("kept_slots", "staging_slots", "staging_bytes", "host_bytes", "running")
"""VeriCache's counters of resources held by requests; all are 0 when none runs."""

FATES = ("finish", "finish", "abort", "hang_up", "abort_early", "hang_up_early")
"""What happens to a stream; early is after a time that may end before its prefill."""


class AttackTarget:
    """A running server and its processes.

    Args:
        server: Up; its processes are monitored where it was started here.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = server.url
        self._pids = self._processes()

    def require_alive(self) -> None:
        """Check that every process is there and that the server answers.

        Raises:
            ServerError: It does not.
        """
        if self._pids - self._processes():
            raise ServerError(f"{self.url}: processes ended")
        if not self.server.is_healthy():
            raise ServerError(f"{self.url} does not answer")

    async def settle(self, seconds: float = 60.0) -> dict[str, int]:
        """Wait until nothing is held, flush, and return what is held after ``seconds``.

        Raises:
            ServerError: The prefix cache cannot be flushed: something still runs.
        """
        for _ in range(int(seconds / 0.2)):
            counters = await asyncio.to_thread(self.server.counters)
            held = {name: counters[name] for name in HELD if counters.get(name)}
            if not held:
                break
            await asyncio.sleep(0.2)
        await asyncio.to_thread(self.server.flush)
        return held

    def tracebacks(self) -> list[str]:
        """Return the tracebacks in the log that go through VeriCache's own files."""
        if not isinstance(self.server, OwnServer):
            return []
        # A traceback goes on while lines are indented, and ends with its exception.
        blocks = r"Traceback .*\n(?:[ \t].*\n)+.*"
        found = re.findall(blocks, self.server.output())
        return [block for block in found if "vericache_" in block]

    def _processes(self) -> frozenset[int]:
        if not isinstance(self.server, OwnServer):
            return frozenset()
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.server.process.pid)
            family = [first, *first.children(recursive=True)]
            return frozenset(
                each.pid for each in family if each.status() != psutil.STATUS_ZOMBIE
            )
        return frozenset()


@dataclass
class Tally:
    """What an attack saw.

    Attributes:
        statuses: How often each status came back, from the server under test.
        probes: Healthy requests answered among the bodies.
        compared: Greedy answers to bodies that were compared with plain SGLang's.
        refused: Bodies that plain SGLang answers and a speculative algorithm may not.
        unlike: Bodies that the two servers answer differently, with both answers.
        wrong: Healthy requests with another answer than before.
        unanswered: Bodies without an answer within the time allowed, from any server.
        errors: Statuses of 500 and more where no plain SGLang is beside it.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    probes: int = 0
    compared: int = 0
    refused: int = 0
    unlike: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def probe(prompt: str) -> dict[str, Any]:
    """Return a healthy greedy request that VeriCache drafts for."""
    params = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
    return {"text": prompt, "sampling_params": params}


def references(server: Server, prompts: Sequence[str]) -> dict[str, str]:
    """Ask every healthy request once; return the answers by prompt.

    Raises:
        ServerError: One is refused.
    """
    return {prompt: server.generate(probe(prompt))["text"] for prompt in prompts}


async def attack(
    targets: Sequence[AttackTarget],
    bodies: Sequence[Body],
    probes: Mapping[str, str],
    per_round: int = 20,
) -> Tally:
    """Send every body to every target, and healthy requests along with them.

    Args:
        targets: The server under test, then, if it is to be compared, plain SGLang.
        bodies: What to send.
        probes: Prompts of healthy requests, with their reference texts.
        per_round: Bodies between two looks at the processes.

    Returns:
        What was seen.

    Raises:
        ServerError: A server died or hangs; the message holds the round's bodies.
    """
    tally, healthy = Tally(), list(probes.items())
    async with open_session(120.0) as session:
        for at in range(0, len(bodies), per_round):
            some = bodies[at : at + per_round]
            pair = [healthy[(at // per_round + i) % len(healthy)] for i in range(2)]
            replies: list[list[Reply]] = []
            for target in reversed(targets):
                replies.append(await _round(session, target, some, pair, tally))
                try:
                    target.require_alive()
                except ServerError as error:
                    listed = "\n".join(map(str, some))
                    raise ServerError(
                        f"{error}\nafter it was sent\n{listed}"
                    ) from error
            for body, *got in zip(some, *reversed(replies), strict=True):
                await _judge(session, targets, body, got, tally)
    return tally


async def _round(
    session: aiohttp.ClientSession,
    target: AttackTarget,
    bodies: Sequence[Body],
    pair: Sequence[tuple[str, str]],
    tally: Tally,
) -> list[Reply]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(body: Body) -> Reply:
        async with gate:
            return await send(session, target.url, body)

    async def healthy(prompt: str, wanted: str) -> None:
        async with session.post(f"{target.url}/generate", json=probe(prompt)) as got:
            reply = Reply(got.status, await got.read())
        text, reason = (reply.answers() or [("", f"status {reply.status}")])[0]
        tally.probes += 1
        ended = "abort" in reason and any(body.aborts_all for body in bodies)
        if text != wanted and not (ended and wanted.startswith(text.rstrip("\ufffd"))):
            tally.wrong.append(
                f"{target.url}: {text!r} ({reason}) is not {wanted!r}, while it was "
                f"sent {bodies}"
            )

    waiting = [healthy(*each) for each in pair]
    sent = asyncio.gather(*(one(body) for body in bodies))
    await asyncio.gather(*waiting)
    return await sent


async def _judge(
    session: aiohttp.ClientSession,
    targets: Sequence[AttackTarget],
    body: Body,
    replies: Sequence[Reply],
    tally: Tally,
) -> None:
    """Compare the replies to one body; where they differ it is sent again, alone."""
    ours = replies[0]
    tally.statuses[ours.status] += 1
    if body.sending in CUT:
        return
    if not all(reply.status for reply in replies):
        tally.unanswered.append(str(body)[:300])
    if len(targets) == 1:
        if ours.status >= 500:
            tally.errors.append(f"{ours.status} {body}"[:600])
        return
    if _alike(body, replies, tally):
        return
    replies = [await send(session, target.url, body) for target in targets]
    if not _alike(body, replies, tally):
        tally.unlike.append(
            f"{body} got {replies[0].status} {replies[0].data[:600]!r}, plain "
            f"SGLang {replies[1].status} {replies[1].data[:600]!r}"
        )


def _alike(body: Body, replies: Sequence[Reply], tally: Tally) -> bool:
    ours, plain = replies
    if ours.status == 400 and b'"vericache"' in body.data:
        return True  # an option that only VeriCache reads, and refuses
    if ours.status == 400 and REFUSED in ours.data:
        tally.refused += 1
        return True
    if ours.status != plain.status:
        return False
    mine, theirs = ours.answers(), plain.answers()
    if not body.greedy or mine is None or theirs is None:
        return True
    tally.compared += 1
    return mine == theirs


async def streams(
    target: AttackTarget, count: int, probes: Mapping[str, str], seed: int
) -> tuple[dict[str, int], list[str]]:
    """Open ``count`` streams at once and end two thirds of them at random.

    Args:
        probes: Prompts of healthy requests, with their reference texts.
        seed: Other seeds choose other prompts, fates and moments.

    Returns:
        How many streams met each end, and what went wrong: a finished stream with
        another text than its reference, an ended one whose text is no beginning of it.
    """
    rng = random.Random(seed)
    plans = [
        (rng.choice(list(probes)), rng.choice(FATES), rng.randint(1, 20), rng.random())
        for _ in range(count)
    ]
    ends: Counter[str] = Counter()
    wrong: list[str] = []

    async def one(index: int, prompt: str, fate: str, events: int, wait: float) -> None:
        wanted, name = probes[prompt], f"stream-{seed}-{index:06d}"
        body = {**probe(prompt), "rid": name}
        reader = asyncio.create_task(read_stream(session, target, body, fate, events))
        if fate.endswith("early"):
            await asyncio.sleep(wait * count / 25)
            if fate == "hang_up_early":
                reader.cancel()
            elif not reader.done():
                await _abort(session, target, name)
        try:
            text, reason = await reader
        except asyncio.CancelledError:
            ends["hung up on"] += 1
            return
        ends[reason] += 1
        right = text == wanted if reason == "length" else wanted.startswith(text)
        if not right or reason not in ("length", "abort", "hung up on"):
            wrong.append(f"{name} ({fate}): {text!r} ({reason}) is not {wanted!r}")

    async with open_session(600.0) as session:
        await asyncio.gather(*(one(i, *plan) for i, plan in enumerate(plans)))
    return dict(ends), wrong


async def _abort(
    session: aiohttp.ClientSession, target: AttackTarget, name: str
) -> None:
    async with session.post(f"{target.url}/abort_request", json={"rid": name}):
        pass


async def read_stream(
    session: aiohttp.ClientSession,
    target: AttackTarget,
    body: dict[str, Any],
    fate: str,
    events: int,
) -> tuple[str, str]:
    """Read one stream to its end; return its text and its finish reason."""
    text, reason, seen = "", "no end", 0
    url = f"{target.url}/generate"
    async with session.post(url, json={**body, "stream": True}) as reply:
        async for event in events_of(reply):
            if "error" in event:
                return text, str(event["error"])
            seen += 1
            text = event["text"]
            finish = event["meta_info"]["finish_reason"]
            if finish is not None:
                reason = finish["type"]
            elif fate == "hang_up" and seen == events:
                reason = "hung up on"
                reply.close()
                break
            elif fate == "abort" and seen == events:
                await _abort(session, target, body["rid"])
    # An unfinished character at the end of an aborted text is not in the reference.
    return (text if reason == "length" else text.rstrip("\ufffd")), reason
