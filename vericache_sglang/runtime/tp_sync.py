"""Tensor-parallel sync: exchanges rank-local values so that all ranks plan alike.

Every rank runs the same scheduler over the same requests and tokens. Only measured
times, completed copies, host memory and the scores of KV heads differ between ranks;
these are synchronised here. A single rank communicates nothing.

Errors are synchronised too. All messages have one width and begin with a flag, so a
rank that failed answers the others' next exchange, whichever it is, and all ranks
raise ``RankError`` from it. After that no rank communicates until ``meet``, which every
rank calls at the begin of every scheduler iteration.
"""

from __future__ import annotations

import hashlib
import secrets
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from sglang.srt.environ import envs

from vericache_sglang.errors import InvariantError, LostRankError, RankError
from vericache_sglang.sampling.profile import SamplingRule
from vericache_sglang.scheduling.estimates import (
    START_COEFFICIENTS,
    START_LINK_BYTES_PER_S,
    Estimates,
)
from vericache_sglang.scheduling.iteration_model import IterationModel
from vericache_sglang.scheduling.link import LinkEstimate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.scheduling.plan import Plan, SchedulerInput

EXACT = 1 << 52
"""Integers below this are exact in float64."""

WIDTH = 64
"""Values of a message; more values are sent in several messages."""

COEFFICIENTS = slice(0, 4)
ITERATION = 4
LINK = slice(5, 9)
SPLIT = 9
DRAFTER = 10
HOST_SLOTS = 11
COUNT = 12
PREFETCHES = 13
"""Index of each value in an iteration's message; prefetches fill the rest."""


class SyncedIterationModel(IterationModel):
    """Rank 0's iteration model as of the last sync."""

    def tell(self, coefficients: Sequence[float], iteration_s: float) -> None:
        """Set the values, in seconds."""
        base, token, read, product = coefficients
        self._values = (base, token, read, product)
        self.iteration_s.value = iteration_s


class SyncedLinkEstimate(LinkEstimate):
    """Rank 0's link estimate as of the last sync."""

    def tell(self, rates: Sequence[float]) -> None:
        """Set the rates, in bytes/s, in the order of ``report``."""
        for mean, rate in zip(self._rates.values(), rates, strict=True):
            mean.value = rate


@dataclass(frozen=True, slots=True)
class Agreed:
    """Synchronised inputs of one plan.

    Attributes:
        host_slots: KV slots that still fit every rank's host budget.
        prefetches: Progress of each prefetch on the slowest rank.
    """

    host_slots: int
    prefetches: tuple[int, ...]


