"""Which GPUs, drivers and packages are refused, and which command mends that."""

from dataclasses import replace

import pytest

from vericache_sglang.errors import UnsupportedError
from vericache_sglang.serving import launch, refused_machines
from vericache_sglang.serving.refusals import check_machine
from vericache_sglang.serving.refused_machines import (
    MACHINE_RULES,
    LocalMachine,
    this_machine,
)

H200 = LocalMachine(
    gpu="NVIDIA H200",
    capability=(9, 0),
    driver="13.0",
    torch="2.13.0",
    torch_cuda="13.0",
    torch_archs=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
    versions={
        "torch": "2.13.0",
        "sglang-kernel": "0.4.7",
        "flashinfer-python": "0.6.18",
        "triton": "3.9.0",
    },
    required={
        "torch": "==2.13.0",
        "sglang-kernel": "==0.4.7",
        "flashinfer-python": "==0.6.18",
        "triton": "",
    },
    sglang_cuda=13,
)


def with_version(name, installed):
    versions = {key: value for key, value in H200.versions.items() if key != name}
    return {"versions": versions | ({name: installed} if installed else {})}


NO_GPU = {"gpu": "", "capability": (0, 0), "torch_archs": ()}

REFUSED = [
    (
        NO_GPU | {"torch": "2.13.0+cpu", "torch_cuda": "", "driver": ""},
        "torch without CUDA: torch 2.13.0+cpu was built without CUDA; VERICACHE_DEVICE",
    ),
    (NO_GPU | {"driver": ""}, "no driver: there is no NVIDIA driver"),
    (
        NO_GPU | {"driver": "12.4"},
        "old driver: the NVIDIA driver supports CUDA 12.4, torch 2.13.0 needs 13.0",
    ),
    (NO_GPU, "no GPU: torch sees no GPU, although there is a driver; look at nvidia"),
    (
        {"gpu": "Tesla T4", "capability": (7, 5)},
        "compute capability: Tesla T4 is sm_75, the kernels need compute capability",
    ),
    (
        {
            "gpu": "GPU of 2030",
            "capability": (9, 9),
            "torch_archs": ("sm_80", "sm_100"),
        },
        "torch without kernels for the GPU: torch 2.13.0 has no code for GPU of 2030 "
        '(sm_99); pip install --force-reinstall "torch==2.13.0"',
    ),
    (
        {"torch": "2.13.0+cu129", "torch_cuda": "12.9"},
        "torch for another CUDA: torch 2.13.0+cu129 was built for CUDA 12.9, the "
        "kernel packages that SGLang requires for CUDA 13; pip install",
    ),
    (
        with_version("sglang-kernel", None),
        'sglang-kernel: it is not installed, and a GPU server imports it; pip install "'
        'sglang-kernel==0.4.7"',
    ),
    (
        with_version("flashinfer-python", None),
        "flashinfer-python: it is not installed, and a GPU server imports it; pip "
        'install "flashinfer-python==0.6.18"',
    ),
    (
        with_version("triton", None),
        "triton: it is not installed, and a GPU server imports it; pip install "
        '"triton"',
    ),
    (
        with_version("sglang-kernel", "0.4.5"),
        "sglang-kernel: 0.4.5 is installed, SGLang requires ==0.4.7; pip install "
        '"sglang-kernel==0.4.7", or set SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1',
    ),
    (
        with_version("flashinfer-python", "0.7.0"),
        "flashinfer-python: 0.7.0 is installed, SGLang requires ==0.6.18; pip install",
    ),
    (
        with_version("sglang-kernel", "0.4.7+cu129"),
        "sglang-kernel: 0.4.7+cu129 is a build for another CUDA than torch's 13.0; pip "
        'install --force-reinstall "sglang-kernel==0.4.7"',
    ),
    (
        with_version("flashinfer-python", "0.6.18+cu128"),
        "flashinfer-python: 0.6.18+cu128 is a build for another CUDA than torch's 13.0",
    ),
    (
        {"has_fa3": False},
        "FlashAttention 3: sglang-kernel 0.4.7 is a build without its kernels "
        "(sgl_kernel/flash_ops); pip install --force-reinstall "
        '"sglang-kernel==0.4.7", or --attention-backend vericache',
    ),
]

