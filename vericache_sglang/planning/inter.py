"""Remote prefix caching: one request's time, and the best mix of six paths.

arXiv:2605.17613, equation tp_inter of section 4.1, and of appendix A.2 the equations
t_tok, cap and opt_inter. One departure: slots are held and
drafts emitted at the latency that a request sees, B * T_tok(B), which is one iteration;
the printed K * T_tok(B) is a request's share of GPU time, by which one slot would hold
B requests. And terms that the paper omits, zero or alike for a ``Cluster``: the pools'
forwards differ, rows that draft or verify take other times than rows that decode, and
a request's prompt is prefilled in part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from vericache_sglang.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.planning.hardware import Machine

BASELINE_PATHS = ("B1", "B2")
PATHS = (
    *BASELINE_PATHS,
    *("P1-cached", "P1-stateless", "P2-cached", "P2-stateless"),
)

LEAST_GAIN = 0.05
"""Of throughput, for which ``simplest`` takes up another kind of path."""

_ROUNDS = 60
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Two pools around a KV store, and the requests they share.

    Attributes:
        machine: One instance of either pool.
        local: G_L, instances near the store, >= 1.
        remote: G_R, instances far from it, >= 0.
        local_bytes_per_s: BW_h, store to each local instance.
        remote_bytes_per_s: BW_l, store to each remote instance.
        weight_bytes: M.
        kv_full_bytes: Full KV of a request.
        compressed: c, part of it that a compressed transfer moves, in (0, 1].
        output_tokens: K, in tokens, >= 1.
        draft_length: x, in tokens, >= 1.
        acceptance_rate: gamma, accepted over drafted, in (0, 1].

    Raises:
        ConfigError: No full KV fits beside the weights, or a value is out of bounds.
    """

    machine: Machine
    local: int
    remote: int
    local_bytes_per_s: float
    remote_bytes_per_s: float
    weight_bytes: float
    kv_full_bytes: float
    compressed: float
    output_tokens: int
    draft_length: int
    acceptance_rate: float

    def __post_init__(self) -> None:
        if not 0 < self.acceptance_rate <= 1 or not 0 < self.compressed <= 1:
            raise ConfigError("acceptance_rate and compressed must be in (0, 1]")
        if self.local < 1 or self.remote < 0 or self.slots < 1:
            raise ConfigError("a cluster needs a local GPU and room for one full KV")

    @property
    def slots(self) -> int:
        """B_max, the full KVs that fit one instance."""
        room = self.machine.memory_bytes - self.weight_bytes
        return int(room // self.kv_full_bytes)

    @property
    def pools(self) -> PoolPair:
        """Both pools, in times of a request."""
        row_s = self.kv_full_bytes / self.machine.hbm_bytes_per_s
        near, far = (
            Pool(
                instances=instances,
                slots=self.slots,
                load_s=self.kv_full_bytes / bytes_per_s,
                base_s=self.weight_bytes / self.machine.hbm_bytes_per_s,
                row_s=row_s,
                check_s=row_s,
                draft_s=row_s,
            )
            for instances, bytes_per_s in (
                (self.local, self.local_bytes_per_s),
                (self.remote, self.remote_bytes_per_s),
            )
        )
        return PoolPair(
            near=near,
            far=far,
            compressed=self.compressed,
            output_tokens=self.output_tokens,
            draft_length=self.draft_length,
            acceptance_rate=self.acceptance_rate,
        )

    def token_s(self, batch: float) -> float:
        """Return T_tok(B), a request's share of GPU time per token, in s."""
        return self.pools.near.token_s(batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Equal instances, in times of a request of mean length, in seconds.

    Attributes:
        instances: >= 0; a part of one where others have the rest of it.
        slots: B_max, the full KVs that fit one instance, > 0.
        load_s: KV_full / BW, of the link from the store to each.
        base_s: A forward without its rows: it reads the weights.
        row_s: A row of it that decodes over full KV.
        check_s: A row that verifies x drafts.
        draft_s: A row that drafts.
        prompt_s: What is prefilled of a request's prompt.
    """

    instances: float
    slots: float
    load_s: float
    base_s: float
    row_s: float
    check_s: float
    draft_s: float
    prompt_s: float = 0.0

    def token_s(self, batch: float) -> float:
        """Return T_tok(B), a request's share of GPU time per token, in s."""
        return self.base_s / batch + self.row_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPair:
    """A pool near a store and one far from it, and the mean request they share.

    Attributes:
        near: Instances that verify.
        far: Instances that draft.
        compressed: c, part of the full KV that a compressed transfer moves, in (0, 1].
        output_tokens: K, in tokens, > 0.
        draft_length: x, in tokens, > 0.
        acceptance_rate: gamma, accepted over drafted, in (0, 1].
        lead_tokens: Tokens that a near instance decodes before drafts are made of a
            request, in [0, K].
        drafting_slots: Slots that a request holds in the far pool while it drafts.
    """

    near: Pool
    far: Pool
    compressed: float
    output_tokens: float
    draft_length: float
    acceptance_rate: float
    lead_tokens: float = 0.0
    drafting_slots: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Resources that one request of a path occupies, in seconds of one instance.

    Attributes:
        net: Link time.
        gpu: Share of GPU time.
        mem: Time for which it holds one KV slot.
        rows: Rows of forwards, whose parts of ``base_s`` are in ``gpu``.
    """

    net: float = 0.0
    gpu: float = 0.0
    mem: float = 0.0
    rows: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMix:
    """A solution of the linear program.

    Attributes:
        tokens_per_s: Throughput of the cluster.
        requests_per_s: n_i of each allowed path.
        local_batch: B of a local instance, implied by the n_i.
        remote_batch: B of a remote instance.
        converged: Whether the costs were evaluated at the implied batches.
    """

    tokens_per_s: float
    requests_per_s: dict[str, float]
    local_batch: float
    remote_batch: float
    converged: bool

    @property
    def shares(self) -> dict[str, float]:
        """Each path's share of the requests, in sum 1."""
        total = sum(self.requests_per_s.values())
        return {path: n / total for path, n in self.requests_per_s.items()}


def cycle_s(
    draft_length: int, token_s: float, load_s: float, forward_s: float
) -> float:
    """Return T_cycle of Eq. (tp_inter): drafting or loading, then verifying, in s.

    Args:
        draft_length: x, in tokens, >= 1.
        token_s: T_decode, an iteration of the drafter, in s.
        load_s: KV_full / BW_h, in s; 0 where the verifier has it.
        forward_s: T_fwd(x), the verification's forward, in s.
    """
    return max(draft_length * token_s, load_s) + forward_s


def speculation_s(
    startup_s: float,
    tokens: float,
    draft_length: int,
    acceptance_rate: float,
    cycle: float,
) -> float:
    """Return T_req of Eq. (tp_inter), a request's time on P1, in s.

    Args:
        startup_s: c * KV_full / BW_l, in s.
        tokens: K, >= 0.
        draft_length: x, in tokens, >= 1.
        acceptance_rate: gamma(x, c), in (0, 1].
        cycle: T_cycle, in s; see ``cycle_s``.
    """
    return startup_s + tokens / (draft_length * acceptance_rate) * cycle


def path_costs(
    pools: PoolPair, local_batch: float, remote_batch: float
) -> dict[str, tuple[Cost, Cost]]:
    """Return the local and the remote cost of one request on each path.

    Args:
        pools: See ``PoolPair``.
        local_batch: B of a local instance, in [1, slots].
        remote_batch: B of a remote instance, in [1, slots].
    """
    near, far = pools.near, pools.far
    near_part, far_part = near.base_s / local_batch, far.base_s / remote_batch
    near_pace = near.base_s + local_batch * near.row_s
    far_pace = far.base_s + remote_batch * far.row_s
    draft_pace = far.base_s + remote_batch * far.draft_s
    first_s, rest_s = pools.compressed * far.load_s, (1 - pools.compressed) * far.load_s
    gamma, x, tokens = pools.acceptance_rate, pools.draft_length, pools.output_tokens
    lead = pools.lead_tokens

    def decoded(pool: Pool, part: float, pace: float) -> Cost:
        return Cost(
            net=pool.load_s,
            gpu=pool.prompt_s + tokens * (part + pool.row_s),
            mem=pool.load_s + tokens * pace,
            rows=tokens,
        )

    drafts = (tokens - lead) / gamma
    cycles = ceil(drafts / x)
    held = pools.drafting_slots
    remote_p1 = Cost(
        net=first_s,
        gpu=pools.compressed * far.prompt_s + drafts * (far_part + far.draft_s),
        mem=held * (first_s + drafts * draft_pace),
        rows=drafts,
    )
    early = min(rest_s / draft_pace, drafts)
    early_cycles = ceil(early / x)
    late = max(0.0, tokens - lead - gamma * early)
    remote_p2 = Cost(
        net=far.load_s,
        gpu=far.prompt_s
        + early * (far_part + far.draft_s)
        + late * (far_part + far.row_s),
        mem=held * (first_s + max(early * draft_pace, rest_s)) + late * far_pace,
        rows=early + late,
    )

    def verified(count: int, loads: float, held_s: float) -> Cost:
        return Cost(
            net=loads * near.load_s,
            gpu=near.prompt_s
            + lead * (near_part + near.row_s)
            + count * (near_part + near.check_s),
            mem=loads * near.load_s + lead * near_pace + held_s,
            rows=lead + count,
        )

    def cached(count: int, drafting_s: float) -> Cost:
        return verified(count, 1, drafting_s)

    def stateless(count: int) -> Cost:
        return verified(count, count + bool(lead), count * near_pace)

    return {
        "B1": (decoded(near, near_part, near_pace), Cost()),
        "B2": (Cost(), decoded(far, far_part, far_pace)),
        "P1-cached": (cached(cycles, drafts * draft_pace), remote_p1),
        "P1-stateless": (stateless(cycles), remote_p1),
        "P2-cached": (cached(early_cycles, early * draft_pace), remote_p2),
        "P2-stateless": (stateless(early_cycles), remote_p2),
    }


def constraints(
    pools: PoolPair, costs: Sequence[tuple[Cost, Cost]]
) -> tuple[list[list[float]], list[float]]:
    """Return Eq. (cap) as rows and limits: net, gpu, mem of local, then of remote."""
    rows, limits = [], []
    for side, pool in enumerate((pools.near, pools.far)):
        for kind, each in (("net", 1.0), ("gpu", 1.0), ("mem", pool.slots)):
            rows.append([getattr(cost[side], kind) for cost in costs])
            limits.append(pool.instances * each)
    return rows, limits


def solve(pools: PoolPair, paths: Sequence[str] = PATHS) -> PoolMix:
    """Return the mix of highest throughput that was found, Eq. (opt_inter).

    A mix that is optimal at its implied batches need not be the global optimum: fewer
    paths may fill batches better. The mixes of the baseline, P1 and P2 alone are
    therefore evaluated too, so that more paths never give less throughput.

    Args:
        pools: See ``PoolPair``.
        paths: Allowed paths; ``BASELINE_PATHS`` for serving without speculation.
    """
    return max(_mixes(pools, paths), key=_order)


def simplest(
    pools: PoolPair,
    paths: Sequence[str] = PATHS,
    batches: tuple[float, float] | None = None,
) -> PoolMix:
    """Return the mix to follow: of the fewest kinds of paths, and almost the best.

    The program divides a slot between verifications, and its queues are never empty.
    Pools can do neither, and lose up to 5 % by paths of which the program promises no
    more than that (SIMULATED, docs/planning.md).

    Args:
        pools: See ``PoolPair``.
        paths: Allowed paths.
        batches: B of a local and of a remote instance; None: those that the mix
            implies.
    """
    mixes = _mixes(pools, paths, batches)
    converged, tokens_per_s = _order(max(mixes, key=_order))
    enough = (converged, tokens_per_s / (1 + LEAST_GAIN))
    return next(mix for mix in mixes if _order(mix) >= enough)


def _order(mix: PoolMix) -> tuple[bool, float]:
    return mix.converged, mix.tokens_per_s


def _mixes(
    pools: PoolPair,
    paths: Sequence[str],
    batches: tuple[float, float] | None = None,
) -> list[PoolMix]:
    """Return the mixes of the baseline, with P1, with P2, and of all paths."""
    fewer = [
        tuple(path for path in paths if path[:2] in (*BASELINE_PATHS, kind))
        for kind in ("", "P1", "P2")
    ]
    competing = dict.fromkeys([*fewer, tuple(paths)])
    if batches is not None:
        return [_program(pools, some, batches) for some in competing if some]
    return [fixed_point(pools, some) for some in competing if some]


def fixed_point(pools: PoolPair, paths: Sequence[str]) -> PoolMix:
    """Return a mix that is optimal at the batches it implies.

    Costs depend on the batches, and the batches on the mix. Starting from full batches,
    the program is solved again at the mean of its batches and the implied ones, at most
    ``_ROUNDS`` times.

    Args:
        pools: See ``PoolPair``.
        paths: Allowed paths, at least one.
    """
    batches = (float(pools.near.slots), float(pools.far.slots))
    mix = _program(pools, paths, batches)
    for _ in range(_ROUNDS):
        implied = (mix.local_batch, mix.remote_batch)
        if all(
            abs(new - old) <= _TOLERANCE * old
            for new, old in zip(implied, batches, strict=True)
        ):
            return replace(mix, converged=True)
        batches = (
            (implied[0] + batches[0]) / 2,
            (implied[1] + batches[1]) / 2,
        )
        mix = _program(pools, paths, batches)
    return mix


def _program(
    pools: PoolPair, paths: Sequence[str], batches: tuple[float, float]
) -> PoolMix:
    try:
        from scipy.optimize import linprog
    except ImportError as error:
        raise ConfigError(
            "the remote-prefix model needs scipy: pip install scipy"
        ) from error

    table = path_costs(pools, *batches)
    costs = [table[path] for path in paths]
    rows, limits = constraints(pools, costs)
    answer = linprog([-1.0] * len(costs), A_ub=rows, b_ub=limits, method="highs")
    if not answer.success:
        raise ConfigError(f"no mix of {', '.join(paths)} exists: {answer.message}")
    counts = [float(count) for count in answer.x]

    local, remote = (
        _implied(
            pool,
            [(cost[side], n) for cost, n in zip(costs, counts, strict=True)],
            batches[side],
        )
        for side, pool in enumerate((pools.near, pools.far))
    )
    return PoolMix(
        tokens_per_s=pools.output_tokens * sum(counts),
        requests_per_s=dict(zip(paths, counts, strict=True)),
        local_batch=local,
        remote_batch=remote,
        converged=False,
    )


def _implied(pool: Pool, served: Sequence[tuple[Cost, float]], batch: float) -> float:
    """Return the smallest batch at which one instance's GPU sustains the load.

    With N rows a second, B rows share each ``base_s``: N * base / B and the rows' own
    time are one second, solved for B.

    Args:
        pool: See ``Pool``.
        served: Cost and requests per second of each path.
        batch: B at which the costs were evaluated.
    """
    each = pool.instances or 1
    rows = sum(cost.rows * count for cost, count in served) / each
    busy = sum(cost.gpu * count for cost, count in served) / each
    left = 1 - (busy - rows * pool.base_s / batch)
    if left <= 0:
        return float(pool.slots)
    return min(max(1.0, rows * pool.base_s / left), float(pool.slots))
