"""Recommends settings, or no speculation, for a model, a GPU and a workload."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from vericache_sglang.config.schema import STAGING_STEP, VeriCacheConfig
from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.acceptance import (
    PUBLISHED_QWEN_32B,
    AcceptanceCurve,
    EndingAnswers,
    MissByKeep,
)
from vericache_sglang.planning.bound import Roofline, roofline, speedup_bound
from vericache_sglang.planning.intra import (
    Estimate,
    ServerModel,
    full_kv,
    resident_drafts,
    search,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.planning.hardware import Machine
    from vericache_sglang.planning.models import ModelShape

KEEPS = (0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
"""Keep shares evaluated if the user gives none."""

LENGTHS = (*range(1, 17), *range(18, 33, 2), *range(36, 65, 4), *range(72, 129, 8))
"""Draft lengths evaluated, in tokens; the steps grow with the length."""

VERIFIES = (1, 2, 4, 8)
"""Candidates for ``max_verifies``; each verification stages one residual KV."""

GIB = 2**30

DEFAULT_ACCEPTANCE = MissByKeep(PUBLISHED_QWEN_32B)
"""The lower of the two published points, extrapolated to other keep shares: assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedWorkload:
    """Workload of equal requests, from the command line.

    Attributes:
        context_tokens: Prompt length, in tokens, >= 1.
        output_tokens: Answer length, in tokens, >= 1.
        concurrency: Most concurrent requests; None: as many as fit.

    Raises:
        ConfigError: A number is below 1; the message names the flag.
    """

    context_tokens: int
    output_tokens: int
    concurrency: int | None = None

    def __post_init__(self) -> None:
        for flag, value in (
            ("--context", self.context_tokens),
            ("--output", self.output_tokens),
            ("--concurrency", self.concurrency),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} must be >= 1, got {value}")

    @property
    def mean_tokens(self) -> float:
        """Mean KV length of a request over its answer, in tokens."""
        return self.context_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Recommended settings and their predicted throughput.

    Attributes:
        config: The settings; None if autoregressive decoding is at least as fast.
        keep: Keep share of ``best``, as a share of prompt tokens.
        best: Estimate of the fastest settings found, recommended or not.
        plain: Estimate of the full-KV server on the same machine.
        bound: ``speedup_bound`` of ``best``, with the bonus token.
        ceilings: Throughput that each resource allows.
        staging_bytes: Device memory of the staging buffer of ``best``; 0 where every
            residual KV stays on the device.
    """

    config: VeriCacheConfig | None
    keep: float
    best: Estimate
    plain: Estimate
    bound: float
    ceilings: Roofline
    staging_bytes: float

    @property
    def speedup(self) -> float:
        """Throughput of ``best`` over ``plain``."""
        return self.best.tokens_per_s / self.plain.tokens_per_s


def recommend(
    model: ModelShape,
    machine: Machine,
    workload: ExpectedWorkload,
    *,
    acceptance: AcceptanceCurve = DEFAULT_ACCEPTANCE,
    keeps: Sequence[float] = KEEPS,
    lengths: Sequence[int] = LENGTHS,
) -> Recommendation:
    """Search our settings for the highest throughput.

    The modelled server leaves the residual KV of all its requests on the device, with
    the draft KV beside it, or offloads that of all. The second keeps the full KV of
    decoded tokens, and has a staging buffer of one residual KV per verification of an
    iteration and one that is arriving. Ours mixes both, which can only be faster.

    Raises:
        ConfigError: Not one full KV fits beside the weights, and so no draft KV with
            its staging buffer, which is larger.
    """
    server, plain = _servers(model, machine, workload, acceptance)
    found = []
    for keep in keeps:
        for verifies in VERIFIES:
            best, staging = _best(server, workload, model, (keep, verifies), lengths)
            found.append((best.tokens_per_s, -verifies, keep, best, staging))
    _, verifies, keep, best, staging = max(found, key=lambda each: each[:2])
    choice = best.choice
    result = Recommendation(
        config=None,
        keep=keep,
        best=best,
        plain=plain,
        bound=speedup_bound(best.accepted + 1, machine, choice.transfer_fraction),
        ceilings=roofline(
            machine,
            server.kv_bytes,
            choice.keep,
            (choice.draft_length, best.accepted),
            choice.transfer_fraction,
        ),
        staging_bytes=staging * model.kv_bytes_per_token,
    )
    if result.speedup <= 1:
        return result
    config = _settings(result, workload, model, -verifies, staging)
    return replace(result, config=config)


def speedup_curve(
    model: ModelShape,
    machine: Machine,
    workload: ExpectedWorkload,
    keep: float,
    acceptance: AcceptanceCurve = DEFAULT_ACCEPTANCE,
) -> tuple[tuple[int, float, float], ...]:
    """Return (draft length, accepted over drafted, speedup) at one keep share.

    Raises:
        ConfigError: See ``recommend``.
    """
    server, plain = _servers(model, machine, workload, acceptance)
    points = []
    for x in LENGTHS:
        if x > workload.output_tokens:
            break
        tried = [
            _best(server, workload, model, (keep, verifies), [x])[0]
            for verifies in VERIFIES
        ]
        best = max(tried, key=lambda found: found.tokens_per_s)
        speedup = best.tokens_per_s / plain.tokens_per_s
        points.append((x, best.accepted / x, speedup))
    return tuple(points)


def _servers(
    model: ModelShape,
    machine: Machine,
    workload: ExpectedWorkload,
    acceptance: AcceptanceCurve,
) -> tuple[ServerModel, Estimate]:
    """Return the modelled server, and its estimate for decoding on the full KV.

    KV grows with the answer; a request counts with its mean length.
    """
    kv_bytes = workload.mean_tokens * model.kv_bytes_per_token
    server = ServerModel(
        machine=machine,
        weight_bytes=model.weight_bytes,
        kv_bytes=kv_bytes,
        concurrency=workload.concurrency,
        acceptance=EndingAnswers(acceptance, workload.output_tokens),
        flops_per_token=2.0 * model.params,
    )
    plain = full_kv(server)
    if not plain.requests:
        raise ConfigError(
            f"--gpu {machine.name}: not one request of {workload.context_tokens} "
            f"tokens fits beside {model.name}; shorten --context or raise --devices"
        )
    return server, plain


def _best(
    server: ServerModel,
    workload: ExpectedWorkload,
    model: ModelShape,
    candidate: tuple[float, int],
    lengths: Sequence[int],
) -> tuple[Estimate, int]:
    """Return the best estimate for one candidate, and its staging slots.

    The slots are 0 where every residual KV stays on the device.
    """
    keep, verifies = candidate
    residual = _residual_tokens(keep, workload)
    staging = -(-(verifies + 1) * residual // STAGING_STEP) * STAGING_STEP
    limited = replace(
        server,
        staging_bytes=staging * model.kv_bytes_per_token,
        most_verifies=verifies,
    )
    # Only the prompt is compressed; every draft reads the KV of decoded tokens.
    moved = residual / workload.mean_tokens
    usable = [x for x in lengths if x <= max(1, workload.output_tokens)]
    offloaded = search(
        limited,
        [1 - moved],
        usable,
        resident=[0],
        transfer_fraction=lambda _: moved,
    )
    kept = workload.context_tokens - residual
    whole = resident_drafts(
        limited, 1 - moved, usable, copied=kept / workload.mean_tokens
    )
    if whole.tokens_per_s > offloaded.tokens_per_s:
        return whole, 0
    return offloaded, staging


def _residual_tokens(keep: float, workload: ExpectedWorkload) -> int:
    return workload.context_tokens - int(keep * workload.context_tokens)


def _settings(
    result: Recommendation,
    workload: ExpectedWorkload,
    model: ModelShape,
    verifies: int,
    staging_tokens: int,
) -> VeriCacheConfig:
    default, host = VeriCacheConfig(), {}
    if staging_tokens:
        residual = _residual_tokens(result.keep, workload) * model.kv_bytes_per_token
        # Two residual KVs more than requests, so that a new request need not wait until
        # those of a finished one are freed; whole GiB.
        host_bytes = (max(1, result.best.requests) + 2) * residual
        host = {
            "staging_tokens": staging_tokens,
            "host_gb": float(ceil(host_bytes / GIB)),
        }
    return VeriCacheConfig(
        keep=result.keep,
        draft_length=result.best.choice.draft_length,
        max_verifies=verifies,
        min_prompt=min(default.min_prompt, workload.context_tokens),
        **host,
    )
