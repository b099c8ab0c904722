"""The picture shows the curves it is given."""

import sys

import pytest

from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.plot import Curve, lengths_figure, save, sweeps_figure
from vericache_sglang.planning.pools import PAPER_BEST, SWEEPS, Sweep

CURVES = [
    Curve("keep 0.2", ((1, 0.9, 0.5), (8, 0.8, 2.1), (32, 0.6, 1.9))),
    Curve("keep 0.5", ((2, 0.95, 0.7), (16, 0.9, 1.4))),
]


def test_every_point_is_drawn_under_its_label():
    pytest.importorskip("matplotlib", reason="only --plot needs it")
    figure = lengths_figure(CURVES, "a model on a GPU")
    assert figure.get_suptitle() == "a model on a GPU"
    assert tuple(figure.get_size_inches() * 160) == (1600, 720)
    rates, speeds = figure.axes
    for axes, column in ((rates, 1), (speeds, 2)):
        for curve, line in zip(CURVES, axes.lines, strict=False):
            assert line.get_label() == curve.label
            drawn = list(map(tuple, line.get_xydata()))
            assert drawn == [(point[0], point[column]) for point in curve.points]
        named = [text.get_text() for text in axes.get_legend().get_texts()]
        assert named[:2] == ["keep 0.2", "keep 0.5"]
    (full,) = speeds.lines[2:]
    assert (full.get_label(), set(full.get_ydata())) == ("full KV", {1})


def test_every_sweep_has_its_axes_and_every_name_its_curve():
    pytest.importorskip("matplotlib", reason="only --plot needs it")
    first, second = SWEEPS
    curves = {
        name: [
            Sweep(label=first, points=((1, 1.1 * up), (4, 1.5 * up))),
            Sweep(label=second, points=((0.5, 1.0), (5.0, 1.7), (8.0, 1.2 * up))),
        ]
        for name, up in (("planned", 1.0), ("SIMULATED", 0.9))
    }
    axes = sweeps_figure(curves, "two pools").axes
    for index, each in enumerate(axes):
        lines = {line.get_label(): line for line in each.lines}
        for name, pair in curves.items():
            assert each.get_xlabel() == pair[index].label
            drawn = tuple(map(tuple, lines[name].get_xydata()))
            assert drawn == pair[index].points
        best = PAPER_BEST[each.get_xlabel()]
        assert set(lines["highest in the paper"].get_xdata()) == {best}


@pytest.mark.parametrize(
    ("name", "begins"), [("c.svg", b"<?xml"), ("c.png", b"\x89PNG"), ("c", b"\x89PNG")]
)
def test_a_file_is_what_its_name_says(tmp_path, name, begins):
    pytest.importorskip("matplotlib", reason="only --plot needs it")
    save(lengths_figure(CURVES, "a model"), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_an_unwritable_path_is_named(tmp_path):
    pytest.importorskip("matplotlib", reason="only --plot needs it")
    with pytest.raises(ConfigError, match=r"--plot: .*nowhere"):
        save(lengths_figure(CURVES, "a model"), tmp_path / "nowhere" / "curve.png")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        lengths_figure(CURVES, "a model on a GPU")
