"""Published packages without their start-up: submodules are imported one by one.

``import kvpress`` wraps every attention function of transformers, for the whole
process, and needs packages for methods that are not compared here. ``import
optimum.quanto`` imports transformers. Nothing that is compared needs either.
"""

import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops

REQUIREMENTS = Path(__file__).parents[3] / "scripts" / "requirements-test.txt"

KVPRESS = {
    "dms_press": ("DMSPress",),
    "expected_attention_press": ("ExpectedAttentionPress",),
    "knorm_press": ("KnormPress",),
    "kvzap_press": ("KVzapConfig", "KVzapModel", "KVzapPress"),
    "kvzip_press": ("KVzipPress",),
    "observed_attention_press": ("ObservedAttentionPress",),
    "snapkv_press": ("SnapKVPress",),
    "streaming_llm_press": ("StreamingLLMPress",),
}
"""Modules of ``kvpress.presses``, and what is wanted of each."""


def why_missing(distribution):
    """Return why a pinned distribution cannot be compared with; "" where it can."""
    lines = REQUIREMENTS.read_text().splitlines()
    (pin,) = (line for line in lines if line.startswith(f"{distribution}=="))
    wanted = pin.partition("==")[2]
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return f"{distribution} is not installed; scripts/setup_env.sh installs it"
    if found != wanted:
        return f"{distribution} {found} is installed, the test is for {wanted}"
    return ""


def load_kvpress():
    """Return the classes of ``KVPRESS`` by name; imports transformers."""
    # Every press names Gemma 3, whose module imports torchvision.
    define_missing_ops()
    _without_init("kvpress")
    return SimpleNamespace(
        **{
            name: getattr(import_module(f"kvpress.presses.{module}"), name)
            for module, names in KVPRESS.items()
            for name in names
        }
    )


def load_quanto():
    """Return ``optimum.quanto.tensor``.

    Its unpacking on a CPU is C++, to be compiled for three minutes at first use. Where
    that is not registered, the function in Python answers that quanto has for devices
    without one.
    """
    _without_init("optimum.quanto")
    compiled = "optimum.quanto.library.extensions.cpp"
    sys.modules.setdefault(compiled, ModuleType(compiled))
    return import_module("optimum.quanto.tensor")


def _without_init(name):
    """Put a package of this name in place, whose ``__init__`` did not run."""
    spec = find_spec(name)
    package = ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules.setdefault(name, package)
