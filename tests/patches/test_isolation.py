"""A batch is after a forward what SGLang's own isolation would leave."""

from contextlib import suppress
from dataclasses import fields
from types import SimpleNamespace

import pytest

from vericache_patches.managers_scheduler_isolation import forward_isolation
from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def upstream():
    define_missing_ops()
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    return SimpleNamespace(Batch=ScheduleBatch, isolation=Scheduler._forward_isolation)


class Sampling:
    """Stands for the sampling state, whose copy has another name."""

    def __init__(self, name="scheduler's"):
        self.name = name

    def copy_for_forward(self):
        return Sampling("forward's")


def ours(original):
    def isolation(scheduler, batch, *, overlap):
        return forward_isolation(original, scheduler, batch, overlap=overlap)

    return isolation


def after(upstream, isolation, *, plain, overlap, fails):
    """Return the batch after a forward that writes to everything, and what it saw."""
    kept = []
    scheduler = SimpleNamespace(
        record_batch_in_overlap=lambda batch: kept.append(batch.sampling_info.name)
    )
    batch = upstream.Batch(reqs=["a"])
    batch.sampling_info = Sampling()
    batch.spec_algorithm = SimpleNamespace(is_none=lambda: plain)
    batch.left_alone = 1
    before = {field.name: getattr(batch, field.name) for field in fields(batch)}
    with suppress(ZeroDivisionError), isolation(scheduler, batch, overlap=overlap):
        seen = batch.sampling_info.name
        for field in fields(batch):
            setattr(batch, field.name, f"new {field.name}")
        batch.left_alone = 2  # no field
        if fails:
            raise ZeroDivisionError
    left = {
        name: getattr(batch, name)
        for name, value in before.items()
        if getattr(batch, name) is not value
    }
    return seen, kept, left, batch.left_alone


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_a_batch_is_restored_as_by_sglang(upstream, plain, overlap, fails):
    how = {"plain": plain, "overlap": overlap, "fails": fails}
    theirs = after(upstream, upstream.isolation, **how)
    assert after(upstream, ours(upstream.isolation), **how) == theirs
    seen, kept, left, attribute = theirs
    assert (seen, kept) == ("forward's", ["forward's"] if overlap else [])
    assert (not left) is not plain
    assert attribute == 2
