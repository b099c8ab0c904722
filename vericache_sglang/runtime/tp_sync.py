"""What tensor-parallel ranks tell each other, so that all of them plan alike.

Every rank runs the same scheduler over the same requests and tokens. What a rank alone
knows is how long things took, which copies have arrived, what its host memory holds and
how its own KV heads scored; here the ranks agree on it. One rank alone asks nobody.
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
"""Integers below it travel as float64 without rounding."""

COEFFICIENTS = slice(0, 4)
ITERATION = 4
LINK = slice(5, 9)
SPLIT = 9
HOST_SLOTS = 10
COUNT = 11
PREFETCHES = 12
"""Where each value of an iteration's message stands; reloads fill the rest."""


class ToldIteration(IterationModel):
    """Rank 0's model of the iteration, as it was told last."""

    def tell(self, coefficients: Sequence[float], iteration_s: float) -> None:
        """Take the values over, in seconds."""
        base, token, read, product = coefficients
        self._values = (base, token, read, product)
        self.iteration_s.value = iteration_s


class ToldLink(LinkEstimate):
    """Rank 0's estimate of the link, as it was told last."""

    def tell(self, rates: Sequence[float]) -> None:
        """Take the rates over, in bytes/s, in the order of ``report``."""
        for mean, rate in zip(self._rates.values(), rates, strict=True):
            mean.value = rate


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the ranks agreed on for one plan.

    Attributes:
        host_slots: KV slots that still fit every rank's host budget.
        prefetches: Progress of each reload: that of the rank that is furthest behind.
    """

    host_slots: int
    prefetches: tuple[int, ...]


class TensorParallelSync:
    """Makes what one rank knows known to all; every rank makes the same calls.

    Args:
        measured: What this rank measures; the caller keeps feeding it.
        group: The ranks' gloo group; None for a rank that is alone.
        most_prefetches: Reloads that may be under way at once.
        strict: Compare the ranks' plans too.

    Attributes:
        alone: There is one rank: nothing is sent, and what it measures is planned by.
        leads: This is rank 0, which reports for all.
        estimates: What to plan by: rank 0's measurements as of the last ``hear``.
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
        """Return every rank's values, by rank; as many from each, float64.

        The caller waits for the slowest rank.
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
        """Return the mean over the ranks, added up in their order.

        None where a rank has none: the call that was to make it may fail on one.
        """
        rows = self.gather([float(value is not None), value or 0.0])
        if not all(known for known, _ in rows):
            return None
        return sum(mine for _, mine in rows) / self._ranks

    def most(self, value: int) -> int:
        """Return the largest of the ranks' values, each below ``EXACT``."""
        return int(max(row[0] for row in self.gather([value])))

    def every(self, holds: bool) -> bool:
        """Say whether something holds on all ranks."""
        return not self.most(not holds)

    def hear(self, host_slots: int, prefetches: Sequence[int]) -> Agreed:
        """Exchange what a plan depends on; rank 0's measurements become everybody's.

        Args:
            host_slots: KV slots that still fit this rank's host budget.
            prefetches: Progress of every reload here, in the order they were started; a
                smaller number is further behind.

        Raises:
            InvariantError: The ranks have not started the same number of reloads.
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
        """Compare the ranks' plans, where SGLang's strict memory checks are on.

        Raises:
            InvariantError: They differ; the message names the iteration.
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
        """Key the noise of an unseeded request alike on every rank; each drew a key."""
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
    """Return the agreement of SGLang's tensor-parallel ranks.

    Args:
        measured: What this rank measures.
        tp_size: Their number.
        most_prefetches: Reloads that may be under way at once.
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