ALLOWED = [
    {},
    {"gpu": "NVIDIA A100", "capability": (8, 0), "has_fa3": False},
    {"gpu": "NVIDIA L40S", "capability": (8, 9)},  # runs the code of sm_86
    {"gpu": "NVIDIA RTX PRO 6000", "capability": (12, 0), "has_fa3": False},
    {"gpu": "GPU of 2030", "capability": (13, 0)},  # compiled from compute_120
    {"torch_archs": ()},
    {"driver": "13.2"},
    with_version("sglang-kernel", "0.4.7+cu130"),
    {"has_fa3": False, "backend": "vericache"},
    with_version("sglang-kernel", "0.4.5") | {"checks_versions": False},
]


@pytest.mark.parametrize(
    ("changes", "words"), REFUSED, ids=[w[:30] for _, w in REFUSED]
)
def test_a_refused_machine_is_named_with_the_command_that_mends_it(changes, words):
    with pytest.raises(UnsupportedError) as caught:
        check_machine(replace(H200, **changes))
    first, *reasons, way_out = str(caught.value).splitlines()
    assert first == "VeriCache refuses this machine:"
    assert [words in reason for reason in reasons] == [True], reasons
    assert "--device cpu" in way_out


def test_every_rule_has_a_case():
    broken = [
        rule
        for changes, _ in REFUSED
        for rule in MACHINE_RULES
        if rule.broken(replace(H200, **changes))
    ]
    assert broken == list(MACHINE_RULES)


@pytest.mark.parametrize("changes", ALLOWED, ids=str)
def test_other_machines_pass(changes):
    check_machine(replace(H200, **changes))


def test_every_reason_is_listed():
    bare = replace(H200, versions={"torch": "2.13.0"}, driver="12.0")
    with pytest.raises(UnsupportedError) as caught:
        check_machine(bare)
    reasons = str(caught.value).splitlines()[1:-1]
    assert [reason.split(":")[0].strip() for reason in reasons] == [
        *("old driver", "sglang-kernel", "flashinfer-python", "triton")
    ]


@pytest.fixture
def probes(monkeypatch):
    """Answer for the driver and the GPU; the packages are those of this machine."""
    import torch

    def answer(name="NVIDIA H200", capability=(9, 0), driver=13000):
        seen = bool(name)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda index: capability
        )
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
        monkeypatch.setattr(
            torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False
        )

    return answer


def test_a_machine_is_read_from_torch_and_the_installed_packages(probes, monkeypatch):
    import torch

    probes(driver=12080)
    monkeypatch.delenv(refused_machines.SKIP_VERSIONS, raising=False)
    found = this_machine("fa3")
    assert (found.gpu, found.capability, found.arch) == ("NVIDIA H200", (9, 0), "sm_90")
    assert (found.driver, found.torch_cuda) == ("12.8", "13.0")
    assert found.torch == found.versions["torch"] == torch.__version__
    assert found.torch_archs == ("sm_90",)
    assert (found.backend, found.checks_versions) == ("fa3", True)
    # SGLang's own requirements: the pinned release needs these.
    assert found.required["sglang-kernel"] == "==0.4.7"
    assert found.required["flashinfer-python"] == "==0.6.18"
    assert found.sglang_cuda == 13
    monkeypatch.setenv(refused_machines.SKIP_VERSIONS, "1")
    assert not this_machine(None).checks_versions


def test_the_launcher_names_what_a_gpu_server_lacks_before_sglang_is_imported(
    probes, monkeypatch, capsys
):
    probes("Tesla V100", (7, 0))

    def too_late():
        raise AssertionError("SGLang's plugins were loaded")

    monkeypatch.setattr(launch, "_load_plugins", too_late)
    monkeypatch.setattr(launch, "publish", lambda config: None)
    assert launch.main(["--model-path", "m"]) == 2
    shown = capsys.readouterr().err
    for words in (
        "Tesla V100 is sm_70",
        "torch 2.13.0+cpu has no code for Tesla V100",
        'pip install "sglang-kernel==0.4.7"',
    ):
        assert words in shown


def test_a_cpu_server_and_plain_sglang_are_started_on_any_machine(probes, monkeypatch):
    probes("Tesla V100", (7, 0))

    class ReachedError(Exception):
        pass

    def reached():
        raise ReachedError

    monkeypatch.setattr(launch, "_load_plugins", reached)
    monkeypatch.setattr(launch, "publish", lambda config: None)
    for flags in (["--device", "cpu"], ["--device=cpu"], ["--disable-vericache"]):
        with pytest.raises(ReachedError):
            launch.main(["--model-path", "m", *flags])
