"""The picture is a PNG of the promised size."""

import struct
import sys

import pytest

from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.plot import Curve, draw

CURVES = [Curve("keep 0.2", ((1, 0.9, 0.5), (8, 0.8, 2.1), (32, 0.6, 1.9)))]


def test_png_of_1600_by_720(tmp_path):
    pytest.importorskip("matplotlib", reason="only --plot needs it")
    path = tmp_path / "curve.png"
    draw(CURVES, "a model on a GPU", path)
    image = path.read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", image[16:24]) == (1600, 720)
    assert 10_000 < len(image) < 1_000_000


def test_an_unwritable_path_is_named(tmp_path):
    pytest.importorskip("matplotlib", reason="only --plot needs it")
    with pytest.raises(ConfigError, match=r"--plot: .*nowhere"):
        draw(CURVES, "a model on a GPU", tmp_path / "nowhere" / "curve.png")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        draw(CURVES, "a model on a GPU", tmp_path / "curve.png")
