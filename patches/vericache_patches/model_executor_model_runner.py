"""Hook on ``sglang/srt/model_executor/model_runner.py``: seeds on a CPU."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def maybe_enable_batch_invariant_mode(runner: Any) -> None:
    """Do not replace torch's CPU kernels.

    ``--enable-deterministic-inference`` still gives every request its own noise, but
    the last bits of a logit may depend on the batch, as without the flag.
    """


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.model_executor.model_runner."
                "ModelRunner.maybe_enable_batch_invariant_mode"
            ),
            kind="replace",
            args=("self",),
            reason="The mode replaces CUDA kernels and raises where there is no "
            "accelerator, so seeds could not be used on a CPU.",
            remove_when="SGLang enables deterministic inference on a CPU.",
            where="cpu",
        ),
        maybe_enable_batch_invariant_mode,
    ),
)
