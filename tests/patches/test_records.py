"""Every patch fits the installed SGLang, and one that no longer does is caught."""

import pytest

from vericache_patches.apply import (
    hooked_modules,
    register_all,
    require_applied,
    sglang_site,
    wanted,
)
from vericache_patches.record import Patch, UpstreamDriftError, find_args

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang

RECORDS = [
    pytest.param(patch, hook, id=patch.target.removeprefix("sglang.srt."))
    for module in hooked_modules()
    for patch, hook in module.HOOKS
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


def patch_of(target, args):
    return Patch(target=target, kind="around", args=args, reason="r", remove_when="w")


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
    assert find_args(site, target) == args
    patch_of(target, args).check(site)


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


@pytest.mark.parametrize("has_gpu", [True, False])
def test_cpu_patches_stay_away_from_a_gpu(monkeypatch, has_gpu):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    places = {patch.where for patch, _ in wanted()}
    assert ("cpu" in places) is not has_gpu


@pytest.fixture
def registry(monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    return HookRegistry


def test_registering_twice_hooks_once(registry):
    register_all()
    register_all()
    targets = [patch.target for patch, _ in wanted()]
    for target in targets:
        assert len(registry._hooks[target]) == targets.count(target)


def test_a_hook_that_did_not_take_is_reported(registry):
    targets = {patch.target for patch, _ in wanted()}
    lost = min(targets)
    registry._patched |= targets - {lost}
    with pytest.raises(UpstreamDriftError, match=f"not hooked: {lost}"):
        require_applied()
    registry._patched.add(lost)
    require_applied()


def test_one_drifted_record_registers_nothing(registry, monkeypatch, site):
    monkeypatch.setattr("vericache_patches.apply.sglang_site", lambda: site)
    with pytest.raises(UpstreamDriftError):
        register_all()
    assert not any(registry._hooks.values())


def test_rows_are_written_as_the_kernel_would():
    import torch

    from vericache_patches.mem_cache_allocation import assign_req_to_token_pool_func

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

    from vericache_patches.kernels_ops_sampling_murmur_hash import murmur_hash32

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
