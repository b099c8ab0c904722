"""Hook on ``sglang/srt/managers/io_struct.py``: ``n``, before copies are made."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def normalize_batch_and_arguments(request: Any) -> None:
    """Validate ``sampling_params``; a ``ValueError`` becomes HTTP 400.

    ``GenerateReqInput.vericache_check`` is set if VeriCache is on.
    """
    check = getattr(type(request), "vericache_check", None)
    if check is not None:
        check(request.sampling_params)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.managers.io_struct.GenerateReqInput."
                "normalize_batch_and_arguments"
            ),
            kind="before",
            args=("self",),
            reason="Upstream expands n to that many requests without a bound, before "
            "any of them is checked.",
            remove_when="SGLang bounds n.",
        ),
        normalize_batch_and_arguments,
    ),
)
