"""Runs a comparison: tuning, alternating passes of every system, open loops, KL."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from tqdm import tqdm  # type: ignore[import-untyped]

from vericache_sglang.evaluation.altered import forced_tokens
from vericache_sglang.evaluation.client import closed_loop, open_loop, replay
from vericache_sglang.evaluation.divergence import divergence
from vericache_sglang.evaluation.figures import (
    accepted,
    latencies,
    middle,
    mismatches,
    pass_figures,
)
from vericache_sglang.evaluation.server import ServerError
from vericache_sglang.evaluation.systems import REFERENCE
from vericache_sglang.evaluation.workload import arrivals

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from vericache_sglang.evaluation.client import Pass
    from vericache_sglang.evaluation.server import Server
    from vericache_sglang.evaluation.systems import System
    from vericache_sglang.evaluation.workload import BenchRequest

    Loop = Callable[..., Pass]
    """A loop of ``client``, without the URL and the requests."""

    Session = Sequence[tuple[int, float]]
    """Request's index, and seconds after the session's previous answer, in order."""

COUNTED = (
    *("accepted_per_verify", "proposals_per_row", "moved_bytes_per_token"),
    *("link_share", "kv_read_share"),
)
"""Figures of a pass for which the median over rounds is reported."""


class Servers(Protocol):
    """What provides the servers of systems."""

    def ready(self, system: System) -> tuple[Server, bool]:
        """See ``Fleet.ready``."""


class Experiment:
    """Measures systems in alternation; a failed system is skipped from then on.

    Args:
        options: The checked command line.
        systems: Systems in the order of the first round.
        requests: Requests of every pass, the same for all systems.
        fleet: Provides the servers.
        sessions: Recorded sessions, replayed at every rate too, from an empty prefix
            cache; their requests' indices are those of ``requests``.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        systems: Sequence[System],
        requests: Sequence[BenchRequest],
        fleet: Servers,
        sessions: Sequence[Session] = (),
    ) -> None:
        self._options = options
        self._systems = systems
        self._bodies = [request.body(ends=options.end_early) for request in requests]
        self._fleet = fleet
        self._sessions = sessions
        self.skipped: dict[str, str] = {}
        self.tuning: dict[str, dict[int, float]] = {s.name: {} for s in systems}
        self.rounds: list[dict[str, tuple[Pass, dict[str, Any]]]] = []
        self.open: dict[str, list[dict[str, Any]]] = {s.name: [] for s in systems}
        self.replayed: dict[str, list[dict[str, Any]]] = {s.name: [] for s in systems}
        self.divergences: dict[str, dict[str, Any]] = {}

    def run(self) -> None:
        """Measure everything; results are in the attributes."""
        candidates = self._options.concurrency
        if len(candidates) > 1:
            for clients in candidates:
                for system in self._turns(0):
                    self._tune(system, clients)
        for i in range(self._options.repeats):
            self.rounds.append({})
            for system in self._turns(i):
                self._round(system, i)
        for i, rate in enumerate(self._options.rates):
            for system in self._turns(i):
                self._at_rate(system, rate)
            for system in self._turns(i) if self._sessions else ():
                self._replay(system, rate)
        if self._options.kl_requests and self._options.simulated_acceptance is None:
            self._compare_distributions()

    def clients(self, name: str) -> int:
        """Return the number of concurrent clients for a system."""
        tried = self.tuning[name]
        fallback: int = self._options.concurrency[0]
        return max(tried, key=lambda clients: tried[clients]) if tried else fallback

    def results(self) -> dict[str, dict[str, Any]]:
        """Return each system's results, as plain values."""
        return {system.name: self._result(system.name) for system in self._systems}

    # -- one turn ---------------------------------------------------------------

    def _turns(self, shift: int) -> Iterator[System]:
        """Yield the remaining systems, each time starting with the next one."""
        shift %= len(self._systems)
        for system in (*self._systems[shift:], *self._systems[:shift]):
            if system.name not in self.skipped:
                yield system

    def _tune(self, system: System, clients: int) -> None:
        loop = self._closed(clients)
        done = self._turn(system, f"tuning {system.name} x{clients}", loop)
        if done is not None:
            self.tuning[system.name][clients] = done[1]["tokens_per_s"]

    def _round(self, system: System, number: int) -> None:
        name = f"round {number + 1} {system.name}"
        done = self._turn(system, name, self._closed(self.clients(system.name)))
        if done is not None:
            self.rounds[number][system.name] = done

    def _at_rate(self, system: System, rate: float) -> None:
        times = arrivals(len(self._bodies), rate, self._options.seed)
        loop = partial(open_loop, arrivals=times, timeout=self._options.timeout)
        done = self._turn(system, f"{rate:g}/s {system.name}", loop)
        if done is not None:
            self.open[system.name].append({"rate": rate, **done[1]})

    def _replay(self, system: System, rate: float) -> None:
        """Replay the sessions, begun so that ``rate`` requests a second arrive.

        Those of a session wait for each other: a slow server is sent fewer.
        """
        count = sum(map(len, self._sessions))
        began = rate * len(self._sessions) / count
        numbered = [i for turns in self._sessions for i, _ in turns]
        places = {number: place for place, number in enumerate(numbered)}
        loop = partial(
            replay,
            sessions=[[(places[i], s) for i, s in turns] for turns in self._sessions],
            starts=arrivals(len(self._sessions), began, self._options.seed),
            timeout=self._options.timeout,
        )
        bodies = [self._bodies[i] for i in numbered]
        done = self._turn(system, f"replay {rate:g}/s {system.name}", loop, bodies)
        if done is not None:
            self.replayed[system.name].append({"rate": rate, **done[1]})

    def _closed(self, clients: int) -> Loop:
        return partial(closed_loop, clients=clients, timeout=self._options.timeout)

    def _turn(
        self,
        system: System,
        name: str,
        loop: Loop,
        bodies: Sequence[dict[str, Any]] = (),
    ) -> tuple[Pass, dict[str, Any]] | None:
        """Run one pass; record a failure of the system and return None.

        Args:
            system: To be measured.
            loop: Sends the requests.
            bodies: Sent from an empty prefix cache; none: all, as ``--prefill`` says.
        """
        try:
            server, fresh = self._fleet.ready(system)
            if fresh:
                warming = self._closed(self._options.concurrency[0])
                self._pass(server, f"warming {system.name}", warming)
            return self._pass(server, name, loop, bodies)
        except ServerError as error:
            self.skipped[system.name] = str(error)
            return None

    def _pass(
        self,
        server: Server,
        name: str,
        loop: Loop,
        bodies: Sequence[dict[str, Any]] = (),
    ) -> tuple[Pass, dict[str, Any]]:
        """Answer requests from an empty prefix cache, or all from one with prompts."""
        server.flush()
        if self._options.prefill == "cached" and not bodies:
            first = [_shortened(body) for body in self._bodies]
            closed_loop(server.url, first, 1, lambda: None, self._options.timeout)
        before, sent = server.counters(), bodies or self._bodies
        with tqdm(total=len(sent), desc=name, unit="request") as bar:
            done = loop(server.url, sent, answered=bar.update)
        after = server.counters()
        return done, pass_figures(done, before, after, self._options.memory_gbps)

    # -- distributions ----------------------------------------------------------

    def _compare_distributions(self) -> None:
        lossy = [s for s in self._systems if s.lossy and s.name not in self.skipped]
        plain = next((s for s in self._systems if s.name == REFERENCE), None)
        if not lossy or plain is None or REFERENCE in self.skipped:
            return
        bodies = self._bodies[: self._options.kl_requests]
        wanted = self._with_logprobs(plain, bodies)
        if wanted is None:
            return
        forced = [
            _forced(body, answer["output_ids"])
            for body, answer in zip(bodies, wanted, strict=True)
        ]
        for system in lossy:
            got = self._with_logprobs(system, forced)
            if got is not None:
                self.divergences[system.name] = {
                    "top_k": self._options.top_k,
                    "requests": len(bodies),
                    **divergence(_positions(wanted), _positions(got)),
                }

    def _with_logprobs(
        self, system: System, bodies: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]] | None:
        more = {"return_logprob": True, "top_logprobs_num": self._options.top_k}
        answers = []
        try:
            server, _ = self._fleet.ready(system)
            server.flush()
            for body in tqdm(bodies, desc=f"log-probabilities {system.name}"):
                answers.append(server.generate({**body, **more}))
        except ServerError as error:
            self.skipped[system.name] = str(error)
            return None
        return answers

    # -- results ----------------------------------------------------------------

    def _result(self, name: str) -> dict[str, Any]:
        mine = [found[name] for found in self.rounds if name in found]
        answers = [answer for done, _ in mine for answer in done.answers]
        figures = [each for _, each in mine]
        return {
            "skipped": self.skipped.get(name, ""),
            "tuning": [
                {"concurrency": clients, "tokens_per_s": rate}
                for clients, rate in self.tuning[name].items()
            ],
            "concurrency": self.clients(name),
            "tokens_per_s": middle([each["tokens_per_s"] for each in figures]),
            "ratio": middle(self._ratios(name)),
            "ratios": self._ratios(name),
            **latencies(answers),
            "accepted": accepted(answers),
            **{key: _median(figures, key) for key in COUNTED},
            "mismatches": self._mismatches(name),
            "failed_requests": sum(each["failed_requests"] for each in figures),
            "errors": sorted({text for each in figures for text in each["errors"]}),
            "divergence": self.divergences.get(name),
            "rounds": figures,
            "open_loop": self.open[name],
            "replay": self.replayed[name],
        }

    def _pairs(self, name: str) -> list[tuple[Any, Any]]:
        """Return (plain's, this system's) passes of every round that has both."""
        return [
            (found[REFERENCE], found[name])
            for found in self.rounds
            if REFERENCE in found and name in found
        ]

    def _ratios(self, name: str) -> list[float]:
        return [
            ours["tokens_per_s"] / plain["tokens_per_s"]
            for (_, plain), (_, ours) in self._pairs(name)
            if plain["tokens_per_s"]
        ]

    def _mismatches(self, name: str) -> int | None:
        """Count requests over all rounds; None where there is nothing to compare."""
        pairs = self._pairs(name)
        if not pairs or self._options.simulated_acceptance is not None:
            return None
        return sum(mismatches(plain, ours) for (plain, _), (ours, _) in pairs)


def _median(figures: Sequence[dict[str, Any]], key: str) -> float | None:
    found = middle([each[key] for each in figures if each[key] is not None])
    return found["median"] if found else None


def _shortened(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "sampling_params": {**body["sampling_params"], "max_new_tokens": 1}}


def _forced(body: dict[str, Any], tokens: Sequence[int]) -> dict[str, Any]:
    params = {**body["sampling_params"], "custom_params": forced_tokens(tokens)}
    return {**body, "sampling_params": {**params, "max_new_tokens": len(tokens)}}


def _positions(answers: Sequence[dict[str, Any]]) -> list[Any]:
    return [answer["meta_info"]["output_top_logprobs"] for answer in answers]
