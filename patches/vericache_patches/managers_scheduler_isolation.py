"""Hook on ``scheduler.py``: what a forward changes of a batch is put back cheaply."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from vericache_patches.record import Hook, Patch

if TYPE_CHECKING:
    from collections.abc import Iterator


def forward_isolation(original: Hook, scheduler: Any, batch: Any, **how: bool) -> Any:
    """Restore the batch's fields after a forward of a spec algorithm."""
    if batch.spec_algorithm.is_none():
        return original(scheduler, batch, **how)
    return _isolated(scheduler, batch, **how)


@contextmanager
def _isolated(scheduler: Any, batch: Any, *, overlap: bool) -> Iterator[None]:
    names = _names()
    attributes = vars(batch)
    values = itemgetter(*names)(attributes)
    if batch.sampling_info is not None:
        batch.sampling_info = batch.sampling_info.copy_for_forward()
    if overlap:
        scheduler.record_batch_in_overlap(batch)
    try:
        yield
    finally:
        attributes.update(zip(names, values, strict=True))


@cache
def _names() -> tuple[str, ...]:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    return tuple(field.name for field in fields(ScheduleBatch))


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target="sglang.srt.managers.scheduler.Scheduler._forward_isolation",
            kind="around",
            args=("self", "batch", "overlap"),
            reason="With a spec algorithm it copies and writes back about a hundred "
            "fields one by one in every iteration: most of what an iteration without "
            "drafts costs beyond plain SGLang.",
            remove_when="SGLang restores only what a spec worker has changed.",
            body="bc10a9754443",
        ),
        forward_isolation,
    ),
)
