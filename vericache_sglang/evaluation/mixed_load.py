"""Requests of every kind for one server, odd ones and control requests among them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from vericache_sglang.evaluation.attack import FATES, read_stream
from vericache_sglang.evaluation.fuzzing import CHAT, COMPLETION, GENERATE, Body, send
from vericache_sglang.evaluation.odd_requests import ODD, STRANGE

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping, Sequence

    from vericache_sglang.evaluation.attack import AttackTarget

Answers = list[tuple[str, str]]
"""(text, finish reason) of each choice."""

REGEX = "[A-Za-z ]{3,9}[0-9]{2}"

KINDS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": (GENERATE, {"ignore_eos": True}, {}),
    "to its end": (GENERATE, {}, {}),
    "stop strings": (GENERATE, {"stop": ['"', "e", "}"]}, {}),
    "stop tokens": (GENERATE, {"stop_token_ids": [20, 30, 40]}, {}),
    "stop pattern": (GENERATE, {"stop_regex": ["[0-9]{3}"], "ignore_eos": True}, {}),
    "a grammar": (GENERATE, {"regex": REGEX}, {}),
    "three answers": (GENERATE, {"n": 3, "ignore_eos": True}, {}),
    "biased": (GENERATE, {"logit_bias": {"20": 2.0, "30": -5.0}}, {}),
    "log-probabilities": (GENERATE, {}, {"return_logprob": True}),
    "a chat": (CHAT, {}, {}),
    "a completion": (COMPLETION, {}, {}),
    "sampled": (GENERATE, {"temperature": 0.8, "ignore_eos": True}, {}),
}
"""Healthy requests: route, parameters, other fields. All are greedy but the last."""

SAMPLED = "sampled"

LENGTH = 16
"""Output tokens of a request, at most."""

CONTROLS = ("flush", "metrics", "page", "pause", "retract", "weights")
"""Requests of an operator, between and while others run."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request that is to be sent.

    Attributes:
        kind: Of ``KINDS`` or ``CONTROLS``; "odd"; "ended" for a stream that may be.
        document: Index of the prompt; -1 without one.
        body: What is sent; None for a control request.
        fate: See ``FATES``; of a stream.
    """

    kind: str
    document: int = -1
    body: Body | None = None
    fate: str = "finish"


@dataclass
class LoadOutcome:
    """Outcomes of the requests.

    Attributes:
        asked: Requests by kind.
        statuses: Of odd requests; 0 where no answer was wanted or none came.
        ends: Finish reasons of streams.
        controls: Control requests by what came of them.
        lost: Healthy requests without an answer, with what came instead.
        wrong: Healthy requests with another answer than plain SGLang's.
    """

    asked: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    controls: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def healthy(kind: str, prompt: str) -> Body:
    """Return the body of a healthy request."""
    path, params, more = KINDS[kind]
    params = {"temperature": 0, **params}
    if path == GENERATE:
        content = {
            "text": prompt,
            "sampling_params": {"max_new_tokens": LENGTH, **params},
            **more,
        }
    else:
        content = {"model": "default", "max_tokens": LENGTH, **params}
        said = [{"role": "user", "content": prompt}]
        content |= {"messages": said} if path == CHAT else {"prompt": prompt}
    return Body(path, json.dumps(content).encode())


def odd_bodies(prompts: Sequence[str], ids: list[int]) -> list[Body]:
    """Return every odd request once.

    Args:
        prompts: Healthy ones, in turn.
        ids: Tokens of the first.
    """
    found = [pair for odd in ODD for pair in odd.bodies(prompts[0], ids)]
    for i, (params, fields) in enumerate(sum(STRANGE.values(), ())):
        params = {"temperature": 0, "max_new_tokens": 8, **params}
        text = prompts[i % len(prompts)]
        found.append((GENERATE, {"text": text, **fields, "sampling_params": params}))
    return [Body(path, json.dumps(content).encode()) for path, content in found]


def drawn(
    rng: random.Random, prompts: Sequence[str], odd: Sequence[Body], controls: int
) -> Iterator[Asked]:
    """Yield requests without end: seven of ten healthy, two odd, one a stream.

    Args:
        rng: Decides everything.
        prompts: The first ones are asked about most.
        odd: Bodies that may be refused.
        controls: A control request comes after so many; 0: never.
    """
    count = 0
    while True:
        count += 1
        if controls and count % controls == 0:
            # Its KV is of the weights before: new ones leave the store alone.
            known = CONTROLS if count >= 20 * controls else CONTROLS[:-1]
            yield Asked(rng.choice(known))
        at = int(len(prompts) * rng.random() ** 2)
        luck = rng.random()
        if luck < 0.2:
            yield Asked("odd", -1, rng.choice(odd))
        elif luck < 0.3:
            body = healthy("plain", prompts[at])
            yield Asked("ended", at, body, rng.choice(FATES))
        else:
            kind = rng.choice([*KINDS])
            yield Asked(kind, at, healthy(kind, prompts[at]))


class Client:
    """Sends requests to one server and checks the replies.

    Args:
        wanted: Plain SGLang's answers by kind and prompt.
        seen: Filled.
        model: Folder that control requests load weights from.
    """

    def __init__(
        self,
        target: AttackTarget,
        session: aiohttp.ClientSession,
        wanted: Mapping[tuple[str, int], Answers],
        seen: LoadOutcome,
        model: str,
    ) -> None:
        self._target = target
        self._session = session
        self._wanted = wanted
        self._seen = seen
        self._model = model
        self._one_operator = asyncio.Lock()

    async def ask(self, asked: Asked) -> None:
        """Send one request and record its outcome."""
        self._seen.asked[asked.kind] += 1
        try:
            if asked.body is None:
                async with self._one_operator:
                    await self._control(asked.kind)
            elif asked.kind == "odd":
                reply = await send(self._session, self._target.url, asked.body)
                self._seen.statuses[reply.status] += 1
            elif asked.kind == "ended":
                await self._stream(asked, asked.body)
            else:
                await self._healthy(asked, asked.body)
        except (aiohttp.ClientError, TimeoutError) as error:
            self._seen.lost.append(f"{asked.kind} {asked.fate}: {error!r}"[:600])

    async def _healthy(self, asked: Asked, body: Body) -> None:
        reply = await send(self._session, self._target.url, body, 300.0)
        got = reply.answers()
        if reply.status != 200 or not got or any("abort" in end for _, end in got):
            self._seen.lost.append(f"{asked.kind}: {reply}"[:600])
        elif asked.kind == SAMPLED:
            if any("length" not in end for _, end in got):
                self._seen.wrong.append(f"{asked.kind}: {got}"[:600])
        elif got != self._wanted[asked.kind, asked.document]:
            wanted = self._wanted[asked.kind, asked.document]
            self._seen.wrong.append(f"{asked.kind}: {got} is not {wanted}"[:600])

    async def _stream(self, asked: Asked, body: Body) -> None:
        ((wanted, _),) = self._wanted["plain", asked.document]
        rid = f"stream-{self._seen.asked['ended']:07d}"
        content = {**json.loads(body.data), "rid": rid}
        fate = asked.fate.removesuffix("_early")
        first = 1 if asked.fate.endswith("_early") else 3
        text, reason = await read_stream(
            self._session, self._target, content, fate, first
        )
        self._seen.ends[reason] += 1
        whole = reason == "length"
        if (whole and text != wanted) or not wanted.startswith(text):
            self._seen.wrong.append(f"stream {reason}: {text!r} is not {wanted!r}")
        if not whole and fate == "finish":
            self._seen.lost.append(f"stream {asked.fate}: {reason}")

    async def _control(self, name: str) -> None:
        done = "done"
        if name == "flush":
            # Refused while requests run.
            status = await self._post("/flush_cache", {})
            done = "done" if status == 200 else "refused"
        elif name in ("metrics", "page"):
            path = "/metrics" if name == "metrics" else "/vericache/state"
            async with self._session.get(self._target.url + path) as reply:
                await reply.read()
                done = "done" if reply.status == 200 else f"status {reply.status}"
        elif name == "weights":
            body = {"model_path": self._model}
            status = await self._post("/update_weights_from_disk", body)
            done = "done" if status == 200 else f"status {status}"
        else:
            mode = "retract" if name == "retract" else "in_place"
            await self._post("/pause_generation", {"mode": mode})
            await asyncio.sleep(0.05)
            await self._post("/continue_generation", {})
        self._seen.controls[f"{name} {done}"] += 1

    async def _post(self, path: str, body: dict[str, Any]) -> int:
        async with self._session.post(self._target.url + path, json=body) as reply:
            await reply.read()
            return int(reply.status)


async def ask_all(
    client: Client, requests: Iterator[Asked], count: int, at_once: int
) -> None:
    """Ask the next ``count`` requests, ``at_once`` at a time."""
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await client.ask(next(requests))

    await asyncio.gather(*(worker() for _ in range(at_once)))
