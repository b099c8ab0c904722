"""Hook on ``sglang/srt/sampling/sampling_params.py``: wishes checked at the door."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def verify(params: Any, *args: Any, **kwargs: Any) -> None:
    """Let VeriCache look at ``custom_params``; a ``ValueError`` becomes HTTP 400.

    ``SamplingParams.vericache_check`` is set where VeriCache is on.
    """
    check = getattr(type(params), "vericache_check", None)
    if check is not None:
        check(params.custom_params)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target="sglang.srt.sampling.sampling_params.SamplingParams.verify",
            kind="before",
            args=("self", "vocab_size"),
            reason="Request fields are checked in the HTTP process, where no spec "
            "algorithm is asked.",
            remove_when="SGLang lets a plugin check a request.",
        ),
        verify,
    ),
)
