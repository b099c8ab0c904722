"""SGLang platform class for machines without a GPU; imported by SGLang."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

CORES = "SGLANG_CPU_OMP_THREADS_BIND"
"""SGLang's environment variable with each rank's cores, ranks separated by "|"."""

EARLY = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
"""SGLang's environment variable: a prefill server sends a cached prefix's KV before it
prefills the rest, behind a CUDA event (0.5.21)."""

KEPT = {-1: 1 << 28, -3: 1 << 25}
"""Bytes by parameter of mallopt(3): M_TRIM_THRESHOLD, and M_MMAP_THRESHOLD at its most.
Freed memory up to so much stays with the process."""


class VeriCacheCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Torch on a CPU, without sgl_kernel.

    It is out of tree, so SGLang uses the torch implementations of its layers and takes
    the KV pool and allocator classes from here.
    """

    _enum = PlatformEnum.OOT

    def init_backend(self) -> None:
        """Reserve a core for the tokenizer and the copies of the emulated link.

        OpenMP threads spin at every barrier; if all cores are busy, a forward of many
        small operations runs ten times slower. ``OMP_NUM_THREADS`` takes precedence.
        """
        if "OMP_NUM_THREADS" not in os.environ:
            ranks = os.environ.get(CORES, "").count("|") + 1
            torch.set_num_threads(max(1, ((os.cpu_count() or 1) - 1) // ranks))
        self._keep_freed_memory()

    def _keep_freed_memory(self) -> None:
        """Spare forwards the page faults of memory that the last one has freed.

        With glibc's own limits a prefill of 3,000 tokens faulted in again up to 90 MB
        that had been returned to the system, a tenth of its time. glibc's environment
        variables take precedence; other allocators ignore the call or lack it.
        """
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt and not any(name.startswith("MALLOC_") for name in os.environ):
            for parameter, nbytes in KEPT.items():
                mallopt(parameter, nbytes)

    def is_pin_memory_available(self, device: object = None) -> bool:
        """Return False: pinned memory has no use without a GPU."""
        return False

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Default to our attention backend and divide the cores among ranks.

        SGLang has already set a backend of sgl_kernel (0.5.21, handle_cpu_backends), so
        the user's choice is read from the record's copy of the raw arguments.

        SGLang requires a NUMA node per rank unless ``CORES`` is set. Only sgl_kernel
        binds threads to these cores. A prefill server does without ``EARLY``.
        """
        os.environ.setdefault(EARLY, "0")
        given = server_args._raw_input
        if given.get("attention_backend") is None:
            server_args.attention_backend = self.get_default_attention_backend()
        ranks = given.get("tp_size") or 1
        if ranks > 1:
            os.environ.setdefault(CORES, cores_of(ranks))

    def get_default_attention_backend(self) -> str:
        """Return the backend name that ``attention.registry.register`` registers."""
        return "vericache"

    def get_torch_profiler_activity_str(self) -> str:
        """Return the name of ``get_torch_profiler_activity``.

        SGLang reads it at ``POST /start_profile``; its default ends the server.
        """
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """Return the profiler activity of this device."""
        return torch.profiler.ProfilerActivity.CPU

    def get_mha_kv_pool_cls(self) -> type:
        """Return the KV pool class, with staging if VERICACHE is the algorithm."""
        from vericache_sglang.kv.sglang_pools import staged_pool_class
        from vericache_sglang.runtime.staging_size import staging_slots

        return staged_pool_class(staging_slots())

    def get_paged_allocator_cls(self) -> type:
        """Return the allocator class that supports every page size without Triton."""
        from vericache_sglang.platforms.cpu.paged_allocator import TorchPagedAllocator

        return TorchPagedAllocator


def cores_of(ranks: int) -> str:
    """Assign cores to ranks round robin, at least one each; return ``CORES`` syntax."""
    cores = sorted(os.sched_getaffinity(0))
    dealt = (cores[rank::ranks] or [cores[rank % len(cores)]] for rank in range(ranks))
    return "|".join(",".join(map(str, each)) for each in dealt)
