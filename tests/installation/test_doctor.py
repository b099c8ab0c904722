"""The doctor, run by interpreters that lack what it looks for."""

import json
import re
from importlib.metadata import PathDistribution

import pytest
from packaging.requirements import Requirement

DOCTOR = ("-m", "vericache_sglang.doctor")


def claim_all(interpreter, extra, **versions):
    """List every package that ``extra`` needs and SGLang, in a version that fits."""
    (info,) = interpreter.site.glob("vericache_sglang-*.dist-info")
    for line in PathDistribution(info).requires:
        needed = Requirement(line)
        wanted = needed.marker is None or needed.marker.evaluate({"extra": extra})
        if (not wanted and needed.name != "sglang") or needed.name == "packaging":
            continue
        least = re.search(r"[=>]=([\w.]+)", str(needed.specifier))
        fits = versions.get(needed.name, least[1] if least else "1.0")
        if fits:
            interpreter.claim(needed.name, fits)


ROWS = [
    (
        {"torch": ""},
        "torch",
        "missing",
        'pip install "torch==2.13.0" --index-url https://download.pytorch.org/whl/cpu',
    ),
    ({"torch": "2.12.1"}, "torch", "wrong", 'pip install "torch==2.13.0" --index-url'),
    ({"sglang": ""}, "sglang", "missing", 'pip install --no-deps "sglang==0.5.21"'),
    ({"sglang": "0.5.23"}, "sglang", "wrong", 'pip install --no-deps "sglang==0.5.21"'),
    ({"uvloop": ""}, "uvloop", "missing", 'pip install "vericache-sglang[cpu]"'),
]


@pytest.mark.parametrize(("versions", "name", "status", "remedy"), ROWS)
def test_what_does_not_fit_is_named_with_its_command(
    interpreter, versions, name, status, remedy
):
    claim_all(interpreter, "cpu", **versions)
    ended = interpreter.run(*DOCTOR, "--device", "cpu", "--json")
    assert ended.returncode == 1, ended.stderr
    report = json.loads(ended.stdout)
    (failed,) = (check for check in report["checks"] if check["status"] != "ok")
    assert (failed["name"], failed["status"]) == (name, status)
    assert failed["found"] == versions[name]
    assert failed["remedy"].startswith(remedy)
    assert not report["ready"]


@pytest.mark.parametrize("torch", ["2.13.0", "2.13.0+cpu"])
def test_an_interpreter_with_everything_is_ready(interpreter, torch):
    claim_all(interpreter, "cpu", torch=torch)
    ended = interpreter.run(*DOCTOR, "--device", "cpu")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "ready to serve"


@pytest.mark.parametrize(
    ("device", "commands"),
    [
        ("cpu", ["torch==2.13.0", "vericache-sglang[cpu]", "sglang==0.5.21"]),
        ("cuda", ["vericache-sglang[cuda]"]),
    ],
)
def test_with_nothing_installed_the_commands_are_few_and_in_order(
    interpreter, device, commands
):
    ended = interpreter.run(*DOCTOR, "--device", device)
    assert ended.returncode == 1, ended.stderr
    page, _, todo = ended.stdout.partition("to do:\n")
    assert f"VeriCache on {device}" in page
    assert re.search(r"missing +torch +- \(==2\.13\.0\)", page)
    for line, command in zip(todo.splitlines(), commands, strict=True):
        assert command in line


def test_a_checkout_that_is_only_on_the_path_is_not_installed(interpreter):
    (info,) = interpreter.site.glob("vericache_sglang-*.dist-info")
    info.rename(info.with_suffix(".gone"))
    ended = interpreter.run(*DOCTOR, "--json")
    assert ended.returncode == 1, ended.stderr
    (check,) = json.loads(ended.stdout)["checks"]
    assert (check["name"], check["status"]) == ("vericache-sglang", "missing")


def test_a_gpu_is_looked_at_once_torch_is_there(interpreter):
    # A torch without CUDA, as an old pip run leaves it behind on a GPU host.
    claim_all(interpreter, "cuda")
    (interpreter.site / "torch.py").write_text(
        "class version: cuda = None\n"
        "class cuda:\n"
        "  is_available = get_arch_list = staticmethod(lambda: [])\n"
        "class _C: pass\n"
        "__version__ = '2.13.0+cpu'\n"
    )
    ended = interpreter.run(*DOCTOR, "--device", "cuda")
    assert ended.returncode == 1, ended.stderr
    assert "torch 2.13.0+cpu was built without CUDA" in ended.stdout
