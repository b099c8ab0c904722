"""Appendix A.3 by hand."""

import pytest

from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.compose import (
    composed_length,
    composed_speedup,
    composition_multiplier,
)


@pytest.mark.parametrize(
    ("rate", "positions", "multiplier"),
    [(0.5, 5, 3.0), (0.0, 9, 1.0), (1.0, 4, 4.0), (0.7, 1, 1.0)],
)
def test_multiplier(rate, positions, multiplier):
    assert composition_multiplier(rate, positions) == multiplier
    assert composed_length(20.0, multiplier) == 20 * multiplier


def test_composed_speedup_is_the_product_over_the_slowdown():
    assert composed_speedup(3.5, 1.78) == pytest.approx(6.23)
    # What the paper's 4.35 needs beside its 3.50 and 1.78.
    assert composed_speedup(3.5, 1.78, slowdown=1.4322) == pytest.approx(4.35, abs=1e-3)


def test_impossible_drafters_are_refused():
    for rate, positions in ((1.5, 2), (-0.1, 2), (0.5, 0)):
        with pytest.raises(ConfigError):
            composition_multiplier(rate, positions)
    with pytest.raises(ConfigError):
        composed_speedup(3.5, 0)