class TensorParallelSync:
    """Synchronises values across ranks; every rank makes the same calls.

    Args:
        measured: This rank's measurements; the caller keeps updating them.
        group: The ranks' gloo group; None for a single rank.
        strict: Also compare the ranks' plans.

    Attributes:
        alone: There is one rank: nothing is sent and it plans by its own measurements.
        leads: This is rank 0, which reports for all ranks.
        estimates: Planning inputs: rank 0's measurements of the last ``sync_inputs``.
        expected: The other ranks will exchange again in this call of the worker, so
            they must be told of an error at once (``begin``, ``agree``).
        told: What each rank told when all of them met last.
    """

    def __init__(
        self,
        measured: Estimates,
        group: dist.ProcessGroup | None = None,
        *,
        strict: bool = False,
    ) -> None:
        self.measured = measured
        self.alone = group is None
        self.rank = 0 if group is None else dist.get_rank(group)
        self.leads = self.rank == 0
        self.estimates = measured
        self._group = group
        self._ranks = 1 if group is None else dist.get_world_size(group)
        self._strict = strict
        self._drawn = 0
        self.expected = False
        self.told: list[list[float]] = []
        self._failed = False  # and the other ranks do not know
        self._known = False  # by all ranks: one of them failed
        if self.alone:
            return
        self._iteration = SyncedIterationModel(START_COEFFICIENTS)
        self._link = SyncedLinkEstimate(START_LINK_BYTES_PER_S)
        self.estimates = Estimates(iteration=self._iteration, link=self._link)
        self._secret = int(self.first(secrets.randbelow(EXACT)))

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return each rank's values in rank order, as float64; blocks on all ranks.

        Every rank passes the same number of values.

        Raises:
            RankError: A rank failed, this one included; raised on all ranks.
        """
        if self.alone:
            return [list(values)]
        rows: list[list[float]] = [[] for _ in range(self._ranks)]
        for start in range(0, max(1, len(values)), WIDTH):
            if self._known:
                raise RankError("a rank failed in this iteration")
            part = values[start : start + WIDTH]
            received = self._exchange(self._failed, part)
            failed = [rank for rank, row in enumerate(received) if row[0]]
            if failed:
                self._known, self._failed, self.expected = True, False, False
                raise RankError(f"ranks {failed} failed")
            for row, more in zip(rows, received, strict=True):
                row.extend(more[1 : 1 + len(part)])
        return rows

    def _exchange(self, failed: bool, values: Sequence[float]) -> list[list[float]]:
        """Return each rank's flag and values, at most ``WIDTH``, padded."""
        mine = torch.zeros(1 + WIDTH, dtype=torch.float64)
        mine[: 1 + len(values)] = torch.tensor([failed, *values], dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self._ranks)]
        dist.all_gather(parts, mine, group=self._group)
        return [part.tolist() for part in parts]

    # -- errors -------------------------------------------------------------------

    def sync_errors(self, failed: bool, told: Sequence[float] = ()) -> bool:
        """Return whether any rank failed since the last call.

        Called at the begin of every scheduler iteration, whatever the ranks' states
        are, before SGLang selects requests: what was not exchanged by then is now.

        Args:
            failed: This rank must recover from an error.
            told: What this rank tells the others, less than ``WIDTH`` values.
        """
        if self.alone:
            return failed
        mine = [self._drawn, *told]
        rows = self._exchange(failed or self._failed or self._known, mine)
        self._drawn = int(max(row[1] for row in rows))
        self.told = [row[2 : 1 + len(mine)] for row in rows]
        self._known = any(row[0] for row in rows)
        self._failed = self.expected = False
        return self._known

    def recovered(self) -> None:
        """Communicate again; all ranks have recovered from the error."""
        self._known = self._failed = False

    def begin(self) -> None:
        """Begin a call of the worker that ends with an ``agree(last=True)``."""
        self.expected = not self.alone

    def agree(self, *, last: bool) -> None:
        """Wait until every rank has come here without an error.

        Args:
            last: No further exchange follows in this call of the worker. An error
                after it is exchanged by the next one, ``meet`` at the latest.

        Raises:
            RankError: A rank failed; raised on all ranks.
        """
        self.gather(())
        if last:
            self.expected = False

    @contextmanager
    def forward(self, *, last: bool) -> Iterator[None]:
        """Run a forward of the model once all ranks are ready for it.

        Args:
            last: See ``agree``.

        Raises:
            RankError: A rank failed; no rank runs the forward.
            LostRankError: The forward failed on this rank of several; the other ranks
                may wait in its collectives.
        """
        self.agree(last=last)
        try:
            yield
        except Exception as error:
            if self.alone or isinstance(error, torch.AcceleratorError):
                raise
            raise LostRankError(f"a forward failed: {error}") from error

    def fail(self) -> None:
        """Note an error of this rank, and tell the other ranks if they wait for it."""
        if self.alone or self._known:
            return
        self._failed = True
        if self.expected:
            with suppress(RankError):
                self.gather(())

    # -- values -------------------------------------------------------------------

    def first(self, value: float) -> float:
        """Return rank 0's value."""
        return self.gather([value])[0][0]

    def mean_of_all(self, value: float | None) -> float | None:
        """Return the mean over the ranks, summed in rank order.

        None if any rank has no value, because computing it failed there.
        """
        rows = self.gather([float(value is not None), value or 0.0])
        if not all(known for known, _ in rows):
            return None
        return sum(mine for _, mine in rows) / self._ranks

    def most(self, value: int) -> int:
        """Return the maximum over the ranks; values must be below ``EXACT``."""
        return int(max(row[0] for row in self.gather([value])))

    def every(self, holds: bool) -> bool:
        """Return whether a condition holds on all ranks."""
        return not self.most(not holds)

    def sync_inputs(self, host_slots: int, prefetches: Sequence[int]) -> Agreed:
        """Synchronise the inputs of a plan; all ranks use rank 0's measurements.

        Args:
            host_slots: KV slots that still fit this rank's host budget.
            prefetches: Progress of every prefetch on this rank, in the order they were
                started; smaller is less complete.

        Raises:
            InvariantError: The ranks have started different numbers of prefetches.
        """
        if self.alone:
            return Agreed(host_slots, tuple(prefetches))
        measured = self.measured
        message = [
            *astuple(measured.iteration.coefficients),
            measured.iteration.iteration_s.value,
            *measured.link.report().values(),
            measured.split_s.value,
            measured.drafter_s.value,
            float(host_slots),
            float(len(prefetches)),
            *map(float, prefetches),
        ]
        rows = self.gather(message[:WIDTH])
        self._iteration.tell(rows[0][COEFFICIENTS], rows[0][ITERATION])
        self._link.tell(rows[0][LINK])
        self.estimates.split_s.value = rows[0][SPLIT]
        self.estimates.drafter_s.value = rows[0][DRAFTER]
        if any(row[COUNT] != len(prefetches) for row in rows):
            raise InvariantError(f"{len(prefetches)} prefetches here, others elsewhere")
        if len(message) > WIDTH:  # on all ranks
            for row, more in zip(rows, self.gather(message[WIDTH:]), strict=True):
                row.extend(more)
        least = [int(min(each)) for each in zip(*rows, strict=True)]
        return Agreed(least[HOST_SLOTS], tuple(least[PREFETCHES:]))

    def check(self, given: SchedulerInput, plan: Plan) -> None:
        """Compare the ranks' plans if SGLang's strict memory checks are on.

        Raises:
            InvariantError: The plans differ; the message names the iteration.
        """
        if self.alone or not self._strict:
            return
        mine = _digest(f"{given} {plan}")
        found = [int(row[0]) for row in self.gather([mine])]
        if len(set(found)) > 1:
            raise InvariantError(
                f"the ranks plan differently in iteration {plan.iteration}: plans "
                f"{found}; here {given}, {plan}"
            )

    def same_noise(self, state: RequestState) -> None:
        """Set an unseeded request's noise key to rank 0's; each rank drew its own."""
        drew = state.profile.rule in (SamplingRule.COUPLED, SamplingRule.REJECTION)
        if (
            self.alone
            or not drew
            or state.req.sampling_params.sampling_seed is not None
        ):
            return
        self._drawn += 1
        seed = _digest(f"{self._secret} {self._drawn} {state.rid}")
        state.profile = replace(state.profile, seed=seed)


def open_tp_sync(measured: Estimates, tp_size: int) -> TensorParallelSync:
    """Create the sync of SGLang's tensor-parallel ranks.

    Args:
        measured: This rank's measurements.
        tp_size: Number of ranks.
    """
    if tp_size == 1:
        return TensorParallelSync(measured)
    from sglang.srt.distributed import get_tp_group

    group: Any = get_tp_group().cpu_group
    strict = bool(envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.get())
    return TensorParallelSync(measured, group, strict=strict)


def _digest(text: str) -> int:
    """Return 48 bits of a text's hash, equal in every process."""
    digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")
