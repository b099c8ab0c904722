"""The client against a server whose every event is known.

Nothing here depends on how long something takes: the server holds answers back until as
many requests have arrived as their bodies say (``until``).
"""

import asyncio
import json
import threading

import pytest
from aiohttp import web

from vericache_sglang.evaluation.client import closed_loop, open_loop, replay


class Scripted:
    """Answers on a thread of its own, after a script; counts who is there at once."""

    def __init__(self):
        self.running = self.peak = 0
        self.bodies = []
        self._used = []
        self._arrived = asyncio.Condition()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(120)

    async def generate(self, request):
        if request.transport in self._used:  # as one that was idle for too long
            request.transport.abort()
        self._used.append(request.transport)
        body = await request.json()
        self.bodies.append(body)
        async with self._arrived:
            self._arrived.notify_all()
        if body["text"] == "refuse":
            return web.json_response({"error": "too long"}, status=400)
        self.running += 1
        self.peak = max(self.peak, self.running)
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        async with self._arrived:
            until = body.get("until", 0)
            await self._arrived.wait_for(lambda: len(self.bodies) >= until)
        steps = body.get("steps", [1, 3])
        for i, tokens in enumerate(steps):
            last = i == len(steps) - 1 and body["text"] != "cut"
            await reply.write(b"data: " + json.dumps(event(tokens, last)).encode())
            await reply.write(b"\n\n")
        if body["text"] == "fail":
            failure = {"error": {"message": "no memory"}}
            await reply.write(b"data: " + json.dumps(failure).encode() + b"\n\n")
        self.running -= 1
        await reply.write(b"data: [DONE]\n\n")
        return reply

    def _run(self):
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.run_forever()

    async def _serve(self):
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._ready.set()

    def close(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(120)


def event(tokens, last):
    return {
        "text": "x" * 100_000,  # longer than a line a stream reader expects
        "output_ids": list(range(tokens)),
        "meta_info": {
            "completion_tokens": tokens,
            "prompt_tokens": 11,
            "cached_tokens": 4,
            "finish_reason": {"type": "length"} if last else None,
            "vericache": {"cycles": 2},
        },
    }


@pytest.fixture
def scripted():
    server = Scripted()
    yield server
    server.close()


def test_every_burst_is_written_down(scripted):
    told = []
    body = {"text": "a", "steps": [0, 1, 1, 4]}
    done = closed_loop(scripted.url, [body], 1, lambda: told.append(1), 30)
    (answer,) = done.answers
    assert [tokens for _, tokens in answer.times] == [1, 4]
    (first, _), (second, _) = answer.times
    assert 0 <= answer.sent <= first <= second <= answer.ended
    assert done.seconds == answer.ended - answer.sent
    assert answer.ids == (0, 1, 2, 3)
    assert (answer.prompt_tokens, answer.cached_tokens) == (11, 4)
    assert answer.drafting == {"cycles": 2}
    assert answer.error == ""
    assert told == [1]
    assert scripted.bodies[0]["stream"] is True


def test_a_closed_loop_keeps_so_many_running_and_the_order(scripted):
    bodies = [{"text": str(i), "steps": [i + 1], "until": 3} for i in range(7)]
    done = closed_loop(scripted.url, bodies, 3, lambda: None, 120)
    assert scripted.peak == 3
    assert [len(answer.ids) for answer in done.answers] == list(range(1, 8))


def test_an_open_loop_sends_when_it_is_time_however_many_run(scripted):
    bodies = [{"text": str(i), "steps": [1] * 6, "until": 4} for i in range(4)]
    arrivals = [0.0, 0.05, 0.1, 0.15]
    done = open_loop(scripted.url, bodies, arrivals, lambda: None, 120)
    assert [answer.sent for answer in done.answers] == arrivals
    assert scripted.peak == 4
    last = max(arrivals)
    assert all(answer.times[0][0] >= last for answer in done.answers)


def test_a_replay_waits_for_the_answer_before_and_the_recorded_pause(scripted):
    """Both sessions run at once; within one, requests follow each other."""
    bodies = [{"text": str(i), "steps": [i + 1], "until": 2} for i in range(3)]
    sessions, starts = [[(0, 0.0), (2, 0.05)], [(1, 0.1)]], [0.0, 0.1]
    done = replay(scripted.url, bodies, sessions, starts, lambda: None, 120)
    first, other, second = done.answers
    assert (first.sent, other.sent) == (0.0, 0.2)
    assert second.sent == pytest.approx(first.ended + 0.05)
    assert [len(answer.ids) for answer in done.answers] == [1, 2, 3]
    assert scripted.peak == 2


@pytest.mark.parametrize(
    ("text", "named"),
    [("refuse", "HTTP 400"), ("fail", "no memory"), ("cut", "without a finish")],
)
def test_what_went_wrong_is_told(scripted, text, named):
    done = closed_loop(scripted.url, [{"text": text}], 1, lambda: None, 120)
    assert named in done.answers[0].error


def test_a_server_that_is_gone_or_slow_is_an_error_not_an_exception(scripted):
    slow = {"text": "a", "until": 99}
    (answer,) = closed_loop(scripted.url, [slow], 1, lambda: None, 0.3).answers
    assert "Timeout" in answer.error
    gone = "http://127.0.0.1:9"
    (answer,) = closed_loop(gone, [slow], 1, lambda: None, 60).answers
    assert "ClientConnector" in answer.error
