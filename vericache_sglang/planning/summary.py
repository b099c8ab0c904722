"""A recommendation as a short text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.config.schema import VeriCacheConfig, flag
from vericache_sglang.planning.recommend import GIB, ExpectedWorkload, Recommendation

if TYPE_CHECKING:
    from vericache_sglang.planning.hardware import Machine
    from vericache_sglang.planning.models import ModelShape

_BINDS = {
    "hbm": "device memory bandwidth: reads of weights and KV",
    "link": "the host link: prefetches for verifications",
    "memory": "device memory: one more request would be nearly free, but has no room",
    "compute": "arithmetic",
}

_HOST = ("staging_tokens", "host_gb")
"""Settings that matter for residual KV in host memory."""

_FLAGS = ("keep", "draft_length", "max_verifies", "min_prompt", *_HOST)


def flags(config: VeriCacheConfig | None) -> str:
    """Return the launcher's flags, for the planned settings or no speculation."""
    if config is None:
        return "--disable-vericache"
    values, default = config.model_dump(), VeriCacheConfig().model_dump()
    return " ".join(
        f"{flag(name)} {values[name]:g}"
        for name in _FLAGS
        if name not in _HOST or values[name] != default[name]
    )


def summary(
    result: Recommendation,
    model: ModelShape,
    machine: Machine,
    workload: ExpectedWorkload,
) -> str:
    """Return verdict, flags, limiting resource, bound and memory use."""
    lines = [
        f"{model.name} on {machine.name}: {workload.context_tokens} tokens of context, "
        f"{workload.output_tokens} of output, {_asked(workload)}",
        "",
        _verdict(result),
        f"  {flags(result.config)}",
        "",
        *_round(result),
        "",
        *_memory(result, model, machine, workload),
    ]
    return "\n".join(lines)


def _asked(workload: ExpectedWorkload) -> str:
    if workload.concurrency is None:
        return "as many requests as fit"
    return f"at most {workload.concurrency} requests at once"


def _verdict(result: Recommendation) -> str:
    best, plain = result.best, result.plain
    speeds = f"{best.tokens_per_s:.0f} against {plain.tokens_per_s:.0f} tokens/s"
    if result.config is None:
        return (
            "Serve plainly: the best VeriCache settings are expected to reach "
            f"{result.speedup:.2f}x of full KV ({speeds})"
        )
    return f"VeriCache, expected {result.speedup:.2f}x of full KV ({speeds})"


def _round(result: Recommendation) -> list[str]:
    best = result.best
    if not best.requests:
        return ["Not one draft KV with its staging buffer fits."]
    choice = best.choice
    times = f"device memory {1e3 * best.hbm_s:.3g} ms"
    if choice.transfer_fraction:
        times += f", link {1e3 * best.link_s:.3g} ms"
    times += f", arithmetic {1e3 * best.compute_s:.3g} ms"
    ceilings = result.ceilings
    lines = [
        f"keep {result.keep:g}: {best.accepted:.1f} of {choice.draft_length} drafts "
        "accepted a cycle, over whole answers",
        f"Binds: {_BINDS[best.binds]}",
    ]
    if not choice.transfer_fraction:
        return [
            *lines,
            f"  an iteration: {times}; nothing is prefetched",
            f"Bound: {ceilings.tokens_per_s:.0f} tokens/s by reads of KV",
        ]
    return [
        *lines,
        f"  an iteration: {times}; a prefetch spans {best.cycles_per_load} iterations",
        f"Bound: {ceilings.tokens_per_s:.0f} tokens/s (prefetches allow "
        f"{ceilings.link_tokens_per_s:.0f}, reads of KV "
        f"{ceilings.hbm_tokens_per_s:.0f})",
        f"  {result.bound:.2f}x of a full-KV server with memory for any batch, which "
        f"would reach {ceilings.full_kv_tokens_per_s:.0f} tokens/s",
    ]


def _memory(
    result: Recommendation,
    model: ModelShape,
    machine: Machine,
    workload: ExpectedWorkload,
) -> list[str]:
    kv = workload.mean_tokens * model.kv_bytes_per_token
    choice = result.best.choice
    full, ours = result.plain.requests, result.best.requests
    lines = [
        f"Memory: {machine.memory_bytes / GIB:.1f} GiB usable, weights "
        f"{model.weight_bytes / GIB:.1f} GiB",
        f"  full KV:   {full} requests of {kv / GIB:.2f} GiB",
    ]
    if not choice.transfer_fraction:
        kept = result.keep * workload.context_tokens * model.kv_bytes_per_token
        return [
            *lines,
            f"  VeriCache: {ours} requests of {(kv + kept) / GIB:.2f} GiB, all of it "
            "on the device",
        ]
    return [
        *lines,
        f"  VeriCache: {ours} requests of {choice.keep * kv / GIB:.2f} GiB, staging "
        f"{result.staging_bytes / GIB:.2f} GiB; "
        f"{choice.transfer_fraction * kv / GIB:.2f} GiB each on the host",
    ]
