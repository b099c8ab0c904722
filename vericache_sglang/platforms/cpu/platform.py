"""Entry point that gives SGLang a platform where there is no GPU."""

from __future__ import annotations


def activate() -> str | None:
    """Name the platform class; entry point of group ``sglang.srt.platforms``.

    Runs in every process as soon as ``sglang`` is imported and before it imports
    transformers, so it is also where torchvision is made importable. This module
    imports nothing of SGLang: that import is what calls it, and SGLang would only log
    that a half-imported module has no ``activate``.

    Returns:
        Path of the platform class, or None where a CUDA device is present.
    """
    import torch

    from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

    if torch.cuda.is_available():
        return None
    define_missing_ops()
    return "vericache_sglang.platforms.cpu.device:VeriCacheCpuPlatform"
