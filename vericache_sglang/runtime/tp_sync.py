"""Tensor-parallel sync: exchanges rank-local values so that all ranks plan alike.

Every rank runs the same scheduler over the same requests and tokens. Only measured
times, completed copies, host memory and the scores of KV heads differ between ranks;
these are synchronised here. A single rank communicates nothing.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from sglang.srt.environ import envs

from vericache_sglang.errors import InvariantError
from vericache_sglang.sampling.profile import SamplingRule
from vericache_sglang.scheduling.estimates import (
    START_COEFFICIENTS,
    START_LINK_BYTES_PER_S,
    Estimates,
)
from vericache_sglang.scheduling.iteration_model import IterationModel
from vericache_sglang.scheduling.link import LinkEstimate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.scheduling.plan import Plan, World

EXACT = 1 << 52
"""Integers below this are exact in float64."""

COEFFICIENTS = slice(0, 4)
ITERATION = 4
LINK = slice(5, 9)
SPLIT = 9
HOST_SLOTS = 10
COUNT = 11
PREFETCHES = 12
"""Index of each value in an iteration's message; prefetches fill the rest."""


class ToldIteration(IterationModel):
    """Rank 0's iteration model as of the last sync."""

    def tell(self, coefficients: Sequence[float], iteration_s: float) -> None:
        """Set the values, in seconds."""
        base, token, read, product = coefficients
        self._values = (base, token, read, product)
        self.iteration_s.value = iteration_s


class ToldLink(LinkEstimate):
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
        most_prefetches: Maximum concurrent prefetches.
        strict: Also compare the ranks' plans.

    Attributes:
        alone: There is one rank: nothing is sent and it plans by its own measurements.
        leads: This is rank 0, which reports for all ranks.
        estimates: Planning inputs: rank 0's measurements as of the last ``hear``.
    """

    def __init__(
        self,
        measured: Estimates,
        group: dist.ProcessGroup | None = None,
        *,
        most_prefetches: int = 0,
        strict: bool = False,
    ) -> None:
        self.measured = measured
        self.alone = group is None
        self.leads = group is None or dist.get_rank(group) == 0
        self.estimates = measured
        self._group = group
        self._ranks = 1 if group is None else dist.get_world_size(group)
        self._width = PREFETCHES + most_prefetches
        self._strict = strict
        self._drawn = 0
        if self.alone:
            return
        self._iteration = ToldIteration(START_COEFFICIENTS)
        self._link = ToldLink(START_LINK_BYTES_PER_S)
        self.estimates = Estimates(iteration=self._iteration, link=self._link)
        self._secret = int(self.first(secrets.randbelow(EXACT)))

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return each rank's values in rank order, as float64; blocks on all ranks.

        Every rank passes the same number of values.
        """
        if self._group is None:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self._ranks)]
        dist.all_gather(parts, mine, group=self._group)
        return [part.tolist() for part in parts]

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

    def hear(self, host_slots: int, prefetches: Sequence[int]) -> Agreed:
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
            float(host_slots),
            float(len(prefetches)),
            *map(float, prefetches),
        ]
        message += [0.0] * (self._width - len(message))
        rows = self.gather(message)
        self._iteration.tell(rows[0][COEFFICIENTS], rows[0][ITERATION])
        self._link.tell(rows[0][LINK])
        self.estimates.split_s.value = rows[0][SPLIT]
        if any(row[COUNT] != len(prefetches) for row in rows):
            raise InvariantError(f"{len(prefetches)} reloads here, others elsewhere")
        least = [int(min(each)) for each in zip(*rows, strict=True)]
        return Agreed(
            least[HOST_SLOTS], tuple(least[PREFETCHES : PREFETCHES + len(prefetches)])
        )

    def check(self, world: World, plan: Plan) -> None:
        """Compare the ranks' plans if SGLang's strict memory checks are on.

        Raises:
            InvariantError: The plans differ; the message names the iteration.
        """
        if self.alone or not self._strict:
            return
        mine = _digest(f"{world} {plan}")
        found = [int(row[0]) for row in self.gather([mine])]
        if len(set(found)) > 1:
            raise InvariantError(
                f"the ranks plan differently in iteration {plan.iteration}: plans "
                f"{found}; here {world}, {plan}"
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


def open_tp_sync(
    measured: Estimates, tp_size: int, most_prefetches: int
) -> TensorParallelSync:
    """Create the sync of SGLang's tensor-parallel ranks.

    Args:
        measured: This rank's measurements.
        tp_size: Number of ranks.
        most_prefetches: Maximum concurrent prefetches.
    """
    if tp_size == 1:
        return TensorParallelSync(measured)
    from sglang.srt.distributed import get_tp_group

    group: Any = get_tp_group().cpu_group
    strict = bool(envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.get())
    return TensorParallelSync(
        measured, group, most_prefetches=most_prefetches, strict=strict
    )


def _digest(text: str) -> int:
    """Return 48 bits of a text's hash, equal in every process."""
    digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")
