"""Text of ``plan --remote``: two pools around a store, both sweeps of figure 13.

arXiv:2605.17613, appendix A.2 by ``planning.inter``; section 8.3 for the sweeps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vericache_sglang.planning.inter import BASELINE_PATHS, Cluster, solve

if TYPE_CHECKING:
    from collections.abc import Callable

GIGABYTE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Speedup over the best mix of B1 and B2 while one value varies.

    Attributes:
        points: (value, throughput of all six paths over that of B1 and B2).
    """

    label: str
    points: tuple[tuple[float, float], ...]


def over_baseline(cluster: Cluster) -> float:
    """Return the throughput of all six paths over that of B1 and B2."""
    return solve(cluster).tokens_per_s / solve(cluster, BASELINE_PATHS).tokens_per_s


def with_arrival(cluster: Cluster, cycles: float) -> Cluster:
    """Return the cluster with the far link at which KV arrives in so many cycles.

    Args:
        cluster: See ``Cluster``.
        cycles: T_init_remote / T_decode, > 0: arrival of a request's compressed KV over
            a draft-verify cycle of a full batch.
    """
    batch = cluster.slots
    cycle_s = (cluster.draft_length + 1) * batch * cluster.token_s(batch)
    moved = cluster.compressed * cluster.kv_full_bytes
    return replace(cluster, remote_bytes_per_s=moved / (cycles * cycle_s))


def with_instances(cluster: Cluster, ratio: float) -> Cluster:
    """Return the cluster with G_R / G_L remote instances for each local one."""
    return replace(cluster, remote=round(ratio * cluster.local))


SWEEPS: dict[str, tuple[Callable[[Cluster, float], Cluster], tuple[float, ...]]] = {
    "G_R / G_L": (with_instances, (1, 2, 3, 4, 5, 6, 7, 8)),
    "T_init_remote / T_decode": (
        with_arrival,
        (0.25, 0.5, 1, 2, 3, 5, 8, 12),
    ),
}
"""Figure 13, right: label -> change of a cluster, and its values."""


def sweeps(cluster: Cluster) -> list[Sweep]:
    """Return both sweeps of figure 13 around a cluster."""
    return [
        Sweep(
            label=label,
            points=tuple((at, over_baseline(change(cluster, at))) for at in values),
        )
        for label, (change, values) in SWEEPS.items()
    ]


def pools_summary(model: str, cluster: Cluster, found: list[Sweep]) -> str:
    """Return the best mix of paths and the sweeps as text.

    Args:
        model: Name of the model.
        cluster: The two pools.
    """
    best, plain = solve(cluster), solve(cluster, BASELINE_PATHS)
    near, far, kv = (
        amount / GIGABYTE
        for amount in (
            *(cluster.local_bytes_per_s, cluster.remote_bytes_per_s),
            cluster.kv_full_bytes,
        )
    )
    lines = [
        f"{model} on {cluster.machine.name}: {cluster.local} near the store "
        f"({near:g} GB/s each), {cluster.remote} behind {far:g} GB/s each",
        f"{cluster.slots} full KVs of {kv:.1f} GB fit each",
        "",
        f"B1 and B2 alone  {plain.tokens_per_s:8.1f} tokens/s",
        f"all six paths    {best.tokens_per_s:8.1f} tokens/s, "
        f"{best.tokens_per_s / plain.tokens_per_s:.2f}x",
        "",
        *(
            f"{path:<14} {abs(count):8.3f} requests/s"
            for path, count in best.requests_per_s.items()
        ),
    ]
    for sweep in found:
        values, ratios = zip(*sweep.points, strict=True)
        lines += [
            "",
            f"{sweep.label:<26}" + "".join(f"{value:>7g}" for value in values),
            f"{'over B1 and B2':<26}" + "".join(f"{ratio:>6.2f}x" for ratio in ratios),
        ]
    return "\n".join(lines)
