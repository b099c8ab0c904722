"""Planned and simulated columns of the paper's figures (arXiv:2605.17613).

Planned values are the paper's equations (``vericache_sglang.planning``), simulated ones
the server's own scheduler on modelled hardware.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from vericache_sglang.planning.acceptance import (
    PUBLISHED_LLAMA_70B,
    PUBLISHED_QWEN_32B,
    Geometric,
)
from vericache_sglang.planning.inter import BASELINE_PATHS, PATHS, solve
from vericache_sglang.planning.intra import full_kv, resident_drafts, search
from vericache_sglang.planning.paper import remote
from vericache_sglang.planning.paper.assumptions import (
    CONTEXT_TOKENS,
    DRAFT_LENGTH,
    KEEP,
    LLAMA,
    RTX,
    server,
)
from vericache_sglang.planning.paper.examples import EAGLE3
from vericache_sglang.planning.paper.long_context import speedup
from vericache_sglang.planning.pools import SWEEPS, over_baseline
from vericache_sglang.simulation.policies import policies
from vericache_sglang.simulation.pools_report import over_simulated_baseline
from vericache_sglang.simulation.presets import Preset, costs_of
from vericache_sglang.simulation.remote import PoolsLoad
from vericache_sglang.simulation.server import SimulatedServer
from vericache_sglang.simulation.setup import Setup
from vericache_sglang.simulation.workload import RequestMix, closed_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Column = Callable[[Any, "Size"], float | None]
    """Value of a column at one point of the x axis; None where there is none."""

OVERHEAD_S = 2e-3
"""Added to every simulated forward, in seconds; as ``simulate``'s default."""


@dataclass(frozen=True, slots=True)
class Size:
    """How long a simulated run is.

    Attributes:
        requests: Requests until it ends; a quarter of them is not measured.
        output: Tokens of each answer.
    """

    requests: int
    output: int


def printed(values: Mapping[Any, float]) -> Column:
    """Return the column of the values that the paper's text gives."""
    return lambda point, size: values.get(point)


