"""Text and JSON of simulated pools; each is marked SIMULATED."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from vericache_sglang.planning.inter import BASELINE_PATHS, solve
from vericache_sglang.planning.pools import over_baseline, request_times_s, sweeps
from vericache_sglang.simulation.remote import (
    ALL_SIX,
    BASELINE,
    MEASURED,
    RULES,
    Pools,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vericache_sglang.planning.inter import Cluster
    from vericache_sglang.planning.pools import Sweep
    from vericache_sglang.simulation.remote import PoolsLoad, PoolsResult, Rules

COLUMNS: dict[str, Callable[[PoolsResult], str]] = {
    "rules": lambda row: row.rules,
    "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
    "paths %": lambda row: ", ".join(
        f"{path} {100 * share:.0f}" for path, share in row.mix.items()
    ),
    "s a request": lambda row: ", ".join(
        f"{path} {seconds:.1f}" for path, seconds in row.request_s.items()
    ),
    "near link %": lambda row: f"{100 * row.near_link:.0f}",
    "far link %": lambda row: f"{100 * row.far_link:.0f}",
    "rows near, far": lambda row: f"{row.near_rows:.1f}, {row.far_rows:.1f}",
    "busy": lambda row: str(row.busy),
}


SIMULATED = {"SIMULATED": ALL_SIX, "SIMULATED, as drafters measure": MEASURED}
"""Curve -> its rules."""


def over_simulated_baseline(
    cluster: Cluster, load: PoolsLoad, rules: Rules = ALL_SIX
) -> float:
    """Return the SIMULATED throughput of all six paths over that of B1 and B2."""
    ours, plain = (Pools(cluster, each, load).run() for each in (rules, BASELINE))
    return ours.tokens_per_s / plain.tokens_per_s


def simulated_rules(cluster: Cluster, load: PoolsLoad) -> list[PoolsResult]:
    """Return the figures of every set of rules."""
    return [Pools(cluster, rules, load).run() for rules in RULES]


def both_sweeps(cluster: Cluster, load: PoolsLoad) -> dict[str, list[Sweep]]:
    """Return figure 13's sweeps by the name of the curve."""
    return {
        "planned": sweeps(cluster, over_baseline),
        **{
            name: sweeps(
                cluster, partial(over_simulated_baseline, load=load, rules=rules)
            )
            for name, rules in SIMULATED.items()
        },
    }


def pools_page(
    cluster: Cluster,
    results: Sequence[PoolsResult],
    curves: Mapping[str, Sequence[Sweep]],
) -> str:
    """Return tables of the rules and of the sweeps as Markdown."""
    cells = [
        list(COLUMNS),
        ["---"] * len(COLUMNS),
        *([show(row) for show in COLUMNS.values()] for row in results),
    ]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    planned = {
        "B1 and B2": solve(cluster.pools, BASELINE_PATHS),
        "all six paths": solve(cluster.pools),
    }
    for name, mix in planned.items():
        shares = ", ".join(
            f"{path} {100 * share:.0f}"
            for path, share in mix.shares.items()
            if share > 5e-3
        )
        lines.append(f"| {name}, planned | {mix.tokens_per_s:.1f} | {shares} |")
    times = ", ".join(
        f"{path} {time:.1f}" for path, time in request_times_s(cluster).items()
    )
    lines[-1:] = [lines[-1], f"\nPlanned s a request at full batches: {times}."]
    for index in range(len(next(iter(curves.values()), []))):
        points = [found[index].points for found in curves.values()]
        label = next(iter(curves.values()))[index].label
        lines += [
            f"\n| {label} | {' | '.join(curves)} |",
            "|" + " --- |" * (len(curves) + 1),
            *(
                f"| {row[0][0]:g} | {' | '.join(f'{y:.2f}x' for _, y in row)} |"
                for row in zip(*points, strict=True)
            ),
        ]
    return "\n".join(lines)


def pools_json(
    cluster: Cluster,
    results: Sequence[PoolsResult],
    curves: Mapping[str, Sequence[Sweep]],
) -> dict[str, Any]:
    """Return the figures with the assumptions behind them."""
    return {
        "simulated": True,
        "assumptions": asdict(cluster),
        "rules": [asdict(row) for row in results],
        "sweeps": {
            name: {sweep.label: sweep.points for sweep in found}
            for name, found in curves.items()
        },
    }
