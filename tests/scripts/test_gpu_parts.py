"""What the parts of the GPU command compute: budgets, models, floors, verdicts."""

import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu import floor_attention, floor_moves, serving, slim_wheel
from gpu.budgets import GIB, Card, drafting_share, plain_share
from gpu.floor_shapes import SHAPES, TOY
from gpu.models import dummy_model
from gpu.part import ROOT, Context
from gpu.parts import boot, floors, gaps, kernels, lossless, throughput, wheels
from gpu.setups import SETUPS
from gpu.setups import TOY as TOY_SETUP
from vericache_sglang.config import flag, options
from vericache_sglang.evaluation.options import LABEL
from vericache_sglang.planning.models import read_model


def context(tmp_path, **changes):
    settings_ = {"device": "cuda", "out": tmp_path / "out", "site": tmp_path / "site"}
    return Context(**settings_ | changes)


# -- budgets and models --------------------------------------------------------


def test_slots_of_a_card_are_what_weights_and_reserve_leave():
    card = Card(name="c", gib=10, reserve_gib=2)
    # 10 - 2 - 3 GiB at 1 MiB a token are 5,120 slots; 7 bytes less are a page less.
    assert card.slots(3 * GIB, 1 << 20, 20 * GIB) == 5120
    assert card.slots(3 * GIB + 7, 1 << 20, 20 * GIB) == 4608
    assert Card(name="c", reserve_gib=2).slots(3 * GIB, 1 << 20, 6 * GIB) == 1024
    with pytest.raises(ValueError, match=r"needs 10.0 GiB, the device has 9.0"):
        card.slots(3 * GIB, 1 << 20, 9 * GIB)
    with pytest.raises(ValueError, match="leave no room"):
        card.slots(8 * GIB, 1 << 20, 20 * GIB)


def test_both_systems_share_the_same_slots():
    assert plain_share(10000, 900, 100).at_once == 10
    # A complement of 751 tokens takes two pages; 2,048 - 1,024 hold one prompt of
    # 1,000 + 24, and nobody beside it; 300 more hold one draft part of 250 + 24.
    one = drafting_share(2048, 1000, 24, 0.25)
    assert (one.pool, one.staging, one.at_once) == (1024, 1024, 1)
    assert drafting_share(2348, 1000, 24, 0.25).at_once == 2
    assert drafting_share(2047, 1000, 24, 0.25).at_once == 0


@settings(max_examples=60, deadline=None)
@given(
    budget=st.integers(0, 10**6),
    prompt=st.integers(1, 40000),
    output=st.integers(1, 2000),
    keep=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
)
def test_what_runs_at_once_fits_and_one_more_would_not(budget, prompt, output, keep):
    share = drafting_share(budget, prompt, output, keep)
    kept = int(prompt * keep) + output
    assert share.pool + share.staging <= max(budget, share.staging)
    assert share.staging >= prompt - int(prompt * keep)

    def needed(count):
        return prompt + output + (count - 1) * kept

    if share.at_once:
        assert needed(share.at_once) <= share.pool
    assert needed(share.at_once + 1) > share.pool


@pytest.mark.parametrize(
    ("name", "kv_bytes", "least", "most"),
    [
        ("llama-3.1-8b", 131072, 15.9e9, 16.2e9),
        ("qwen3-32b", 262144, 65.3e9, 65.7e9),
        ("qwen3-tiny", 1024, 2e6, 8e6),
    ],
)
def test_dummy_models_weigh_what_their_names_say(tmp_path, name, kv_bytes, least, most):
    folder = dummy_model(tmp_path, name)
    shape = read_model(folder)
    assert shape.kv_bytes_per_token == kv_bytes
    assert least < shape.weight_bytes < most
    assert (folder / "tokenizer.json").is_file()
    with pytest.raises(KeyError):
        dummy_model(tmp_path, "no-such-model")


def test_every_setup_has_a_model_and_room_for_its_prompts():
    for setup in SETUPS:
        assert setup.points
        for prompt, count, output in setup.points:
            assert prompt + output < 40960
            assert count > 0


# -- floors --------------------------------------------------------------------


def test_every_case_has_a_name_in_the_table_of_floors():
    cases = [*floor_attention.cases(), *floor_moves.cases()]
    assert sorted(case.name for case in cases) == sorted(floors.NAMES)


def test_bytes_of_ragged_rows_are_those_of_slots_and_queries():
    timing = floor_attention.ragged(TOY, "cpu", verifies=1)
    # Two drafts of 64 entries and a verification of 128: 2 heads of 32 numbers of 2
    # bytes, K and V, and 4 bytes of table; 2 + 4 queries of 4 heads, in and out.
    assert timing.nbytes == 256 * (2 * 2 * 32 * 2 + 4) + 2 * 6 * 4 * 32 * 2
    assert timing.call().shape == (6, 4, 32)