@cache
def simulated(
    preset: Preset,
    policy: str,
    size: Size,
    keep: float = KEEP,
    draft_length: int = DRAFT_LENGTH,
    link_gb_per_s: float | None = None,
) -> float:
    """Return the tokens/s of one simulated policy, a closed loop of equal requests."""
    mix = RequestMix(
        contexts=(CONTEXT_TOKENS,), output=size.output, accept=preset.accept
    )
    setup = Setup(
        costs=costs_of(preset, link_gb_per_s, OVERHEAD_S),
        workload=closed_loop(mix, size.requests, warm=size.requests // 4),
        draft_length=draft_length,
    )
    return SimulatedServer(setup, policies(keep)[policy]).run().tokens_per_s


def gain(preset: Preset, policy: str, size: Size, **more: Any) -> float:
    """Return a simulated policy's throughput over that of full KV."""
    full = simulated(preset, "full-kv", size, **more)
    return simulated(preset, policy, size, **more) / full


def on(model: str, gpu: str = RTX, devices: int = 1) -> Preset:
    """Return a model on a machine with the acceptance of the shared assumptions."""
    accept = PUBLISHED_LLAMA_70B if model == LLAMA else PUBLISHED_QWEN_32B
    return Preset(
        model=model, gpu=gpu, devices=devices, accept=accept, accept_source="assumed"
    )


LLAMA_70B = on(LLAMA, "h100-nvl", 2)
MODELS = {
    "Mistral-24B": on("mistral-small-24b"),
    "Qwen-32B": on("qwen3-32b"),
    "Llama-70B": LLAMA_70B,
}
BUDGETS = {
    name: on(model)
    for name, model in (
        *(("Qwen-8B", "qwen3-8b"), ("Qwen-14B", "qwen3-14b")),
        *(("Mistral-24B", "mistral-small-24b"), ("Qwen-32B", "qwen3-32b")),
    )
}


def planned_rate(survival: float, length: int, size: Size) -> float:
    """Return accepted / drafted tokens of a geometric curve."""
    return Geometric(survival).accepted(length, 0.25) / length


def ideal(length: int, size: Size) -> float:
    """Return the paper's ideal speedup of Llama-70B at 4x compaction."""
    shared = server(LLAMA, "h100-nvl", devices=2, printed_transfer=True)
    return speedup(shared, keep=0.25, draft_length=length)


def planned(
    known: Mapping[str, Preset], ours: bool, name: str, size: Size
) -> float | None:
    """Return tokens/s; of full KV unless ``ours``."""
    found = known.get(name)
    if found is None:
        return None
    model = server(found.model, found.gpu, devices=found.devices)
    return (
        search(model, [KEEP], [DRAFT_LENGTH]) if ours else full_kv(model)
    ).tokens_per_s


def planned_sparse(name: str, size: Size) -> float:
    """Return the speedup of sparse drafts over resident KV."""
    model = server(BUDGETS[name].model, RTX)
    drafts = resident_drafts(model, KEEP, [DRAFT_LENGTH])
    return drafts.tokens_per_s / full_kv(model).tokens_per_s


def quotient(above: Column, below: Column) -> Column:
    """Return the column of ratios of two that have every point."""
    return lambda point, size: above(point, size) / below(point, size)  # type: ignore[operator]


def _link(ratio: float) -> float:
    """Return the GB/s of an H100 NVL's link at an HBM-to-link ratio."""
    machine = server("qwen3-32b", "h100-nvl").machine
    return machine.hbm_bytes_per_s / ratio / 1e9


def planned_link(ratio: float, size: Size) -> float:
    """Return the speedup of Qwen-32B at an HBM-to-link ratio."""
    model = server("qwen3-32b", "h100-nvl")
    machine = replace(model.machine, link_bytes_per_s=_link(ratio) * 1e9)
    return speedup(replace(model, machine=machine))


def simulated_link(ratio: float, size: Size) -> float:
    """Return the simulated speedup at an HBM-to-link ratio."""
    preset = on("qwen3-32b", "h100-nvl")
    return gain(preset, "hybrid", size, link_gb_per_s=_link(ratio))


def swept(label: str, simulates: bool, value: float, size: Size) -> float:
    """Return the speedup at a value of a sweep of ``pools``, over plain paths."""
    change, _ = SWEEPS[label]
    tokens = min(size.output, remote.OUTPUT_TOKENS)
    cluster = change(remote.cluster("mistral-small-24b", RTX, 1, tokens), value)
    if not simulates:
        return over_baseline(cluster)
    return over_simulated_baseline(cluster, PoolsLoad(size.requests))


def sim(
    known: Mapping[str, Preset], policy: str, name: str, size: Size
) -> float | None:
    """Return simulated tokens/s of a policy; None where the point is not known."""
    return simulated(known[name], policy, size) if name in known else None


def remote_rate(ours: bool, name: str, size: Size) -> float:
    """Return tokens/s of the cluster of section 6.1; the best plain mix unless ours."""
    found = MODELS[name]
    cluster = remote.cluster(
        found.model, found.gpu, found.devices, remote.OUTPUT_TOKENS
    )
    return solve(cluster.pools, PATHS if ours else BASELINE_PATHS).tokens_per_s


def composed(system: str, size: Size) -> float:
    """Return the ideal speedup over full KV, Qwen3-32B; the best x of each."""
    plain = server("qwen3-32b", RTX)
    inner = replace(plain, inner=EAGLE3)
    found = {
        "EAGLE3": lambda: full_kv(inner),
        "VeriCache": lambda: search(plain, [KEEP], range(1, 64)),
        "VeriCache + EAGLE3": lambda: search(inner, [KEEP], range(1, 64)),
    }
    return found[system]().tokens_per_s / full_kv(plain).tokens_per_s


def sim_gain(known: Mapping[str, Preset], policy: str, name: str, size: Size) -> float:
    """Return the simulated speedup of a policy on one of ``known``."""
    return gain(known[name], policy, size)
