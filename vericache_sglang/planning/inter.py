"""Remote prefix caching: one request's time, and the best mix of six paths.

arXiv:2605.17613, equation tp_inter of section 4.1, and of appendix A.2 the equations
t_tok, cap and opt_inter. One departure: slots are held and
drafts emitted at the latency that a request sees, B * T_tok(B), which is one iteration;
the printed K * T_tok(B) is a request's share of GPU time, by which one slot would hold
B requests.
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

    def token_s(self, batch: float) -> float:
        """Return T_tok(B), a request's share of GPU time per token, in s."""
        read = self.weight_bytes / batch + self.kv_full_bytes
        return read / self.machine.hbm_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Resources that one request of a path occupies, in seconds of one instance.

    Attributes:
        net: Link time.
        gpu: Share of GPU time.
        mem: Time for which it holds one KV slot.
    """

    net: float = 0.0
    gpu: float = 0.0
    mem: float = 0.0


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
    cluster: Cluster, local_batch: float, remote_batch: float
) -> dict[str, tuple[Cost, Cost]]:
    """Return the local and the remote cost of one request on each path.

    Args:
        cluster: See ``Cluster``.
        local_batch: B of a local instance, in [1, slots].
        remote_batch: B of a remote instance, in [1, slots].
    """
    full, tokens = cluster.kv_full_bytes, cluster.output_tokens
    near_s = full / cluster.local_bytes_per_s
    far_s = full / cluster.remote_bytes_per_s
    near_token, far_token = cluster.token_s(local_batch), cluster.token_s(remote_batch)
    near_pace, far_pace = local_batch * near_token, remote_batch * far_token
    first_s, rest_s = cluster.compressed * far_s, (1 - cluster.compressed) * far_s
    gamma, x = cluster.acceptance_rate, cluster.draft_length

    drafts = tokens / gamma
    cycles = ceil(tokens / (gamma * x))
    remote_p1 = Cost(
        net=first_s, gpu=drafts * far_token, mem=first_s + drafts * far_pace
    )
    early = min(rest_s / far_pace, drafts)
    early_cycles = ceil(early / x)
    late = max(0.0, tokens - gamma * early)
    remote_p2 = Cost(
        net=far_s,
        gpu=(early + late) * far_token,
        mem=first_s + max(early * far_pace, rest_s) + late * far_pace,
    )

    def cached(count: int, drafting_s: float) -> Cost:
        return Cost(net=near_s, gpu=count * near_token, mem=near_s + drafting_s)

    def stateless(count: int) -> Cost:
        return Cost(
            net=count * near_s,
            gpu=count * near_token,
            mem=count * (near_s + near_pace),
        )

    return {
        "B1": (
            Cost(net=near_s, gpu=tokens * near_token, mem=near_s + tokens * near_pace),
            Cost(),
        ),
        "B2": (
            Cost(),
            Cost(net=far_s, gpu=tokens * far_token, mem=far_s + tokens * far_pace),
        ),
        "P1-cached": (cached(cycles, drafts * far_pace), remote_p1),
        "P1-stateless": (stateless(cycles), remote_p1),
        "P2-cached": (cached(early_cycles, early * far_pace), remote_p2),
        "P2-stateless": (stateless(early_cycles), remote_p2),
    }


def constraints(
    cluster: Cluster, costs: Sequence[tuple[Cost, Cost]]
) -> tuple[list[list[float]], list[float]]:
    """Return Eq. (cap) as rows and limits: net, gpu, mem of local, then of remote."""
    rows, limits = [], []
    for side, count in enumerate((cluster.local, cluster.remote)):
        for kind, each in (("net", 1), ("gpu", 1), ("mem", cluster.slots)):
            rows.append([getattr(cost[side], kind) for cost in costs])
            limits.append(float(count * each))
    return rows, limits


def solve(cluster: Cluster, paths: Sequence[str] = PATHS) -> PoolMix:
    """Return the mix of highest throughput that was found, Eq. (opt_inter).

    A mix that is optimal at its implied batches need not be the global optimum: fewer
    paths may fill batches better. The mixes of the baseline, P1 and P2 alone are
    therefore evaluated too, so that more paths never give less throughput.

    Args:
        cluster: See ``Cluster``.
        paths: Allowed paths; ``BASELINE_PATHS`` for serving without speculation.
    """
    return max(_mixes(cluster, paths), key=_order)


def simplest(cluster: Cluster, paths: Sequence[str] = PATHS) -> PoolMix:
    """Return the mix to follow: of the fewest kinds of paths, and almost the best.

    The program divides a slot between verifications, and its queues are never empty.
    Pools can do neither, and lose up to 5 % by paths of which the program promises no
    more than that (SIMULATED, docs/planning.md).

    Args:
        cluster: See ``Cluster``.
        paths: Allowed paths.
    """
    mixes = _mixes(cluster, paths)
    converged, tokens_per_s = _order(max(mixes, key=_order))
    enough = (converged, tokens_per_s / (1 + LEAST_GAIN))
    return next(mix for mix in mixes if _order(mix) >= enough)


def _order(mix: PoolMix) -> tuple[bool, float]:
    return mix.converged, mix.tokens_per_s


def _mixes(cluster: Cluster, paths: Sequence[str]) -> list[PoolMix]:
    """Return the mixes of the baseline, with P1, with P2, and of all paths."""
    fewer = [
        tuple(path for path in paths if path[:2] in (*BASELINE_PATHS, kind))
        for kind in ("", "P1", "P2")
    ]
    competing = dict.fromkeys([*fewer, tuple(paths)])
    return [fixed_point(cluster, some) for some in competing if some]


def fixed_point(cluster: Cluster, paths: Sequence[str]) -> PoolMix:
    """Return a mix that is optimal at the batches it implies.

    Costs depend on the batches, and the batches on the mix. Starting from full batches,
    the program is solved again at the mean of its batches and the implied ones, at most
    ``_ROUNDS`` times.

    Args:
        cluster: See ``Cluster``.
        paths: Allowed paths, at least one.
    """
    batches = (float(cluster.slots), float(cluster.slots))
    mix = _program(cluster, paths, batches)
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
        mix = _program(cluster, paths, batches)
    return mix


def _program(
    cluster: Cluster, paths: Sequence[str], batches: tuple[float, float]
) -> PoolMix:
    try:
        from scipy.optimize import linprog
    except ImportError as error:
        raise ConfigError(
            "the remote-prefix model needs scipy: pip install scipy"
        ) from error

    table = path_costs(cluster, *batches)
    costs = [table[path] for path in paths]
    rows, limits = constraints(cluster, costs)
    answer = linprog([-1.0] * len(costs), A_ub=rows, b_ub=limits, method="highs")
    if not answer.success:
        raise ConfigError(f"no mix of {', '.join(paths)} exists: {answer.message}")
    counts = [float(count) for count in answer.x]

    def implied(busy_s: list[float], instances: int, batch: float) -> float:
        each = [count / max(instances, 1) for count in counts]
        return _implied(cluster, busy_s, each, batch)

    return PoolMix(
        tokens_per_s=cluster.output_tokens * sum(counts),
        requests_per_s=dict(zip(paths, counts, strict=True)),
        local_batch=implied(rows[1], cluster.local, batches[0]),
        remote_batch=implied(rows[4], cluster.remote, batches[1]),
        converged=False,
    )


def _implied(
    cluster: Cluster, busy_s: Sequence[float], counts: Sequence[float], batch: float
) -> float:
    """Return the smallest batch at which one instance's GPU sustains the load.

    With N tokens a second, B requests share each read of the weights:
    N (M / B + KV) = BW, solved for B.

    Args:
        cluster: See ``Cluster``.
        busy_s: GPU seconds per request of each path, of one instance.
        counts: n_i, per instance.
        batch: B at which ``busy_s`` was evaluated.
    """
    busy = sum(second * count for second, count in zip(busy_s, counts, strict=True))
    rate = busy / cluster.token_s(batch)
    left = cluster.machine.hbm_bytes_per_s - rate * cluster.kv_full_bytes
    if left <= 0:
        return float(cluster.slots)
    return min(max(1.0, rate * cluster.weight_bytes / left), float(cluster.slots))