@pytest.mark.parametrize("case", floor_moves.cases(), ids=lambda case: case.name)
def test_kernels_that_move_run_at_toy_size_on_their_references(case):
    timing = case.build(TOY, "cpu")
    timing.call()
    assert timing.nbytes > 0


@pytest.mark.parametrize(
    "case", floor_attention.cases()[3:], ids=lambda case: case.name
)
def test_codes_are_packed_as_often_as_there_are_tokens(case):
    timing = case.build(TOY, "cpu")  # the kernel itself needs a device
    exact = TOY.rows * TOY.tokens * TOY.heads * 2 * TOY.dim * 2
    assert 0 < timing.nbytes < exact


def test_shapes_are_those_of_the_models(tmp_path):
    for shape, name in zip(SHAPES, ("llama-3.1-8b", "qwen3-32b"), strict=True):
        config = json.loads((dummy_model(tmp_path, name) / "config.json").read_text())
        assert shape.heads == config["num_key_value_heads"]
        assert shape.heads * shape.group == config["num_attention_heads"]
        assert shape.dim == config["head_dim"]
        assert shape.vocabulary == config["vocab_size"]


def test_a_kernel_below_the_floor_fails_only_where_memory_binds_it(tmp_path):
    def timed(rate, bound):
        return {
            "kernel_s": 1e-6,
            "bytes": 1,
            "bytes_per_s": rate,
            "memory_bound": bound,
        }

    results = {"copy": {"bytes_per_s": 100.0}, "a": timed(69.0, True)}
    results |= {"b": timed(71.0, True), "c": timed(1.0, False)}
    found = floors.conclude(context(tmp_path), results)
    assert {one.what: one.passed for one in found.checks} == {"a": False, "b": True}
    assert "slowest of 2 bound by memory: a, 69%" in found.headline


# -- verdicts ------------------------------------------------------------------


def test_deterministic_differences_fail_and_others_are_shown(tmp_path):
    def ours(differ):
        return {"requests": 9, "tokens": 99, "differ_together": differ} | {
            "differ_alone": 0
        }

    results = {
        "bf16, deterministic: plain": {"requests": 9, "flips": 0},
        "bf16, deterministic: host": ours(1),
        "bf16: plain": {"requests": 9, "flips": 4},
        "bf16: host": ours(3),
    }
    found = lossless.conclude(context(tmp_path), results)
    assert [(one.what, one.passed) for one in found.checks] == [
        ("bf16, deterministic: host", False)
    ]
    rows = {row[0]: row[1:4] for row in found.tables[0].rows}
    assert rows["bf16: host"] == ("3 of 9", "0 of 9", "4 of 9")


def point(rate, whole, failed=0):
    return {
        "point": [32000, 6, 512],
        "decode_tokens_per_s": rate,
        "tokens_per_s": whole,
        "accepted_per_verify": 19.0,
        "failed_requests": failed,
    }


@pytest.mark.parametrize(
    ("ours", "met"), [(point(26, 15), True), (point(24, 15), False)]
)
def test_throughput_is_judged_by_decoding_and_labelled(tmp_path, ours, met):
    share = {"budget": 9, "pool": 5, "staging": 4, "at_once": 1}
    results = {
        "Qwen3-32B, 80 GB card: plain": share | {"points": [point(10, 8)]},
        "Qwen3-32B, 80 GB card: VeriCache": share | {"points": [ours]},
    }
    found = throughput.conclude(context(tmp_path), results)
    assert [one.passed for one in found.checks] == [met]
    assert found.label.startswith(LABEL)
    assert found.headline.startswith(LABEL)
    assert LABEL in found.tables[0].title
    failing = results | {
        "Qwen3-32B, 80 GB card: plain": share | {"points": [point(1, 1, failed=1)]}
    }
    assert not throughput.conclude(context(tmp_path), failing).checks[0].passed


# -- wheels, tests, flags ------------------------------------------------------


def make_wheel(folder, name="carried", extra=""):
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", f"VALUE = 7\n{extra}")
        wheel.writestr(f"{name}/heavy/big.py", "x = 1\n")
        meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        wheel.writestr(f"{info}/METADATA", meta)
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tag)
        wheel.writestr(f"{info}/RECORD", f"{name}/__init__.py,,\n{info}/RECORD,,\n")
    return file


