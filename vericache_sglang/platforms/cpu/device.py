"""The SGLang platform class of a machine without a GPU; SGLang imports it itself."""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

CORES = "SGLANG_CPU_OMP_THREADS_BIND"
"""SGLang's variable with every rank's cores, the ranks split by "|"."""


class VeriCacheCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Torch on a CPU, without sgl_kernel.

    Out of tree, so that SGLang takes its layers' torch implementations and asks
    here for the KV pool and the allocator.
    """

    _enum = PlatformEnum.OOT

    def init_backend(self) -> None:
        """Leave a core to the tokenizer and to the copies of the emulated link.

        OpenMP's threads spin at every barrier; where all cores are taken, a forward of
        many small operations then runs ten times slower. ``OMP_NUM_THREADS`` wins.
        """
        if "OMP_NUM_THREADS" not in os.environ:
            ranks = os.environ.get(CORES, "").count("|") + 1
            torch.set_num_threads(max(1, ((os.cpu_count() or 1) - 1) // ranks))

    def is_pin_memory_available(self, device: object = None) -> bool:
        """Return False: there is no device to pin memory for."""
        return False

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Choose our attention backend where the user has chosen none; share cores.

        By now SGLang has put one of sgl_kernel's there (0.5.21, handle_cpu_backends),
        so what the user gave is looked up in the record's own copy of it.

        SGLang wants a NUMA node for each rank, unless ``CORES`` says otherwise. Only
        sgl_kernel binds threads to what it names.
        """
        given = server_args._raw_input
        if given.get("attention_backend") is None:
            server_args.attention_backend = self.get_default_attention_backend()
        ranks = given.get("tp_size") or 1
        if ranks > 1:
            os.environ.setdefault(CORES, cores_of(ranks))

    def get_default_attention_backend(self) -> str:
        """Return the name ``attention_backends.register`` registers."""
        return "vericache"

    def get_torch_profiler_activity_str(self) -> str:
        """Return the name of ``get_torch_profiler_activity``.

        SGLang asks at ``POST /start_profile``; its default ends the server.
        """
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """Return what torch's profiler records of this device."""
        return torch.profiler.ProfilerActivity.CPU

    def get_mha_kv_pool_cls(self) -> type:
        """Return the KV pool class, with staging if VERICACHE is the algorithm."""
        from vericache_sglang.kv.sglang_pools import staged_pool_class
        from vericache_sglang.runtime.staging_size import staging_slots

        return staged_pool_class(staging_slots())

    def get_paged_allocator_cls(self) -> type:
        """Return the allocator that serves every page size without Triton."""
        from vericache_sglang.platforms.cpu.paged_allocator import TorchPagedAllocator

        return TorchPagedAllocator


def cores_of(ranks: int) -> str:
    """Deal this process's cores out in turn, each rank at least one, as ``CORES``."""
    cores = sorted(os.sched_getaffinity(0))
    dealt = (cores[rank::ranks] or [cores[rank % len(cores)]] for rank in range(ranks))
    return "|".join(",".join(map(str, each)) for each in dealt)
