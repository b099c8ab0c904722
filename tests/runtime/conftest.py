"""Lets the tests of this folder import what they share, also with the store's."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = (HERE, HERE.parent / "simulated", HERE.parent / "prefix_cache" / "store")
sys.path[:0] = map(str, FOLDERS)
