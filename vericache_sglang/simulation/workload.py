"""Workloads: a closed loop, Poisson arrivals, or a trace from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import count, islice
from random import Random
from typing import TYPE_CHECKING

from vericache_sglang.errors import ConfigError
from vericache_sglang.simulation.requests import SimulatedRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMix:
    """Distribution of the requests of a generated workload.

    Attributes:
        contexts: Prompt lengths to draw from, in tokens, each >= 1.
        output: Tokens each emits, >= 1.
        accept: Mean acceptance probability of a draft, in [0, 1].
        spread: Largest deviation of a request from ``accept``, >= 0.
        share: Number of consecutive requests with the same prompt, >= 1.
        seed: Seed of lengths, probabilities and arrival times.
    """

    contexts: tuple[int, ...]
    output: int
    accept: float
    spread: float = 0.0
    share: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.contexts or min(self.contexts) < 1:
            raise ConfigError(f"--context must be >= 1 token, got {self.contexts}")
        if self.output < 1:
            raise ConfigError(f"--output must be >= 1 token, got {self.output}")
        if not 0 <= self.accept <= 1:
            raise ConfigError(f"--accept must be in [0, 1], got {self.accept}")
        if self.spread < 0:
            raise ConfigError(f"--accept-spread must be >= 0, got {self.spread}")
        if self.share < 1:
            raise ConfigError(f"--share must be >= 1 request, got {self.share}")


@dataclass(frozen=True, slots=True)
class Workload:
    """A stream of requests, in order of arrival.

    Attributes:
        stream: Returns the stream from its first request; the same every time.
        finish: Finished requests after which the run ends; the stream may be endless.
        warm: Requests that finish before the measurement starts; 0: none.
        concurrency: Most requests in the server at once; None: limited by memory.
    """

    stream: Callable[[], Iterator[SimulatedRequest]]
    finish: int
    warm: int = 0
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.finish < 1:
            raise ConfigError(f"--requests must be >= 1, got {self.finish}")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"--concurrency must be >= 1, got {self.concurrency}")

    def sample(self) -> list[SimulatedRequest]:
        """Return the first ``finish`` requests of the stream."""
        return list(islice(self.stream(), self.finish))


def _requests(mix: RequestMix) -> Iterator[SimulatedRequest]:
    random = Random(mix.seed)
    context = mix.contexts[0]
    for index in count():
        if index % mix.share == 0:
            context = random.choice(mix.contexts)
        accept = mix.accept + random.uniform(-mix.spread, mix.spread)
        yield SimulatedRequest(
            rid=f"r{index}",
            prompt=context,
            output=mix.output,
            accept=min(1.0, max(0.0, accept)),
            group=f"g{index // mix.share}" if mix.share > 1 else "",
        )


def closed_loop(
    mix: RequestMix, finish: int, *, warm: int = 0, concurrency: int | None = None
) -> Workload:
    """Return an endless queue: every finished request is replaced at once."""
    return Workload(lambda: _requests(mix), finish, warm, concurrency)


def poisson(mix: RequestMix, requests: int, per_s: float) -> Workload:
    """Return requests with Poisson arrivals.

    Args:
        mix: Distribution of the requests.
        requests: Number of requests.
        per_s: Mean arrivals per second, > 0.
    """
    if not per_s > 0:
        raise ConfigError(f"--rate must be > 0 requests/s, got {per_s}")

    def stream() -> Iterator[SimulatedRequest]:
        random, now = Random(mix.seed + 1), 0.0
        for request in islice(_requests(mix), requests):
            now += random.expovariate(per_s)
            yield replace(request, arrival_s=now)

    return Workload(stream, requests)


def trace(path: Path, accept: float) -> Workload:
    """Read a trace: one JSON object a line, in any order.

    Args:
        path: Each line has ``arrival_s``, ``prompt_tokens``, ``output_tokens`` and may
            have ``p``, the acceptance probability, and ``group``.
        accept: p of the lines without one.

    Raises:
        ConfigError: The file cannot be read, or a line has another format.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path}: {error}") from error
    found = [
        _traced(line, f"--trace {path}, line {number}", number, accept)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise ConfigError(f"--trace {path} holds no request")
    found.sort(key=lambda request: request.arrival_s)
    return Workload(lambda: iter(found), len(found))


def _traced(line: str, where: str, number: int, accept: float) -> SimulatedRequest:
    try:
        fields = json.loads(line)
        request = SimulatedRequest(
            rid=f"t{number}",
            arrival_s=float(fields["arrival_s"]),
            prompt=int(fields["prompt_tokens"]),
            output=int(fields["output_tokens"]),
            accept=float(fields.get("p", accept)),
            group=str(fields.get("group", "")),
        )
    except KeyError as error:
        raise ConfigError(f"{where}: {error} is missing") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if request.prompt < 1 or request.output < 1 or not 0 <= request.accept <= 1:
        raise ConfigError(f"{where}: tokens must be >= 1 and p in [0, 1]")
    if not 0 <= request.arrival_s < float("inf"):
        raise ConfigError(f"{where}: arrival_s must be >= 0")
    return request
