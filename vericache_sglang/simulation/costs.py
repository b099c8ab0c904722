"""Roofline cost model of forwards, compressions and copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vericache_sglang.errors import ConfigError

if TYPE_CHECKING:
    from vericache_sglang.scheduling.iteration_model import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Rates of one machine with one model on it.

    Reads and arithmetic overlap perfectly, and copies over the link use none of the
    device memory's bandwidth: both favour every policy equally.

    Attributes:
        memory_bytes: Device memory for weights, KV pool and staging buffer.
        weight_bytes: Weights, read once per forward.
        token_bytes: KV of one token over all layers.
        hbm_bytes_per_s: Device memory bandwidth.
        flops_per_s: Dense arithmetic throughput.
        flops_per_token: Operations per token without attention: two per parameter.
        flops_per_product: Operations of attention per query token and KV slot.
        overhead_s: Added to every forward: launches, scheduler, sampling; in seconds.
        link_bytes_per_s: Host link bandwidth of each direction.
        link_latency_s: Added to every copy, in seconds.

    Raises:
        ConfigError: A rate or size is not above 0, or the weights do not fit.
    """

    memory_bytes: float
    weight_bytes: float
    token_bytes: int
    hbm_bytes_per_s: float
    flops_per_s: float
    flops_per_token: float
    flops_per_product: float
    overhead_s: float = 2e-3
    link_bytes_per_s: float
    link_latency_s: float = 20e-6

    def __post_init__(self) -> None:
        above = ("token_bytes", "hbm_bytes_per_s", "flops_per_s", "link_bytes_per_s")
        for field in above:
            if not getattr(self, field) > 0:
                raise ConfigError(f"{field} must be > 0, got {getattr(self, field)}")
        if self.slots < 1:
            raise ConfigError(
                f"weights of {self.weight_bytes / 1e9:.1f} GB leave no room for KV "
                f"in {self.memory_bytes / 1e9:.1f} GB"
            )

    @property
    def slots(self) -> int:
        """KV slots that fit beside the weights: pool and staging buffer together."""
        return int((self.memory_bytes - self.weight_bytes) // self.token_bytes)

    def read_bytes(self, work: Work) -> float:
        """Return the bytes of device memory that a forward reads."""
        return self.weight_bytes + float(work.reads) * self.token_bytes

    def flops(self, work: Work) -> float:
        """Return the arithmetic operations of a forward."""
        dense = work.tokens * self.flops_per_token
        return dense + work.products * self.flops_per_product

    def forward_s(self, work: Work) -> float:
        """Return the time of a forward in seconds, by its reads or its arithmetic."""
        hbm_s = self.read_bytes(work) / self.hbm_bytes_per_s
        return max(hbm_s, self.flops(work) / self.flops_per_s) + self.overhead_s

    def split_s(self, tokens: int) -> float:
        """Return the time to compress a prompt, in seconds: one read and one write."""
        return 2.0 * tokens * self.token_bytes / self.hbm_bytes_per_s
