"""Named presets of the paper's machines and models (arXiv:2605.17613, section 6)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.acceptance import PUBLISHED_LLAMA_70B, PUBLISHED_QWEN_32B
from vericache_sglang.planning.hardware import GB, gpu_named, machine_of
from vericache_sglang.planning.models import find_model
from vericache_sglang.simulation.costs import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model on a machine, and its acceptance probability.

    Attributes:
        model: Name in the catalogue of models.
        gpu: Name in the catalogue of GPUs.
        devices: Tensor-parallel ranks.
        accept: p at c = 1/4, from the paper where it states one.
    """

    model: str
    gpu: str
    devices: int
    accept: float
    accept_source: str


PRESETS: dict[str, Preset] = {
    "mistral-24b-rtx-pro-6000": Preset(
        model="mistral-small-24b",
        gpu="rtx-pro-6000",
        devices=1,
        accept=PUBLISHED_LLAMA_70B,
        accept_source="assumed equal to Llama-70B's; not published",
    ),
    "qwen-32b-rtx-pro-6000": Preset(
        model="qwen3-32b",
        gpu="rtx-pro-6000",
        devices=1,
        accept=PUBLISHED_QWEN_32B,
        accept_source="~19 of 30 accepted, arXiv:2605.17613 section 4.2",
    ),
    "llama-70b-2xh100-nvl": Preset(
        model="llama-3.1-70b",
        gpu="h100-nvl",
        devices=2,
        accept=PUBLISHED_LLAMA_70B,
        accept_source="~23 of 30 accepted, arXiv:2605.17613 section 4.2",
    ),
}


def costs_of(preset: Preset, link_gb_per_s: float | None, overhead_s: float) -> Costs:
    """Return the rates of a preset.

    Args:
        preset: Model and machine; measured rates where the catalogue has them.
        link_gb_per_s: Host link of each device, each direction, in GB/s; None takes the
            catalogue's.
        overhead_s: Overhead of every forward, in seconds, >= 0.

    Raises:
        ConfigError: An argument is out of bounds.
    """
    if link_gb_per_s is not None and not link_gb_per_s > 0:
        raise ConfigError(f"--link must be > 0 GB/s, got {link_gb_per_s}")
    if overhead_s < 0:
        raise ConfigError(f"--overhead-ms must be >= 0, got {overhead_s * 1e3}")
    machine = machine_of(gpu_named(preset.gpu), preset.devices)
    model = find_model(preset.model)
    costs = Costs(
        memory_bytes=machine.memory_bytes,
        weight_bytes=model.weight_bytes,
        token_bytes=model.kv_bytes_per_token,
        hbm_bytes_per_s=machine.hbm_bytes_per_s,
        flops_per_s=machine.flops_per_s,
        flops_per_token=2.0 * model.params,
        # Scores and weighted values: two products of two operations per head element.
        flops_per_product=4.0 * model.heads * model.head_dim * model.layers,
        overhead_s=overhead_s,
        link_bytes_per_s=machine.link_bytes_per_s,
    )
    if link_gb_per_s is None:
        return costs
    return replace(costs, link_bytes_per_s=link_gb_per_s * GB * preset.devices)
