"""Hook on ``sglang/srt/utils/common.py``."""

from __future__ import annotations

from vericache_patches.record import Hook, Patch


def support_triton(backend: str) -> bool:
    """Return False whatever the backend: there is no Triton without a GPU."""
    return False


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target="sglang.srt.utils.common.support_triton",
            kind="replace",
            args=("backend",),
            reason="It lists by name the attention backends that run without Triton.",
            remove_when="SGLang asks the backend object (support_triton()) instead.",
            where="cpu",
        ),
        support_triton,
    ),
)
