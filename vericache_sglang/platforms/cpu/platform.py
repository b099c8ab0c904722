"""Entry point that provides SGLang's platform on machines without a GPU."""

from __future__ import annotations


def activate() -> str | None:
    """Return the platform class path; entry point of group ``sglang.srt.platforms``.

    Runs in every process when ``sglang`` is imported and before it imports
    transformers, so it also makes torchvision importable. This module must not import
    SGLang: SGLang's import calls it, and with a circular import SGLang would only log
    that the partially imported module has no ``activate``.

    Returns:
        Path of the platform class, or None if a CUDA device is present.
    """
    from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

    if not needed():
        return None
    define_missing_ops()
    return "vericache_sglang.platforms.cpu.device:VeriCacheCpuPlatform"


def needed() -> bool:
    """Return whether the platform serves this machine: no CUDA device is present."""
    import torch

    return not torch.cuda.is_available()
