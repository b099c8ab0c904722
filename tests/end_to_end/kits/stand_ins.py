"""Importing SGLang's test kits where the packages of their data sets are absent.

Half of the kits import ``datasets`` and ``tabulate`` on the way to things they do not
use here. Where a package is installed it is used; where it is not, an empty module
stands in, and whoever asks it for a data set is told so.
"""

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from vericache_sglang.platforms.cpu.torchvision_ops import define_missing_ops


def kits_folder():
    """Return the folder of ``sglang.test.kits``; SGLang is not imported."""
    spec = importlib.util.find_spec("sglang")
    return Path(spec.submodule_search_locations[0]) / "test" / "kits"


def import_kit(name):
    """Import ``sglang.test.<name>``, unmodified."""
    define_missing_ops()
    _stand_in("datasets", load_dataset=_no_data_set)
    _stand_in("tabulate", tabulate=_table)
    return importlib.import_module(f"sglang.test.{name}")


def _stand_in(name, **contents):
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        return
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)  # find_spec reads it
    vars(module).update(contents)
    sys.modules[name] = module


def _no_data_set(*args, **kwargs):
    raise ModuleNotFoundError(f"no package datasets, asked for {args}")


def _table(rows, **kwargs):
    return "\n".join(str(row) for row in rows)
