"""SGLang's own FlashAttention backend on the rows we present, in a process of its own.

The process runs SGLang's metadata code and its page-table kernel, interpreted; only the
attention itself is played (``fa3_rows.py``).
"""

import pytest

pytest.importorskip("sglang")
pytestmark = [pytest.mark.sglang, pytest.mark.extended]

from own_process import printed  # noqa: E402


@pytest.fixture(scope="module")
def flash():
    return printed("fa3_rows.py")


def test_flash_attention_says_that_it_serves_ragged_graphs(flash):
    assert flash["serves"] is True


@pytest.mark.parametrize(("way", "replays"), [("graph", 8), ("eager", 0)])
def test_flash_attention_reads_the_rows_we_present(flash, way, replays):
    assert flash[way] < 2e-6
    assert flash[f"{way}-replays"] == replays
