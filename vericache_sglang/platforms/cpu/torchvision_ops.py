"""Makes a CUDA-built torchvision importable under a CPU build of torch."""

from __future__ import annotations

import sys
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Schemas of torchvision 0.28. Its Python side registers fake kernels for them on
# import and fails ("operator torchvision::nms does not exist") if they are absent.
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def define_missing_ops() -> tuple[str, ...]:
    """Define the operators that torchvision's import needs if they are missing.

    Must be called before transformers or torchvision is imported; idempotent. Does
    nothing if torchvision is absent or already imported, or if its own C extension
    loads and defines them.

    Returns:
        Names of the operators that this function defined.
    """
    if "torchvision" in sys.modules:
        return ()
    spec = find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return ()
    _, names = _define(Path(spec.submodule_search_locations[0]))
    return names


@cache  # a Library drops its definitions when collected, so the cache keeps it
def _define(package: Path) -> tuple[torch.library.Library | None, tuple[str, ...]]:
    """Define the missing operators, once per process."""
    import torch

    if _extension_loads(package):
        return None, ()
    library = torch.library.Library("torchvision", "FRAGMENT")
    missing = tuple(n for n in _SCHEMAS if not hasattr(torch.ops.torchvision, n))
    for name in missing:
        library.define(_SCHEMAS[name])
    return library, missing


def _extension_loads(package: Path) -> bool:
    """Return whether torchvision's C extension loads."""
    import torch

    for suffix in EXTENSION_SUFFIXES:
        file = package / f"_C{suffix}"
        if file.is_file():
            try:
                torch.ops.load_library(file)
            except OSError:  # built against another torch
                return False
            return True
    return False
