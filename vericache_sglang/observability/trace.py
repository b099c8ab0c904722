"""Writes every iteration to a file that Perfetto and chrome://tracing open.

The format is Chrome's trace events, as a JSON array with one event per line. Every line
ends with a comma and a newline; ``close`` writes a last event and the bracket. A killed
process leaves the array open, which both readers accept. The lines of an iteration are
written unbuffered with one call, so a kill loses whole iterations only. A machine that
stops during a write may leave part of a line: Perfetto skips it, but it must be removed
for chrome://tracing. A file that reaches its size limit is closed and renamed, and a
new one is started.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import stat
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from vericache_sglang.errors import ConfigError
from vericache_sglang.former_names import FORMER_NAMES, with_former_names
from vericache_sglang.observability.counters import move_name
from vericache_sglang.observability.record import Phase
from vericache_sglang.scheduling.plan import Compress

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vericache_sglang.observability.record import (
        IterationRecord,
        TransferRecord,
        VerdictRecord,
    )
    from vericache_sglang.scheduling.plan import Move

logger = logging.getLogger(__name__)

ITERATIONS = 1
"""Thread id of the track of iterations."""

LINKS = {"in": (2, "prefetch"), "out": (3, "offload")}
"""Direction of a transfer -> thread id of its track and name of its slices."""

FIRST_LANE = 4
"""Thread id of the first lane of requests; the others follow."""

PAUSE_US = 100_000
"""Least pause between iterations of an idle server, in microseconds."""

FORMER_MOVES = {new: old for old, new in FORMER_NAMES["move"].items()}
"""Name of a move -> the one that its events had before."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


class Lanes:
    """Assigns one track to each running request, and reuses it after its end.

    The number of tracks is the largest number of concurrent requests.
    """

    def __init__(self) -> None:
        self._lane_of: dict[str, int] = {}
        self._free: list[int] = []
        self._fresh = count(FIRST_LANE)

    def assign(self, rids: list[str]) -> list[int]:
        """Assign lanes to new requests, after freeing those of finished ones.

        Args:
            rids: Requests of an iteration, each once.

        Returns:
            Thread ids of new lanes.
        """
        for rid in self._lane_of.keys() - set(rids):
            heapq.heappush(self._free, self._lane_of.pop(rid))
        opened = []
        for rid in rids:
            if rid in self._lane_of:
                continue
            if not self._free:
                opened.append(next(self._fresh))
                self._free.append(opened[-1])
            self._lane_of[rid] = heapq.heappop(self._free)
        return opened

    def of(self, rid: str) -> int:
        """Return a request's thread id, or ``ITERATIONS`` if it has no lane."""
        return self._lane_of.get(rid, ITERATIONS)