def test_carried_wheels_and_stubs_are_installed_once_for_each_site(tmp_path):
    folder = tmp_path / "carried" / "k1"
    make_wheel(folder)
    (folder / "Stub").mkdir()
    (folder / "Stub" / "__init__.py").write_text("")
    here = context(tmp_path, wheels=tmp_path / "carried")
    names = [one.name for one in wheels.steps(here)]
    assert [one.name for one in wheels.steps(here)] == names
    assert len(names) == 2
    assert wheels.install(here, folder)["wheels"] == ["carried-1.0-py3-none-any.whl"]
    code = "import carried, Stub; print(carried.VALUE)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(here.site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "7"
    other = context(tmp_path, wheels=here.wheels, site=tmp_path / "other")
    assert not {one.name for one in wheels.steps(other)} & {*names}
    make_wheel(folder, extra="# longer\n")
    assert next(one.name for one in wheels.steps(here)) != names[0]


def test_a_wheel_that_pip_refuses_is_an_error_with_its_words(tmp_path):
    folder = tmp_path / "k1"
    folder.mkdir()
    (folder / "broken-1.0-py3-none-any.whl").write_bytes(b"no wheel")
    with pytest.raises(RuntimeError, match=r"pip: .*(?i:invalid|zip)"):
        wheels.install(context(tmp_path), folder)


def test_a_slimmed_wheel_installs_without_what_was_dropped(tmp_path):
    source = make_wheel(tmp_path / "full")
    target = tmp_path / "slim" / source.name
    target.parent.mkdir()
    slim_wheel.slim(source, target, re.compile("/heavy/"))
    here = context(tmp_path)
    wheels.install(here, target.parent)
    assert (here.site / "carried" / "__init__.py").is_file()
    assert not (here.site / "carried" / "heavy").exists()
    with zipfile.ZipFile(target) as wheel:
        record = wheel.read("carried-1.0.dist-info/RECORD").decode()
    assert "heavy" not in record
    assert "carried/__init__.py,sha256=" in record


def test_the_checkout_is_registered_as_an_install_would(tmp_path):
    wheels.register(tmp_path)
    (found,) = distributions(name="vericache-sglang", path=[str(tmp_path)])
    (installed,) = list(distributions(name="vericache-sglang"))[:1]

    def points(distribution):
        return {(p.group, p.name, p.value) for p in distribution.entry_points}

    assert points(found) == points(installed)
    assert found.version == installed.version


def test_cases_of_a_report_are_counted(tmp_path):
    file = tmp_path / "r.xml"
    file.write_text(
        "<testsuites><testsuite><testcase name='a'/><testcase name='b'>"
        "<failure message='no'/></testcase><testcase name='c'>"
        "<skipped message='why'/></testcase><testcase name='d'>"
        "<error message='bad'/></testcase></testsuite></testsuites>"
    )
    found = kernels.counted(file)
    assert found == {"passed": 1, "failed": ["b: no", "d: bad"], "skipped": ["c: why"]}
    verdict = kernels.conclude(context(tmp_path), {"f": found})
    assert not verdict.checks[0].passed
    assert "1 passed, 2 failed, 1 skipped" in verdict.headline
    with pytest.raises(FileNotFoundError):
        kernels.counted(tmp_path / "none.xml")


def test_every_flag_of_a_server_is_a_setting_of_sglang_or_of_ours(tmp_path):
    package = Path(importlib.util.find_spec("sglang").origin).parent
    fields = (package / "srt" / "arg_groups" / "field_order.py").read_text()
    names = {*re.findall(r'"(\w+)"', fields)}
    for world in lossless.WORLDS.values():
        assert lossless.engine_of(context(tmp_path), world).keys() <= names
    known = {"--disable-vericache", *map(flag, options())}
    known |= {f"--{name.replace('_', '-')}" for name in names}
    given = {*boot.DRAFTING, *gaps._drafting(context(tmp_path)), *serving.EAGER}
    for device in ("cpu", "cuda"):
        here = context(tmp_path, device=device, backend="a", plain_backend="b")
        for graphs in (True, False):
            given |= {*serving.shared_flags(here, graphs=graphs)}
        for setup in (TOY_SETUP, *SETUPS):
            for drafts in (True, False):
                share = plain_share(9999, 9, 9)
                given |= {*throughput.server_flags(here, setup, share, drafts=drafts)}
    flags = {word for word in given if word.startswith("--")}
    assert len(flags) > 15
    assert flags - known == set()


def test_the_rehearsed_file_of_tests_is_there():
    assert (kernels.TESTS / kernels.REHEARSED).is_file()
    assert kernels.DEVICE in (ROOT / "tests/kernels/kernel_device.py").read_text()
