"""Carried packages: what is left out of them, and how they are unpacked."""

import struct
import subprocess
import sys
import tarfile
from importlib.metadata import distributions

import pytest

from gpu import slim_kit, stack

KERNEL = (
    "_ZN7cutlass13device_kernelIN5flash20enable_sm90_or_laterINS1_16FlashAttnFwdSm90INS1_"
    "25CollectiveMainloopFwdSm90ILi2EN4cute5tupleIJNS5_1CILi1EEES8_S8_EEENS6_IJNS7_ILi128"
    "EEENS7_ILi176EEESA_EEELi{dim}ENS_{dtype}EfNS_4arch4Sm90ELb1ELb0ELb{softcap}ELb0ELb1E"
)
"""Of sglang-kernel 0.4.5, as its library has them."""

BF16, FP16 = "10bfloat16_t", "6half_t"


def kernel(dim=128, dtype=BF16, softcap=0):
    return KERNEL.format(dim=dim, dtype=dtype, softcap=softcap).encode()


def entry(arch, code):
    code += b"\0" * (-len(code) % 8)
    head = struct.pack("<HHIQ", 2, 257, 64, len(code)) + bytes(12)
    return (head + struct.pack("<I", arch)).ljust(64, b"\0") + code


def module(*entries):
    body = b"".join(entries)
    return slim_kit.FATBIN + struct.pack("<Q", len(body)) + body


def library(*names):
    """Return device code for three architectures of each name, text around it."""
    modules = [
        module(entry(90, b"H" * 40), entry(80, name), entry(86, name)) for name in names
    ]
    return bytearray(b"before  " + b"between ".join(modules) + b"after")


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        (kernel(), True),
        (kernel(dim=64), True),
        (kernel(dim=256), False),
        (kernel(dtype=FP16), False),
        (kernel(softcap=1), False),
        (kernel() + kernel(dim=256), False),
        (b"_ZN5flash32prepare_varlen_num_blocks_kernelILi32E", True),
        (b"_ZN5flash25CollectiveMainloopFwdSm80ILi4E", False),
    ],
    ids=["128", "64", "256", "fp16", "capped", "mixed", "planning", "Ampere"],
)
def test_kernels_of_other_models_are_blanked_where_they_lie(name, kept):
    made = library(b"scheduler", name)
    before = bytes(made)
    assert slim_kit.trim(made) == 1 + kept
    assert len(made) == len(before)
    assert (made[:8], made[-5:]) == (b"before  ", b"after")
    found = made.find(slim_kit.FATBIN, 20)
    assert found == before.find(slim_kit.FATBIN, 20)
    code = entry(90, b"H" * 40)
    size = struct.unpack_from("<Q", made, found + 8)[0]
    assert made[found + 16 : found + 16 + size] == (code if kept else b"")
    assert not any(made[found + 16 + size : -5])
    assert made.count(b"H" * 40) == 1 + kept


FILES = {
    "sglang/launch_server.py": True,
    "sglang/srt/models/llama.py": True,
    "sglang/srt/grpc/_core.cpython-312-x86_64-linux-gnu.so": False,
    "sglang/multimodal_gen/runtime.py": False,
    "sglang/bench_serving.py": False,
    "sgl_kernel/flash_attn.py": True,
    "sgl_kernel/sm90/common_ops.abi3.so": True,
    "sgl_kernel/sm100/common_ops.abi3.so": False,
    "sgl_kernel/flashmla_ops.abi3.so": False,
    "xgrammar/__init__.py": True,
    "xgrammar/lib/libxgrammar.a": False,
    "flashinfer/data/include/norm.cuh": True,
    "flashinfer/data/cutlass/gemm.h": False,
}
"""Files of a folder of packages, and whether they are carried."""


def test_a_kit_unpacks_without_what_was_dropped_and_with_flash_attention(tmp_path):
    """Without it no server runs what a Hopper GPU serves with by default."""
    site, kit = tmp_path / "site", tmp_path / "kit.tar.xz"
    made = tmp_path / "packages"
    for name in FILES:
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text("VALUE = 7\n")
    attention = library(b"scheduler", kernel(dim=256))
    (made / slim_kit.FLASH_ATTENTION).write_bytes(attention)
    slim_kit.slim(made)
    with tarfile.open(kit, "w:xz") as archive:
        archive.add(made, arcname=".")
    stack.install(kit, site)
    assert {name: (site / name).exists() for name in FILES} == FILES
    unpacked = (site / slim_kit.FLASH_ATTENTION).read_bytes()
    assert len(unpacked) == len(attention)
    assert unpacked.count(b"H" * 40) == 1
    assert list((site / "sglang" / "__pycache__").glob("launch_server.*.pyc"))


def test_what_is_no_kit_is_an_error_that_names_it(tmp_path):
    kit = tmp_path / "kit.tar.xz"
    kit.write_bytes(b"no archive")
    with pytest.raises(stack.StackError, match=r"--kit \S+/kit.tar.xz: not"):
        stack.install(kit, tmp_path / "site")


def test_a_site_gets_the_plugins_an_install_would_have(tmp_path, monkeypatch):
    (installed,) = list(distributions(name="vericache-sglang"))[:1]
    stack.complete(tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(stack, "_version", lambda name: "")
    monkeypatch.setattr(stack, "find_spec", lambda name: None)
    stack.complete(tmp_path)
    (found,) = distributions(name="vericache-sglang", path=[str(tmp_path)])

    def points(distribution):
        return {(p.group, p.name, p.value) for p in distribution.entry_points}

    assert points(found) == points(installed)
    code = "from IPython.display import HTML, display; import IPython.display as d; "
    code += "import IPython; d.clear_output(); print(IPython.get_ipython())"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["None"]