class Trace:
    """An ``Observer``; times in the file are microseconds of ``time.perf_counter``.

    Tracks: iterations, prefetches, offloads, and one lane per running request, with a
    slice per iteration and an instant per KV move. At a drafter, an asynchronous slice
    per verdict, from the drafts' departure to the iteration that emits it. Counters:
    requests by phase, and for every ring the reserved amounts of the current iteration
    and of the whole horizon.

    Iterations are ordered by time and do not overlap. When a write fails, an error is
    logged, the file is truncated after its last complete line and the trace ends;
    serving continues.

    Args:
        path: File to write; an existing file is replaced, a symbolic link is refused.
        process_name: Name of the process in the viewer.
        rank: Rank among processes with the same path, inserted before the last suffix
            of the file name ("t.json" becomes "t.2.json"). None for a single process.
        most_bytes: Size at which the file is closed and renamed to ``path`` + ".1",
            replacing an earlier one, and a new one is started. 0: no limit.

    Attributes:
        path: File being written.

    Raises:
        ConfigError: The file cannot be written; names ``--vericache-trace``.
    """

    def __init__(
        self,
        path: str | Path,
        process_name: str,
        rank: int | None = None,
        most_bytes: int = 0,
    ) -> None:
        self._pid = os.getpid()
        self._process_name = process_name
        self._most_bytes = most_bytes
        self._iterations = 0
        self._verdicts = 0
        self._ended = 0
        self._link_free = dict.fromkeys(LINKS, 0)
        self.path = Path(path)
        try:
            if rank is not None:
                self.path = self.path.with_stem(f"{self.path.stem}.{rank}")
            self._open()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--vericache-trace {path}: {error}") from error

    def _open(self) -> None:
        """Start a file, with no lane in use and no counter written."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        # Unbuffered: one write per iteration, and nothing to flush.
        self._file = os.fdopen(os.open(self.path, flags, 0o644), "wb", buffering=0)
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._most_bytes = 0  # a device cannot be renamed
        self._size = 0
        self._lanes = Lanes()
        self._counted: dict[str, Mapping[str, float]] = {}
        self._append(
            "[\n",
            self._about("process_name", 0, name=self._process_name),
            *self._track(ITERATIONS, "iterations"),
            *self._track(LINKS["in"][0], "link in: prefetches"),
            *self._track(LINKS["out"][0], "link out: offloads"),
        )

    def iteration(self, record: IterationRecord) -> None:
        """See ``Observer.iteration``."""
        full = self._most_bytes and self._size >= self._most_bytes
        if full and not self._file.closed:
            self._rotate()
        if self._file.closed:
            return
        begin, end = _us(record.began), _us(record.ended)
        opened = self._lanes.assign([row.rid for row in record.rows])
        lines = [line for tid in opened for line in self._track(tid, _lane_name(tid))]
        lines += self._counters(record, begin)
        lines.append(self._whole(record, begin, end))
        lines += self._rows(record, begin, end)
        lines += (self._move(move, end) for move in record.moves)
        for verdict in record.verdicts:
            lines += self._verdict(verdict, begin)
        for direction in LINKS:
            copies = [each for each in record.transfers if each.direction == direction]
            lines += self._transfers(direction, copies)
        self._iterations, self._ended = record.index, end
        self._write(*lines)

    def idle(self) -> None:
        """See ``Observer.idle``: nothing is buffered."""

    def close(self) -> None:
        """See ``Observer.close``: writes the last event and the bracket."""
        if self._file.closed:
            return
        args = {"iterations": self._iterations}
        last = self._event("i", ITERATIONS, "closed", self._ended, args, s="t")
        self._write(*self._idle_counter(), last.removesuffix(",\n"), "\n]\n")
        self._file.close()

    def _rotate(self) -> None:
        """Close and rename the file and start a new one; the trace ends on an error."""
        self.close()
        try:
            self.path.replace(f"{self.path}.1")
            self._open()
        except OSError as error:
            self._end(error)

    # -- events -----------------------------------------------------------------

    def _whole(self, record: IterationRecord, begin: int, end: int) -> str:
        args = {
            "index": record.index,
            **_by_phase(record),
            "emitted": sum(row.emitted for row in record.rows),
        }
        return self._event("X", ITERATIONS, "iteration", begin, args, dur=end - begin)

    def _rows(self, record: IterationRecord, begin: int, end: int) -> Iterator[str]:
        # Most of a file is rows: an f-string takes a sixth of the JSON encoder's time.
        head = f'{{"ph":"X","pid":{self._pid},"ts":{begin},"dur":{end - begin},"tid":'
        for row in record.rows:
            yield (
                f'{head}{self._lanes.of(row.rid)},"name":"{row.phase}","args":'
                f'{{"rid":{_encode(row.rid)},"tokens":{row.tokens},'
                f'"emitted":{row.emitted}}}}},\n'
            )

    def _move(self, move: Move, at: int) -> str:
        args = {"rid": move.rid}
        if isinstance(move, Compress):
            args["to"] = move.residency.value
        name = move_name(move)
        if name in FORMER_MOVES:
            args["former_name"] = FORMER_MOVES[name]
        return self._event("i", self._lanes.of(move.rid), name, at, args, s="t")

    def _verdict(self, verdict: VerdictRecord, at: int) -> Iterator[str]:
        self._verdicts += 1
        args = {
            "rid": verdict.rid,
            "drafts": verdict.drafts,
            "tokens": verdict.tokens,
        }
        sent = max(0, at - _us(verdict.seconds))
        for kind, time in (("b", sent), ("e", at)):
            yield self._event(
                *(kind, self._lanes.of(verdict.rid), "verdict", time, args),
                cat="verdict",
                id=self._verdicts,
            )

    def _transfers(self, direction: str, copies: list[TransferRecord]) -> list[str]:
        """Return slices of copies, back to back as on the link.

        Only the time at which an end was observed is known, so that copies observed
        together or late would overlap. ``args`` holds the measured duration.
        """
        tid, name = LINKS[direction]
        floor = self._link_free[direction]
        lines, latest = [], None
        for copy in reversed(copies):
            noticed = _us(copy.ended)
            end = max(floor, noticed if latest is None else min(latest, noticed))
            begin = max(floor, end - _us(copy.seconds))
            args = {"rid": copy.rid, "bytes": copy.nbytes, "seconds": copy.seconds}
            lines.append(self._event("X", tid, name, begin, args, dur=end - begin))
            self._link_free[direction] = max(self._link_free[direction], end)
            latest = begin
        return lines[::-1]

    def _counters(self, record: IterationRecord, at: int) -> Iterator[str]:
        if at - self._ended > PAUSE_US:
            yield from self._idle_counter()
        yield from self._count("requests", at, _by_phase(record))
        for ring, amounts in record.reservations.items():
            levels = {
                "iteration": round(amounts[0], 9) if amounts else 0,
                "horizon": round(sum(amounts), 9),
            }
            levels = with_former_names("ring", levels)
            yield from self._count(f"ring {ring}", at, levels)

    def _idle_counter(self) -> Iterator[str]:
        """Set the counter of requests to 0 at the end of the last iteration."""
        if self._iterations:
            none = dict.fromkeys(get_args(Phase), 0)
            yield from self._count("requests", self._ended, none)

    def _count(self, name: str, at: int, levels: Mapping[str, float]) -> Iterator[str]:
        """Yield a counter's event if its value has changed."""
        if self._counted.get(name) != levels:
            self._counted[name] = levels
            yield self._event("C", ITERATIONS, name, at, levels)

    def _track(self, tid: int, name: str) -> Iterator[str]:
        yield self._about("thread_name", tid, name=name)
        yield self._about("thread_sort_index", tid, sort_index=tid)

    def _about(self, what: str, tid: int, **args: str | int) -> str:
        head = {"ph": "M", "pid": self._pid, "tid": tid, "name": what}
        return _encode({**head, "args": args}) + ",\n"

    def _event(
        self, kind: str, tid: int, name: str, at: int, args: Any, **more: Any
    ) -> str:
        head = {"ph": kind, "pid": self._pid, "tid": tid, "name": name, "ts": at}
        return _encode({**head, **more, "args": args}) + ",\n"

    def _write(self, *lines: str) -> None:
        """Append lines; the trace ends if that fails."""
        try:
            self._append(*lines)
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        logger.error("VeriCache: the trace ends here: %s: %s", self.path, error)
        if not self._file.closed:
            with suppress(OSError):
                self._file.truncate(self._size)
            self._file.close()

    def _append(self, *lines: str) -> None:
        block = "".join(lines).encode()
        written = self._file.write(block)
        if written != len(block):
            raise OSError(f"{written} of {len(block)} bytes written")
        self._size += len(block)


def _us(seconds: float) -> int:
    """Return whole microseconds; the order of times is kept."""
    return round(seconds * 1e6)


def _by_phase(record: IterationRecord) -> dict[str, int]:
    phases = Counter(row.phase for row in record.rows)
    return {phase: phases[phase] for phase in get_args(Phase)}


def _lane_name(tid: int) -> str:
    return f"requests, lane {tid - FIRST_LANE + 1}"
