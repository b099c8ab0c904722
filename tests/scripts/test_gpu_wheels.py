"""Carried wheels: what is left out of them, and how they are installed."""

import re
import struct
import subprocess
import sys
import zipfile
from importlib.metadata import distributions

import pytest

from gpu import slim_wheel, stack
from gpu.check import ROOT

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
    return slim_wheel.FATBIN + struct.pack("<Q", len(body)) + body


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
    assert slim_wheel.trim(made) == 1 + kept
    assert len(made) == len(before)
    assert (made[:8], made[-5:]) == (b"before  ", b"after")
    found = made.find(slim_wheel.FATBIN, 20)
    assert found == before.find(slim_wheel.FATBIN, 20)
    code = entry(90, b"H" * 40)
    size = struct.unpack_from("<Q", made, found + 8)[0]
    assert made[found + 16 : found + 16 + size] == (code if kept else b"")
    assert not any(made[found + 16 + size : -5])
    assert made.count(b"H" * 40) == 1 + kept


def test_flash_attention_is_carried():
    """Without it nobody tries what a Hopper GPU serves with by default."""
    script = (ROOT / "scripts" / "gpu" / "carry.sh").read_text("utf-8")
    dropped = re.findall(r"^  '(\S+)'$", script, re.MULTILINE)
    assert len(dropped) == 2
    library = slim_wheel.FLASH_ATTENTION
    for name in (library, library.replace("ops.abi3.so", "attn.py")):
        assert not any(re.search(pattern, name) for pattern in dropped)


def make_wheel(folder, name="carried"):
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "VALUE = 7\n")
        wheel.writestr(f"{name}/heavy/big.py", "x = 1\n")
        meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        wheel.writestr(f"{info}/METADATA", meta)
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tag)
        wheel.writestr(f"{info}/RECORD", f"{name}/__init__.py,,\n{info}/RECORD,,\n")
    return file


def test_a_slimmed_wheel_installs_without_what_was_dropped(tmp_path):
    source = make_wheel(tmp_path / "full")
    target = tmp_path / "kit" / "k1" / source.name
    target.parent.mkdir(parents=True)
    slim_wheel.slim(source, target, re.compile("/heavy/"))
    make_wheel(tmp_path / "kit" / "k2", "other")
    stack.install(tmp_path / "kit", tmp_path / "site")
    assert (tmp_path / "site" / "carried" / "__init__.py").is_file()
    assert not (tmp_path / "site" / "carried" / "heavy").exists()
    assert (tmp_path / "site" / "other" / "heavy").exists()
    with zipfile.ZipFile(target) as wheel:
        record = wheel.read("carried-1.0.dist-info/RECORD").decode()
    assert "heavy" not in record
    assert "carried/__init__.py,sha256=" in record


def test_a_wheel_that_is_none_is_an_error_with_pips_words(tmp_path):
    (tmp_path / "broken-1.0-py3-none-any.whl").write_bytes(b"no wheel")
    with pytest.raises(stack.StackError, match=r"pip: .*(?i:invalid|zip)"):
        stack.install(tmp_path, tmp_path / "site")


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
