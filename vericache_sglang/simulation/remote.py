"""Two modelled pools around a KV store, driven by the path choice of ``scheduling``.

Everything here is SIMULATED. The choice and the admission are the scheduler's own; the
servers are those of appendix A.2 (arXiv:2605.17613), whose linear program the results
are compared with.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.acceptance import survival_for
from vericache_sglang.planning.inter import BASELINE_PATHS, PATHS, simplest
from vericache_sglang.scheduling.paths import Path, PathChoice, Prospects
from vericache_sglang.simulation.clock import Clock
from vericache_sglang.simulation.instance import Instance, StoreLoad
from vericache_sglang.simulation.measuring import Measuring

if TYPE_CHECKING:
    from vericache_sglang.planning.inter import Cluster

DRAFT, WHOLE, REST = range(3)
"""Ranks of loads over a drafter's link."""

RETRY_S = 0.25
"""Interval after which a busy verifier is asked again, in seconds."""

MOST_EVENTS = 20_000_000
"""Of one run, after which it is taken to be stuck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the paths of one run are chosen.

    Attributes:
        name: In tables.
        forced: "auto", or the name of a forced path.
        speculates: Whether P1 and P2 are allowed.
        program: Whether the linear program's shares are given to the choice.
        measured: Whether drafters choose by what they measure, as servers do.
    """

    name: str
    forced: str = "auto"
    speculates: bool = True
    program: bool = True
    measured: bool = False


BASELINE = Rules(name="B1 and B2", speculates=False)
ALL_SIX = Rules(name="all six paths")
MEASURED = Rules(name="all six, as drafters measure", program=False, measured=True)
RULES = (
    BASELINE,
    Rules(name="B1 and B2, by arrival", speculates=False, program=False),
    *(
        Rules(
            name=name.upper(),
            forced=name,
            speculates=name.startswith("p"),
            program=False,
        )
        for name in ("b1", "b2", "p1", "p2")
    ),
    Rules(name="all six, by arrival", program=False),
    MEASURED,
    ALL_SIX,
)


