"""Lets the tests of this folder import what they share, also with the store's."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
OTHERS = ("simulated", "prefix_cache/store", "kv")
FOLDERS = (HERE, *(HERE.parent / each for each in OTHERS))
sys.path[:0] = map(str, FOLDERS)
