"""Every patch fits the installed SGLang, and one that no longer does is caught."""

import pytest

from vericache_patches.apply import (
    hooked_modules,
    hooks,
    register,
    require_applied,
    sglang_site,
)
from vericache_patches.record import Patch, UpstreamDriftError
from vericache_sglang import plugin
from vericache_sglang.platforms.cpu.hooks import HOOKS as CPU_HOOKS

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang

ALL = (*hooks(), *CPU_HOOKS)
RECORDS = [
    pytest.param(patch, hook, id=patch.target.removeprefix("sglang.srt."))
    for patch, hook in ALL
]

SOURCE = '''
class Scheduler:
    def plan(self, batch, *, late=False):
        """Real code has more in it."""

    class Inner:
        async def step(self, first, /, second, *rest, **more): ...

def free(slots): ...
def free(slots, pages): ...
'''


def patch_of(target, args, body=""):
    return Patch(
        target=target,
        kind="around",
        args=args,
        reason="r",
        remove_when="w",
        body=body,
    )


@pytest.fixture
def site(tmp_path):
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "srt" / "core.py").write_text(SOURCE)
    (tmp_path / "sglang" / "srt" / "__init__.py").write_text("def top(a, b=1): ...")
    return tmp_path


@pytest.mark.parametrize(("patch", "hook"), RECORDS)
def test_record_fits_the_installed_sglang(patch, hook):
    patch.check(sglang_site())
    assert callable(hook)


@pytest.mark.parametrize(("patch", "hook"), RECORDS)
def test_record_says_why_and_until_when(patch, hook):
    assert patch.reason.endswith(".")
    assert patch.remove_when.endswith(".")


def test_a_replaced_function_is_known_inside():
    assert [p.target for p, _ in ALL if p.kind == "replace" and not p.body] == []


def test_each_function_is_hooked_once():
    targets = [patch.target for patch, _ in ALL]
    assert len(targets) == len({*targets})


def test_patch_files_stay_thin():
    for module in hooked_modules():
        with open(module.__file__, encoding="utf-8") as file:
            assert len(file.readlines()) <= 60, module.__name__


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("sglang.srt.core.Scheduler.plan", ("self", "batch", "late")),
        (
            "sglang.srt.core.Scheduler.Inner.step",
            ("self", "first", "second", "*rest", "**more"),
        ),
        ("sglang.srt.core.free", ("slots", "pages")),
        ("sglang.srt.top", ("a", "b")),
    ],
)
def test_arguments_are_read_from_source(site, target, args):
    patch_of(target, args).check(site)
    with pytest.raises(UpstreamDriftError, match="expected"):
        patch_of(target, (*args, "more")).check(site)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("sglang.srt.core.Scheduler.plan", "expected .*, found"),
        ("sglang.srt.core.Scheduler.gone", "no 'gone' there"),
        ("sglang.srt.core.Gone.plan", "no 'Gone' there"),
        ("sglang.srt.core.Scheduler", "no 'Scheduler' there"),
        ("vllm.core.Scheduler.plan", "no such module"),
    ],
    ids=["other-arguments", "no-method", "no-class", "a-class", "no-module"],
)
def test_drift_is_caught(site, target, message):
    with pytest.raises(UpstreamDriftError, match=message):
        patch_of(target, ("self", "batch")).check(site)


TARGET = "sglang.srt.core.free"


def body_of(site, lines):
    """Write ``free`` with these lines; return the hash that a failed check tells."""
    code = "\n".join(f"    {line}" for line in lines)
    (site / "sglang" / "srt" / "core.py").write_text(f"def free(slots):\n{code}\n")
    with pytest.raises(UpstreamDriftError, match="expected the body other, found") as e:
        patch_of(TARGET, ("slots",), "other").check(site)
    return str(e.value).rpartition(" ")[2]


@pytest.mark.parametrize(
    ("lines", "same"),
    [
        (["return slots"], True),
        (['"""Say something."""', "", "# and more", "return slots"], True),
        (["return slots + 1"], False),
        (["x = slots", "return slots"], False),
        (['"""Say something."""'], False),
    ],
)
def test_another_body_is_caught_and_other_comments_are_not(site, lines, same):
    known = body_of(site, ["return slots"])
    found = body_of(site, lines)
    assert (found == known) is same
    patch_of(TARGET, ("slots",), found).check(site)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_hooks_of_the_cpu_stay_away_from_a_gpu(monkeypatch, has_gpu):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    assert (CPU_HOOKS[0] in plugin._hooks()) is not has_gpu
    assert {*hooks()} <= {*plugin._hooks()}


@pytest.fixture
def registry(monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    return HookRegistry


def test_registering_twice_hooks_once(registry):
    register(ALL)
    register(ALL)
    for patch, _ in ALL:
        assert len(registry._hooks[patch.target]) == 1


def test_a_hook_that_did_not_take_is_reported(registry):
    targets = {patch.target for patch, _ in ALL}
    lost = min(targets)
    registry._patched |= targets - {lost}
    with pytest.raises(UpstreamDriftError, match=f"not hooked: {lost}"):
        require_applied(ALL)
    registry._patched.add(lost)
    require_applied(ALL)


def test_one_drifted_record_registers_nothing(registry, monkeypatch, site):
    monkeypatch.setattr("vericache_patches.apply.sglang_site", lambda: site)
    with pytest.raises(UpstreamDriftError):
        register(ALL)
    assert not any(registry._hooks.values())


def test_rows_are_written_as_the_kernel_would():
    import torch

    from vericache_sglang.platforms.cpu.allocation import assign_req_to_token_pool_func

    table = torch.full((5, 12), -1, dtype=torch.int32)
    rows, start, end = [3, 0, 4], [2, 0, 5], [6, 0, 7]
    slots = torch.arange(100, 106)
    ends = torch.tensor(end, dtype=torch.int32)
    assign_req_to_token_pool_func(
        torch.tensor(rows),
        table,
        torch.tensor(start, dtype=torch.int32),
        ends,
        slots,
        3,
    )
    expected, given = [[-1] * 12 for _ in range(5)], iter(slots.tolist())
    for row, first, last in zip(rows, start, end, strict=True):
        for entry in range(first, last):
            expected[row][entry] = next(given)
    assert table.tolist() == expected


def test_seeded_noise_is_hashed_as_the_kernel_would():
    import torch

    from vericache_sglang.platforms.cpu.murmur_hash import murmur_hash32

    def by_hand(words):
        h = 0
        for word in words:
            word = word * 0xCC9E2D51 % 2**32
            word = (word << 15 | word >> 17) % 2**32 * 0x1B873593 % 2**32
            h ^= word
            h = ((h << 13 | h >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
        h ^= 16
        h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
        return h ^ h >> 16

    seeds, positions = [0, 7, 2**63 + 5, 2**40 - 1], [0, 12, 4095, 2**31]
    hashed = murmur_hash32(
        torch.tensor(seeds, dtype=torch.uint64),
        torch.tensor(positions),
        torch.arange(9),
    )
    assert hashed.dtype == torch.uint32
    assert hashed.tolist() == [
        [by_hand([s % 2**32, s >> 32, p, column]) for column in range(9)]
        for s, p in zip(seeds, positions, strict=True)
    ]