@dataclass(frozen=True, slots=True)
class PoolsLoad:
    """How much one run serves: a closed loop at every drafter.

    Attributes:
        requests: Of each server of either pool, until the end; the first quarter is not
            measured.
        concurrency: Open requests of each drafter; 0: those that fill all slots, and
            one more at each server.
        seed: Of the accepted drafts.
    """

    requests: int
    concurrency: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 4 or self.concurrency < 0:
            raise ConfigError("--requests must be >= 4 and --concurrency >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsResult:
    """Figures of one run, all of them SIMULATED.

    Attributes:
        rules: Name of its rules.
        tokens_per_s: Of both pools.
        seconds: Simulated time of the measurement.
        mix: Share of each path in the requests that began in it.
        request_s: Mean time of a request by path, from the start on the path.
        waited_s: Mean wait before that.
        near_link: Share of the time in which a verifier's link is busy.
        far_link: The same of a drafter's.
        near_rows: Mean rows of a verifier's forward.
        far_rows: The same of a drafter's.
        busy: Verifications that no window had room for, and that asked again.
        held: Slots still held after the last request, 0 in a correct run.
    """

    rules: str
    tokens_per_s: float
    seconds: float
    mix: dict[str, float]
    request_s: dict[str, float]
    waited_s: float
    near_link: float
    far_link: float
    near_rows: float
    far_rows: float
    busy: int
    held: int


class NearInstance(Instance):
    """A server near the store, and requests that wait for a slot of it."""

    def __init__(self, clock: Clock, cluster: Cluster) -> None:
        super().__init__(clock, cluster, cluster.local_bytes_per_s)
        self.waiting: deque[RemoteRequest] = deque()


class FarInstance(Instance):
    """A server far from the store: its clients' open requests, and its choice."""

    def __init__(self, clock: Clock, cluster: Cluster, rules: Rules) -> None:
        super().__init__(clock, cluster, cluster.remote_bytes_per_s)
        self.choice = PathChoice(rules.forced)
        self.measuring = Measuring(cluster) if rules.measured else None
        self.waiting: deque[RemoteRequest] = deque()


class RemoteRequest:
    """One request on its path; the methods are its events, in the order of a cycle."""

    def __init__(self, pools: Pools, rid: str, drafter: FarInstance) -> None:
        self.rid = rid
        self.drafter = drafter
        self.path: Path | None = None
        self.tokens = 0
        self.opened = self.began = pools.clock.now
        self._pools = pools
        self._verifier = pools.verifiers[0]
        self._drafts = self._drafted = 0
        self._loaded = self._whole = False
        self._rest: StoreLoad | None = None

    @property
    def left_s(self) -> float:
        """Predicted time to its end, in seconds."""
        near = self.path is Path.B1
        pace = (self._verifier if near else self.drafter).iteration_s.value
        return (self._pools.cluster.output_tokens - self.tokens) * pace

    def start(self, path: Path, verifier: NearInstance) -> bool:
        """Begin on a path; False, and nothing is taken, while there is no room."""
        cluster, link = self._pools.cluster, self.drafter.link
        full = cluster.kv_full_bytes
        size = full if path is Path.B2 else cluster.compressed * full
        if path is Path.B1:
            verifier.waiting.append(self)
        elif not self.drafter.rings.hold(self.rid, size / link.bytes_per_s):
            return False
        self.path, self._verifier, self.began = path, verifier, self._pools.clock.now
        if path is Path.B2:
            link.load(size, WHOLE, lambda: self.drafter.add(self._decode))
        elif path is not Path.B1:
            link.load(size, DRAFT, self._arrive)
        return True

    def start_near(self) -> bool:
        """Load and decode at the verifier; False while there is no room."""
        verifier = self._verifier
        if not self._hold_near():
            return False
        size = self._pools.cluster.kv_full_bytes
        verifier.link.load(size, WHOLE, lambda: verifier.add(self._decode))
        return True

    def _hold_near(self) -> bool:
        pools, rings = self._pools, self._verifier.rings
        return rings.hold(self.rid, pools.near_load_s, pools.spare)

    def _arrive(self) -> None:
        """Draft KV has arrived."""
        if self.path in (Path.P2_CACHED, Path.P2_STATELESS):
            cluster = self._pools.cluster
            rest = (1 - cluster.compressed) * cluster.kv_full_bytes
            self._rest = self.drafter.link.load(rest, REST, self._complete)
        self._cycle()

    def _complete(self) -> None:
        self._whole = True

    def _cycle(self) -> None:
        """Draft, and have the verifier load the full KV meanwhile."""
        cluster = self._pools.cluster
        self._drafted = 0
        self._drafts = min(cluster.draft_length, cluster.output_tokens - self.tokens)
        self.drafter.add(self._draft)
        if not self._loaded:
            self._prepare()

    def _prepare(self) -> None:
        pools, rings = self._pools, self._verifier.rings
        rings.advance(pools.clock.now)
        cached = self.path in (Path.P1_CACHED, Path.P2_CACHED)
        if cached and self._hold_near():
            self._load()
            return
        eta_s = (self._drafts - self._drafted) * self.drafter.iteration_s.value
        found = rings.reserve(self.rid, pools.near_load_s, eta_s)
        if found is None:
            pools.busy += 1
            pools.clock.at(pools.clock.now + RETRY_S, self._prepare)
        else:
            pools.clock.at(found[0], self._begin_load)

    def _begin_load(self) -> None:
        if self._verifier.rings.begin(self.rid):
            self._load()
        else:
            self._pools.clock.at(self._pools.clock.now + RETRY_S, self._begin_load)

    def _load(self) -> None:
        link = self._verifier.link
        link.load(self._pools.cluster.kv_full_bytes, DRAFT, self._near_complete)

    def _near_complete(self) -> None:
        self._loaded = True
        self._verify_if_ready()

    def _draft(self) -> bool:
        self._drafted += 1
        if self._drafted < self._drafts:
            return True
        self._verify_if_ready()
        return False

    def _verify_if_ready(self) -> None:
        if self._loaded and self._drafted == self._drafts:
            self._verifier.add(self._verify)

    def _verify(self) -> bool:
        pools = self._pools
        cached = self.path in (Path.P1_CACHED, Path.P2_CACHED)
        accepted = pools.accepted(self._drafts)
        self._emit(min(accepted + 1, pools.cluster.output_tokens - self.tokens))
        done = self.tokens == pools.cluster.output_tokens
        if not cached or self._whole or done:
            self._verifier.rings.release(self.rid)
            self._loaded = False
        if done:
            self._end()
        elif self._whole:
            self.drafter.add(self._decode)
        else:
            self._cycle()
        pools.start_waiting()
        return False

    def _decode(self) -> bool:
        self._emit(1)
        if self.tokens < self._pools.cluster.output_tokens:
            return True
        self._end()
        self._pools.start_waiting()
        return False

    def _emit(self, tokens: int) -> None:
        if self.drafter.measuring is not None:
            drafts = 0 if self.path in (Path.B1, Path.B2) else self._drafts
            now = self._pools.clock.now
            self.drafter.measuring.emitted(self.rid, tokens, drafts, now)
        self.tokens += tokens
        self._pools.tokens += tokens

    def _end(self) -> None:
        if self._rest is not None:
            self._rest.cancelled = True
        self._verifier.rings.release(self.rid)
        self.drafter.rings.release(self.rid)
        self._pools.finish(self)


class Pools:
    """Both pools and their requests.

    Args:
        cluster: Rates and sizes; at least one instance of either pool.
        rules: How paths are chosen.
        load: How much is served.

    Attributes:
        clock: Simulated time.
        cluster: Rates and sizes.
        verifiers: Near the store.
        near_load_s: Time in which a verifier loads a full KV, in seconds.
        spare: Slots that a verifier keeps for verifications; 0: none takes place.
        tokens: Tokens emitted so far.
        busy: Verifications that asked again.

    Raises:
        ConfigError: There is no drafter.
    """

    def __init__(self, cluster: Cluster, rules: Rules, load: PoolsLoad) -> None:
        if cluster.remote < 1:
            raise ConfigError("--remote needs R >= 1 to simulate drafters")
        self.clock = Clock()
        self.cluster = cluster
        self.verifiers = [
            NearInstance(self.clock, cluster) for _ in range(cluster.local)
        ]
        self.near_load_s = cluster.kv_full_bytes / cluster.local_bytes_per_s
        self.tokens = self.busy = 0
        self._rules, self._load = rules, load
        self._drafters = [
            FarInstance(self.clock, cluster, rules) for _ in range(cluster.remote)
        ]
        speculates = rules.speculates
        if rules.program:
            shares = simplest(
                cluster.pools, PATHS if speculates else BASELINE_PATHS
            ).shares
            for drafter in self._drafters:
                drafter.choice.shares = shares
            speculates = any(path not in BASELINE_PATHS for path in shares)
        self.spare = int(speculates)
        x, rate = cluster.draft_length, cluster.acceptance_rate
        self._survival = survival_for(rate * x, x)
        self._random = Random(load.seed)
        self._running: dict[str, RemoteRequest] = {}
        self._opened = self._finished = 0
        self._wanted = load.requests * (cluster.local + cluster.remote)
        self._started: list[Path] = []
        self._ended: list[tuple[Path, float, float]] = []
        self._starting = False

    def accepted(self, drafts: int) -> int:
        """Draw how many of ``drafts`` the verifier accepts."""
        count = 0
        while count < drafts and self._random.random() < self._survival:
            count += 1
        return count

    def run(self) -> PoolsResult:
        """Serve until all requests have finished; returns the figures."""
        each = self._load.concurrency or self._filling()
        for _ in range(each):
            for drafter in self._drafters:
                self._open(drafter)
        self._tick()
        self._until(self._wanted // 4)
        before = self._snapshot()
        self._started.clear()
        self._ended.clear()
        self._until(self._wanted)
        figures = self._figures(before)
        self._until(self._opened)
        servers = (*self.verifiers, *self._drafters)
        return PoolsResult(**figures, held=sum(len(s.rings.held) for s in servers))

    def start_waiting(self) -> None:
        """Start what waits and has room, the oldest of each drafter first."""
        if self._starting:
            return
        self._starting = True
        for server in (*self.verifiers, *self._drafters):
            server.rings.advance(self.clock.now)
        self._start_near()
        waiting = [each for each in self._drafters if each.waiting]
        while waiting:
            waiting.sort(key=lambda drafter: drafter.waiting[0].opened)
            waiting = [
                drafter
                for drafter in waiting
                if self._start(drafter) and drafter.waiting
            ]
        self._start_near()
        self._starting = False

    def _start_near(self) -> None:
        for verifier in self.verifiers:
            while verifier.waiting and verifier.waiting[0].start_near():
                verifier.waiting.popleft()

    def finish(self, request: RemoteRequest) -> None:
        """Count a request that has ended, and open the next of its drafter."""
        del self._running[request.rid]
        if request.drafter.measuring is not None:
            request.drafter.measuring.ended(request.rid, self.clock.now)
        self._finished += 1
        assert request.path is not None
        wait = request.began - request.opened
        self._ended.append((request.path, self.clock.now - request.began, wait))
        if self._finished < self._wanted:
            self._open(request.drafter)

    def _open(self, drafter: FarInstance) -> None:
        drafter.waiting.append(RemoteRequest(self, f"r{self._opened}", drafter))
        self._opened += 1

    def _tick(self) -> None:
        self.start_waiting()
        if self._finished < self._opened:
            self.clock.at(self.clock.now + RETRY_S, self._tick)

    def _start(self, drafter: FarInstance) -> bool:
        request = drafter.waiting[0]
        known = {
            id(verifier): self._prospects(drafter, verifier)
            for verifier in self.verifiers
        }
        verifier = min(
            self.verifiers,
            key=lambda each: (
                known[id(each)].near_wait_s,
                known[id(each)].verify_load_s,
            ),
        )
        path = self._path(request, known[id(verifier)])
        if not request.start(path, verifier):
            return False
        drafter.waiting.popleft()
        drafter.choice.took(path)
        self._running[request.rid] = request
        self._started.append(path)
        return True

    def _path(self, request: RemoteRequest, known: Prospects) -> Path:
        measuring = request.drafter.measuring
        if measuring is None:
            return request.drafter.choice.choose(known)
        return measuring.path(request.rid, known, self.clock.now)

    def _prospects(self, drafter: FarInstance, verifier: NearInstance) -> Prospects:
        cluster = self.cluster
        far, full = cluster.remote_bytes_per_s, cluster.kv_full_bytes
        pool_wait_s = self._pool_wait_s(drafter)
        draft_wait_s = max(drafter.link.backlog_s(DRAFT), pool_wait_s)
        draft = cluster.compressed * full
        drafts_s = cluster.draft_length * drafter.iteration_s.value
        granted = None
        if self.spare:
            granted = verifier.rings.load_by(self.near_load_s, drafts_s)
        return Prospects(
            full_bytes=full,
            whole_bytes=full,
            draft_bytes=draft,
            rest_bytes=full - draft,
            near_bytes_per_s=cluster.local_bytes_per_s,
            far_bytes_per_s=far,
            near_wait_s=max(
                verifier.link.backlog_s(WHOLE), self._pool_wait_s(verifier)
            ),
            draft_wait_s=draft_wait_s,
            whole_wait_s=max(drafter.link.backlog_s(WHOLE), pool_wait_s),
            rest_wait_s=drafter.link.backlog_s(REST),
            verify_load_s=inf if granted is None else granted - self.clock.now,
            holds=verifier.rings.free(self.spare) > 0,
            host_room=True,
            prefill_s=inf,
            tokens=cluster.output_tokens,
            draft_length=cluster.draft_length,
            acceptance_rate=cluster.acceptance_rate,
            near_token_s=verifier.iteration_s.value,
            far_token_s=drafter.iteration_s.value,
        )

    def _pool_wait_s(self, server: NearInstance | FarInstance) -> float:
        """Return when a slot is free behind those that wait for one."""
        ahead = len(server.waiting) if isinstance(server, NearInstance) else 0
        spare = self.spare if isinstance(server, NearInstance) else 0
        needed = ahead + 1 - max(server.rings.free(spare), 0)
        if needed <= 0:
            return 0.0
        left = sorted(self._running[rid].left_s for rid in server.rings.held)
        turns, place = divmod(needed - 1, max(len(left), 1))
        return left[place] + turns * left[-1] if left else self.near_load_s

    def _filling(self) -> int:
        servers = self.cluster.local + self.cluster.remote
        return -(-(self.cluster.slots + 1) * servers // self.cluster.remote)

    def _until(self, finished: int) -> None:
        for _ in range(MOST_EVENTS):
            coming = self.clock.next_event()
            if self._finished >= finished or coming is None:
                return
            self.clock.advance(coming)
        raise ConfigError("the simulation does not come to an end")

    def _snapshot(self) -> list[float]:
        pools = (self.verifiers, self._drafters)
        return [
            self.clock.now,
            float(self.tokens),
            *(sum(each.link.busy_s for each in pool) for pool in pools),
            *(float(sum(each.forwards for each in pool)) for pool in pools),
            *(float(sum(each.rows for each in pool)) for pool in pools),
        ]

    def _figures(self, before: list[float]) -> dict[str, Any]:
        change = [new - old for new, old in zip(self._snapshot(), before, strict=True)]
        seconds, tokens, near_s, far_s, *forwards = change
        near_forwards, far_forwards, near_rows, far_rows = forwards
        started = Counter(self._started)
        ended: dict[str, list[float]] = {}
        for path, took_s, _ in self._ended:
            ended.setdefault(path, []).append(took_s)
        waits = [wait for *_, wait in self._ended]
        return {
            "rules": self._rules.name,
            "tokens_per_s": tokens / seconds,
            "seconds": seconds,
            "mix": {
                str(path): started[path] / len(self._started)
                for path in Path
                if started[path]
            },
            "request_s": {
                str(path): sum(ended[path]) / len(ended[path])
                for path in Path
                if path in ended
            },
            "waited_s": sum(waits) / len(waits),
            "near_link": near_s / seconds / self.cluster.local,
            "far_link": far_s / seconds / self.cluster.remote,
            "near_rows": near_rows / max(near_forwards, 1),
            "far_rows": far_rows / max(far_forwards, 1),
            "busy": self.busy,
        }
