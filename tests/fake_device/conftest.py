"""Lets the tests of this folder import the device, and the engines of ``engine``."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [
    str(FOLDER),
    str(FOLDER.parent / "runtime"),
    str(FOLDER.parent / "prefix_cache" / "store"),
]
