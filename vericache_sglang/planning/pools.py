"""Two pools around a store as flags give them, and both sweeps of figure 13.

arXiv:2605.17613, appendix A.2 by ``planning.inter``; section 8.3 for the sweeps.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.acceptance import Geometric
from vericache_sglang.planning.inter import (
    BASELINE_PATHS,
    Cluster,
    cycle_s,
    solve,
    speculation_s,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vericache_sglang.planning.hardware import Machine
    from vericache_sglang.planning.models import ModelShape

GIGABYTE = 1e9

ACCEPTED_SHARE = 32.5 / 40
"""Middle of the "25-40 accepted tokens per round" (section 1), at x = 40."""

COMPRESSED = 4 / 16
"""KIVI's 4 bits of BF16, of the paper's second pipeline."""


def add_pool_flags(parser: argparse.ArgumentParser, about: str) -> None:
    """Add ``--remote`` and the links' bandwidths.

    Args:
        about: Help of ``--remote``.
    """
    add = parser.add_argument
    add("--remote", type=_pools, metavar="L:R", help=about)
    add("--near-gb", type=float, default=40, metavar="GB/S", help="link of a near one")
    add("--far-gb", type=float, default=1.2, metavar="GB/S", help="link of a far one")


def cluster_of(
    args: argparse.Namespace,
    model: ModelShape,
    machine: Machine,
    *,
    context: int,
    compressed: float,
) -> Cluster:
    """Return the pools that flags give.

    Args:
        args: Those of ``add_pool_flags``, and output, draft_length and accept, the
            probability that a draft is accepted, or None.
        model: Served by both pools.
        machine: One instance of either.
        context: Length of each prefix, in tokens.
        compressed: c, in (0, 1].

    Raises:
        ConfigError: A flag is out of bounds, or the machine has no room for one KV.
    """
    given = (args.near_gb, args.far_gb, args.draft_length, args.output, context)
    if min(given) <= 0:
        raise ConfigError(
            "--near-gb, --far-gb, --draft-length, --output, --context must be > 0"
        )
    rate, x = ACCEPTED_SHARE, args.draft_length
    if args.accept is not None:
        rate = Geometric(args.accept).accepted(x, compressed) / x
    local, remote = args.remote
    return Cluster(
        machine=machine,
        local=local,
        remote=remote,
        local_bytes_per_s=args.near_gb * GIGABYTE,
        remote_bytes_per_s=args.far_gb * GIGABYTE,
        weight_bytes=model.weight_bytes,
        kv_full_bytes=context * model.kv_bytes_per_token,
        compressed=compressed,
        output_tokens=args.output,
        draft_length=x,
        acceptance_rate=rate,
    )


def _pools(given: str) -> tuple[int, int]:
    local, _, remote = given.partition(":")
    if not (local.isdecimal() and remote.isdecimal() and int(local)):
        raise argparse.ArgumentTypeError(f"L:R with L >= 1, got {given!r}")
    return int(local), int(remote)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Speedup over the best mix of B1 and B2 while one value varies.

    Attributes:
        label: Of ``SWEEPS``.
        points: (value, throughput of all six paths over that of B1 and B2).
    """

    label: str
    points: tuple[tuple[float, float], ...]

    @property
    def best(self) -> float:
        """The value of the highest speedup."""
        return max(self.points, key=lambda point: point[1])[0]

    def lines(self) -> list[str]:
        """Return the sweep as text."""
        values, ratios = zip(*self.points, strict=True)
        return [
            f"{self.label:<26}" + "".join(f"{value:>7g}" for value in values),
            f"{'over B1 and B2':<26}" + "".join(f"{ratio:>6.2f}x" for ratio in ratios),
            f"highest at {self.best:g} (the paper: {PAPER_BEST[self.label]})",
        ]


def over_baseline(cluster: Cluster) -> float:
    """Return the throughput of all six paths over that of B1 and B2."""
    pools = cluster.pools
    return solve(pools).tokens_per_s / solve(pools, BASELINE_PATHS).tokens_per_s


def with_arrival(cluster: Cluster, cycles: float) -> Cluster:
    """Return the cluster with the far link at which KV arrives in so many cycles.

    Args:
        cluster: See ``Cluster``.
        cycles: T_init_remote / T_decode, > 0: arrival of a request's full KV over a
            draft-verify cycle of a full batch. The paper does not say that it is the
            full KV; with the compressed one the speedup would be highest near 2 instead
            of the paper's 5.
    """
    batch = cluster.slots
    cycle = (cluster.draft_length + 1) * batch * cluster.token_s(batch)
    far = cluster.kv_full_bytes / (cycles * cycle)
    return replace(cluster, remote_bytes_per_s=far)


def with_instances(cluster: Cluster, ratio: float) -> Cluster:
    """Return the cluster with G_R / G_L remote instances for each local one."""
    return replace(cluster, remote=round(ratio * cluster.local))


SWEEPS: dict[str, tuple[Callable[[Cluster, float], Cluster], tuple[float, ...]]] = {
    "G_R / G_L": (with_instances, (1, 2, 3, 4, 5, 6, 7, 8)),
    "T_init_remote / T_decode": (
        with_arrival,
        (0.25, 0.5, 1, 2, 3, 5, 8, 12, 20),
    ),
}
"""Figure 13, right: label -> change of a cluster, and its values."""

PAPER_BEST = {"G_R / G_L": 4, "T_init_remote / T_decode": 5}
"""Where the paper's speedup is highest; its text gives no other point."""


def sweeps(
    cluster: Cluster, speedup: Callable[[Cluster], float] = over_baseline
) -> list[Sweep]:
    """Return both sweeps of figure 13 around a cluster.

    Args:
        cluster: See ``Cluster``.
        speedup: Of all six paths over B1 and B2; planned unless given.
    """
    return [
        Sweep(
            label=label,
            points=tuple((at, speedup(change(cluster, at))) for at in values),
        )
        for label, (change, values) in SWEEPS.items()
    ]


def request_times_s(cluster: Cluster) -> dict[str, float]:
    """Return the time of one request at full batches on B1, B2 and P1, in seconds.

    That of P1 is Eq. (tp_inter).
    """
    batch, full, tokens = cluster.slots, cluster.kv_full_bytes, cluster.output_tokens
    pace = batch * cluster.token_s(batch)
    near_s = full / cluster.local_bytes_per_s
    far_s = full / cluster.remote_bytes_per_s
    x = cluster.draft_length
    startup_s, rate = cluster.compressed * far_s, cluster.acceptance_rate
    cycle = cycle_s(x, pace, near_s, pace)
    return {
        "B1": near_s + tokens * pace,
        "B2": far_s + tokens * pace,
        "P1": speculation_s(startup_s, tokens, x, rate, cycle),
    }


def pools_summary(model: str, cluster: Cluster, found: Iterable[Sweep]) -> str:
    """Return the best mix of paths and the sweeps as text.

    Args:
        model: Name of the model.
        cluster: The two pools.
        found: See ``sweeps``.
    """
    best, plain = solve(cluster.pools), solve(cluster.pools, BASELINE_PATHS)
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
    times = request_times_s(cluster)
    shown = ", ".join(f"{path} {time:.1f} s" for path, time in times.items())
    lines += ["", f"one request at full batches: {shown} (P1 by Eq. tp_inter)"]
    for sweep in found:
        lines += ["", *sweep.lines()]
    return "\n".join(lines)
