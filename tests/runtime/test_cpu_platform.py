"""The platform is chosen without a GPU only, and early enough for torchvision."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("has_gpu", [True, False])
def test_platform_is_for_machines_without_a_gpu(monkeypatch, has_gpu):
    from vericache_sglang.platforms.cpu.platform import activate

    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    assert (activate() is None) is has_gpu


def test_the_class_it_names_is_complete(monkeypatch):
    import pkgutil

    from sglang.srt.platforms.interface import SRTPlatform

    from vericache_sglang.platforms.cpu.platform import activate

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    platform = pkgutil.resolve_name(activate())()
    assert isinstance(platform, SRTPlatform)
    assert platform.is_out_of_tree()
    assert platform.get_default_attention_backend() == "vericache"
    assert platform.get_paged_allocator_cls().__name__ == "TorchPagedAllocator"
    assert not platform.is_pin_memory_available()


@pytest.mark.parametrize(("asked", "chosen"), [(None, "vericache"), ("x", "amx")])
def test_our_backend_is_the_default_only(asked, chosen):
    from types import SimpleNamespace

    from vericache_sglang.platforms.cpu.device import VeriCacheCpuPlatform

    args = SimpleNamespace(
        attention_backend="amx", _raw_input={"attention_backend": asked}
    )
    VeriCacheCpuPlatform().apply_server_args_defaults(args)
    assert args.attention_backend == chosen


def test_every_rank_gets_cores_unless_the_user_says_which(monkeypatch):
    from types import SimpleNamespace

    from vericache_sglang.platforms.cpu.device import (
        CORES,
        VeriCacheCpuPlatform,
        cores_of,
    )

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 2, 3})
    assert cores_of(2) == "2,5|3"
    assert cores_of(5) == "2|3|5|2|3"
    two = SimpleNamespace(attention_backend="amx", _raw_input={"tp_size": 2})
    monkeypatch.setenv(CORES, "0|1")
    VeriCacheCpuPlatform().apply_server_args_defaults(two)
    assert os.environ[CORES] == "0|1"
    monkeypatch.delenv(CORES)
    one = SimpleNamespace(attention_backend="amx", _raw_input={})
    VeriCacheCpuPlatform().apply_server_args_defaults(one)
    assert CORES not in os.environ
    VeriCacheCpuPlatform().apply_server_args_defaults(two)
    assert os.environ[CORES] == "2,5|3"


def test_torchvision_can_be_imported_after_the_guard():
    pytest.importorskip("torchvision")
    code = (
        "from vericache_sglang.platforms.cpu.torchvision_ops import "
        "define_missing_ops as d;"
        "first = d(); assert d() == first; import torchvision.ops; assert d() == ()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_core_is_left_free_unless_the_user_says_otherwise(monkeypatch):
    import sglang  # noqa: F401  (cpu_device is SGLang's to import)
    import torch

    from vericache_sglang.platforms.cpu.device import VeriCacheCpuPlatform

    before = torch.get_num_threads()
    try:
        monkeypatch.setattr(os, "cpu_count", lambda: 3)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
        VeriCacheCpuPlatform().init_backend()
        assert torch.get_num_threads() == 2
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        VeriCacheCpuPlatform().init_backend()
        assert torch.get_num_threads() == 1, "the cores are for two ranks"
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        VeriCacheCpuPlatform().init_backend()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


FAULTS_OF_A_FORWARD = """
import resource
import sglang.srt.platforms  # first: it makes the platform
import torch
from vericache_sglang.platforms.cpu.device import VeriCacheCpuPlatform
VeriCacheCpuPlatform().init_backend()
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(6 << 20) for _ in range(3)]
    del held
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.extended
@pytest.mark.parametrize(
    "own",
    [
        {},
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
    ],
    ids=["ours", "the user's"],
)
def test_memory_that_a_forward_freed_is_there_for_the_next(own):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS_OF_A_FORWARD],
        env=environment | own,
        check=True,
        capture_output=True,
        text=True,
    )
    faults = int(done.stdout.split()[-1])
    assert faults > 10000 if own else faults < 1000
