"""Catalogue of GPUs: memory and rates, with the source of each figure."""

from __future__ import annotations

from dataclasses import dataclass

from vericache_sglang.errors import ConfigError

GB = 1e9
TB = 1e12

PCIE4_X16 = 32 * GB
PCIE5_X16 = 64 * GB


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU: datasheet figures, and measured ones where they are known.

    Attributes:
        name: Name on the command line.
        memory_bytes: Device memory; datasheet gigabytes of 1e9 bytes.
        memory_mib: Total device memory as reported by nvidia-smi, in MiB.
        capability: CUDA compute capability.
        hbm_bytes_per_s: Device memory bandwidth, datasheet.
        link_bytes_per_s: Host to device, one direction, datasheet.
        flops_per_s: Dense BF16 tensor operations, datasheet.
        hbm_measured_bytes_per_s: Measured device memory bandwidth; None: unknown.
        link_measured_bytes_per_s: Measured link bandwidth; None: unknown.
        source: Source of each figure.
    """

    name: str
    memory_bytes: float
    memory_mib: int
    capability: tuple[int, int]
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    flops_per_s: float
    hbm_measured_bytes_per_s: float | None = None
    link_measured_bytes_per_s: float | None = None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates and memory of all GPUs of one server.

    Tensor parallelism shards weights, KV and transfers evenly, so all four figures are
    sums over the ranks; its communication is not modelled.

    Attributes:
        name: The GPU's name, with the count where it is not 1.
        memory_bytes: Memory that weights and KV may use.
        hbm_bytes_per_s: Device memory bandwidth.
        link_bytes_per_s: Host to device bandwidth, one direction.
        flops_per_s: Dense BF16 operations.

    Raises:
        ConfigError: A figure is not above 0.
    """

    name: str
    memory_bytes: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    flops_per_s: float

    def __post_init__(self) -> None:
        rates = ("hbm_bytes_per_s", "link_bytes_per_s", "flops_per_s")
        for field in ("memory_bytes", *rates):
            if not getattr(self, field) > 0:
                raise ConfigError(f"{field} of {self.name} must be > 0")


MEMORY_SHARE = 0.9
"""Share of device memory for weights and KV; vLLM's default, SGLang's is near it."""

_COPY_ENGINE = "link measured: 54 GB/s by copy engine on an H20, same PCIe 5 x16"

_GPUS = (
    Gpu(
        name="rtx-pro-6000",
        memory_bytes=96 * GB,
        memory_mib=97887,
        capability=(12, 0),
        hbm_bytes_per_s=1.79 * TB,
        link_bytes_per_s=PCIE5_X16,
        flops_per_s=500e12,
        hbm_measured_bytes_per_s=1.72 * TB,
        link_measured_bytes_per_s=50 * GB,
        source="NVIDIA datasheet (FLOPs: 4 PFLOPS sparse FP4 / 8); measured: implied "
        "by arXiv:2605.17613 section 4.1, 60 GB in 35 ms and 4 GB in 80 ms",
    ),
    Gpu(
        name="h100-sxm",
        memory_bytes=80 * GB,
        memory_mib=81559,
        capability=(9, 0),
        hbm_bytes_per_s=3.35 * TB,
        link_bytes_per_s=PCIE5_X16,
        flops_per_s=989e12,
        link_measured_bytes_per_s=54 * GB,
        source=f"NVIDIA datasheet; {_COPY_ENGINE}",
    ),
    Gpu(
        name="h100-nvl",
        memory_bytes=94 * GB,
        memory_mib=95830,
        capability=(9, 0),
        hbm_bytes_per_s=3.9 * TB,
        link_bytes_per_s=PCIE5_X16,
        flops_per_s=835e12,
        link_measured_bytes_per_s=54 * GB,
        source=f"NVIDIA datasheet; {_COPY_ENGINE}",
    ),
    Gpu(
        name="h200",
        memory_bytes=141 * GB,
        memory_mib=143771,
        capability=(9, 0),
        hbm_bytes_per_s=4.8 * TB,
        link_bytes_per_s=PCIE5_X16,
        flops_per_s=989e12,
        hbm_measured_bytes_per_s=4.4 * TB,
        link_measured_bytes_per_s=54 * GB,
        source=f"NVIDIA datasheet; {_COPY_ENGINE}; memory measured: FlashAttention 3 "
        "decoding 8 x 32,000 tokens on one (docs/gpu.md)",
    ),
    Gpu(
        name="a100-80gb",
        memory_bytes=80 * GB,
        memory_mib=81920,
        capability=(8, 0),
        hbm_bytes_per_s=2.04 * TB,
        link_bytes_per_s=PCIE4_X16,
        flops_per_s=312e12,
        source="NVIDIA datasheet, SXM",
    ),
    Gpu(
        name="gh200",
        memory_bytes=96 * GB,
        memory_mib=97871,
        capability=(9, 0),
        hbm_bytes_per_s=4.0 * TB,
        link_bytes_per_s=450 * GB,
        flops_per_s=989e12,
        link_measured_bytes_per_s=346 * GB,
        source="NVIDIA datasheet, 96 GB HBM3; link measured: nvbandwidth issue 23",
    ),
    Gpu(
        name="l40s",
        memory_bytes=48 * GB,
        memory_mib=46068,
        capability=(8, 9),
        hbm_bytes_per_s=0.864 * TB,
        link_bytes_per_s=PCIE4_X16,
        flops_per_s=362e12,
        source="NVIDIA datasheet",
    ),
    Gpu(
        name="rtx-4090",
        memory_bytes=24 * GB,
        memory_mib=24564,
        capability=(8, 9),
        hbm_bytes_per_s=1.008 * TB,
        link_bytes_per_s=PCIE4_X16,
        flops_per_s=165e12,
        source="NVIDIA Ada whitepaper (BF16 with FP32 accumulation)",
    ),
)

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _GPUS}


def gpu_named(name: str) -> Gpu:
    """Return the GPU called ``name`` in the catalogue.

    Raises:
        ConfigError: No such GPU; the message lists the known ones.
    """
    if name not in GPUS:
        raise ConfigError(f"--gpu {name!r} is not known; known: {', '.join(GPUS)}")
    return GPUS[name]


def machine_of(
    gpu: Gpu,
    devices: int = 1,
    *,
    datasheet: bool = False,
    memory_share: float = MEMORY_SHARE,
) -> Machine:
    """Return the rates and memory of ``devices`` equal GPUs.

    Args:
        devices: Tensor-parallel ranks, >= 1.
        datasheet: Whether to use datasheet rates where measured ones are known.
        memory_share: Part of the memory that weights and KV may use, in (0, 1].

    Raises:
        ConfigError: ``devices`` is below 1 or ``memory_share`` outside (0, 1].
    """
    if devices < 1:
        raise ConfigError(f"--devices must be >= 1, got {devices}")
    if not 0 < memory_share <= 1:
        raise ConfigError(f"memory_share must be in (0, 1], got {memory_share}")
    hbm, link = gpu.hbm_measured_bytes_per_s, gpu.link_measured_bytes_per_s
    if datasheet or hbm is None:
        hbm = gpu.hbm_bytes_per_s
    if datasheet or link is None:
        link = gpu.link_bytes_per_s
    return Machine(
        name=gpu.name if devices == 1 else f"{devices}x {gpu.name}",
        memory_bytes=gpu.memory_bytes * devices * memory_share,
        hbm_bytes_per_s=hbm * devices,
        link_bytes_per_s=link * devices,
        flops_per_s=gpu.flops_per_s * devices,
    )
