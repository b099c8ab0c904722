"""HTTP by hand, because a client library would refuse to send what is sent here."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fuzzing.bodies import Body

LINE_LIMIT = 2**26


@dataclass(frozen=True)
class Reply:
    """What came back.

    Attributes:
        status: HTTP status; 0 where the connection ended or was ended without one.
        data: The body.
    """

    status: int
    data: bytes

    def answers(self) -> list[tuple[str, str]] | None:
        """Return (text, finish reason) of each choice; None where it has none."""
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            content = json.loads(self.data)
            if isinstance(content, dict) and "choices" in content:
                return [_choice(each) for each in content["choices"]]
            outputs = content if isinstance(content, list) else [content]
            return [
                (each["text"], str(each["meta_info"]["finish_reason"]))
                for each in outputs
            ]
        return None


def _choice(choice: dict[str, Any]) -> tuple[str, str]:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return (text or "", str(choice["finish_reason"]))


async def post(url: str, path: str, content: object, seconds: float = 60) -> Reply:
    """Send a right request and return its reply."""
    head = _head(url, "POST", path, json.dumps(content).encode(), "application/json")
    return await _within(seconds, url, head)


async def send(url: str, body: Body, seconds: float = 60) -> Reply:
    """Send a body as it wants to be sent.

    Args:
        url: The server's, ``http://host:port``.
        body: What to send.
        seconds: The connection is closed after so long; the status is then 0.
    """
    data = _head(url, body.method, body.path, body.data, body.content_type)
    return await _within(seconds, url, data, body.sending)


async def stream(url: str, content: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a ``/generate`` stream; leaving the loop hangs up."""
    data = json.dumps({**content, "stream": True}).encode()
    reader, writer = await _connect(url)
    try:
        writer.write(_head(url, "POST", "/generate", data, "application/json"))
        await writer.drain()
        await reader.readuntil(b"\r\n\r\n")
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
            elif line.startswith(b"data: [DONE]"):
                return
    finally:
        writer.transport.abort()


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port, limit=LINE_LIMIT)


def _head(
    url: str, method: str, path: str, data: bytes, content_type: str | None
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {urlsplit(url).netloc}"]
    if content_type is not None:
        lines.append(f"Content-Type: {content_type}")
    lines += [f"Content-Length: {len(data)}", "Connection: close", "", ""]
    return "\r\n".join(lines).encode() + data


async def _within(
    seconds: float, url: str, data: bytes, sending: str = "whole"
) -> Reply:
    try:
        reader, writer = await _connect(url)
    except OSError:
        return Reply(0, b"")
    try:
        async with asyncio.timeout(seconds):
            return await _exchange(reader, writer, data, sending)
    except (TimeoutError, ConnectionError):
        return Reply(0, b"")
    finally:
        writer.transport.abort()


async def _exchange(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    data: bytes,
    sending: str,
) -> Reply:
    if sending == "pipelined":
        data = data.replace(b"Connection: close", b"Connection: keep-alive") + data
    if sending in ("half", "pieces"):
        half = len(data) - len(data) // 4
        writer.write(data[:half])
        await writer.drain()
        await asyncio.sleep(0.05)
        if sending == "half":
            return Reply(0, b"")
        data = data[half:]
    writer.write(data)
    await writer.drain()
    if sending == "hang_up":
        await asyncio.sleep(0.02)
        return Reply(0, b"")
    if sending == "hang_up_late":
        await reader.read(500)
        return Reply(0, b"")
    raw = await reader.read()
    return _parse(raw)


def _parse(raw: bytes) -> Reply:
    """Take the first reply of a connection apart."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)
    if len(status) < 2 or not status[1].isdigit():
        return Reply(0, raw)
    headers = dict(
        line.lower().split(b": ", 1)
        for line in head.split(b"\r\n")[1:]
        if b": " in line
    )
    if headers.get(b"transfer-encoding") != b"chunked":
        length = int(headers.get(b"content-length", len(rest)))
        return Reply(int(status[1]), rest[:length])
    data = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size or b"0", 16)
        if length == 0:
            break
        data, rest = data + rest[:length], rest[length + 2 :]
    return Reply(int(status[1]), data)
