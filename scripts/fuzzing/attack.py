"""Rounds of hostile bodies, with healthy requests among them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fuzzing.target import Target, TargetError
from fuzzing.wire import Reply, post, send

if TYPE_CHECKING:
    from fuzzing.bodies import Body

AT_ONCE = 8

REFUSED = b"not supported with speculative decoding"
"""SGLang refuses beams and sampling masks under every speculative algorithm."""

CUT = ("half", "hang_up", "hang_up_late")
"""Ways of sending a body after which nobody waits for the answer."""


@dataclass
class Tally:
    """What an attack saw.

    Attributes:
        statuses: How often each status came back, from the server under test.
        probes: Healthy requests answered among the bodies.
        compared: Greedy answers to bodies that were compared with plain SGLang's.
        unlike: Bodies that the two servers answer differently, with both answers.
        wrong: Healthy requests with another answer than before.
        refused: Bodies that plain SGLang answers and a speculative algorithm may not.
        unanswered: Bodies without an answer within the time allowed, from any server.
        errors: Statuses of 500 and more where nothing says what plain SGLang does.
    """

    statuses: dict[int, int] = field(default_factory=dict)
    probes: int = 0
    compared: int = 0
    unlike: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    refused: int = 0
    unanswered: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def probe(prompt: str) -> dict[str, Any]:
    """Return a healthy greedy request; one that is drafted for."""
    params = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
    return {"text": prompt, "sampling_params": params}


async def references(target: Target, prompts: list[str]) -> list[str]:
    """Ask every healthy request once.

    Raises:
        TargetError: One is refused.
    """
    texts = []
    for prompt in prompts:
        reply = await post(target.url, "/generate", probe(prompt))
        answers = reply.answers()
        if reply.status != 200 or answers is None:
            raise TargetError(f"{target.name}: {reply.status} {reply.data[:300]!r}")
        texts.append(answers[0][0])
    return texts


async def attack(
    targets: list[Target],
    bodies: list[Body],
    probes: dict[str, str],
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
        TargetError: A server died or hangs; the message holds the round's bodies.
    """
    tally = Tally()
    healthy = list(probes.items())
    for at in range(0, len(bodies), per_round):
        some = bodies[at : at + per_round]
        pair = [healthy[(at // per_round + i) % len(healthy)] for i in range(2)]
        replies = []
        for target in reversed(targets):
            replies.append(await _round(target, some, pair, tally))
            try:
                target.require_alive()
            except TargetError as error:
                listed = "\n".join(f"{at + i}: {body}" for i, body in enumerate(some))
                raise TargetError(f"{error}\nwhile it was sent\n{listed}") from error
        for i, body in enumerate(some):
            await _judge(
                targets, at + i, body, [each[i] for each in replies][::-1], tally
            )
    return tally


async def _round(
    target: Target, bodies: list[Body], pair: list[tuple[str, str]], tally: Tally
) -> list[Reply]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(body: Body) -> Reply:
        async with gate:
            return await send(target.url, body)

    async def healthy(prompt: str, wanted: str) -> None:
        reply = await post(target.url, "/generate", probe(prompt), 120)
        answers = reply.answers() or [("", f"status {reply.status}")]
        text, reason = answers[0]
        tally.probes += 1
        ended = "abort" in reason and any(body.aborts_all for body in bodies)
        if text != wanted and not (ended and wanted.startswith(text.rstrip("\ufffd"))):
            tally.wrong.append(
                f"{target.name}: {text!r} ({reason}) is not {wanted!r}, while it was "
                f"sent {bodies}"
            )

    waiting = [healthy(*each) for each in pair]
    replies, *_ = await asyncio.gather(
        asyncio.gather(*(one(body) for body in bodies)), *waiting
    )
    return list(replies)


async def _judge(
    targets: list[Target], index: int, body: Body, replies: list[Reply], tally: Tally
) -> None:
    """Compare the replies to one body; where they differ it is sent again, alone."""
    ours = replies[0]
    tally.statuses[ours.status] = tally.statuses.get(ours.status, 0) + 1
    if body.sending in CUT:
        return
    if not all(reply.status for reply in replies):
        tally.unanswered.append(f"{index}: {body.path} {body.changes}")
    if len(targets) == 1:
        if ours.status >= 500:
            tally.errors.append(f"{index}: {ours.status} {body}")
        return
    if _alike(body, *replies, tally):
        return
    replies = [await send(target.url, body) for target in targets]
    if not _alike(body, *replies, tally):
        tally.unlike.append(
            f"{index}: {body} got {replies[0].status} {replies[0].data[:600]!r}, plain "
            f"SGLang {replies[1].status} {replies[1].data[:600]!r}"
        )


def _alike(body: Body, ours: Reply, plain: Reply, tally: Tally) -> bool:
    if ours.status == 400 and b'"vericache"' in body.data:
        return True  # a wish that only ours reads, and refuses
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
