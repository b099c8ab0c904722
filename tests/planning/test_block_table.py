"""The block table's shape: every row there is, each for one thing."""

import pytest

from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.planning.block_table import block_table_shape


@pytest.mark.parametrize("requests", [1, 48])
@pytest.mark.parametrize("verifies", [1, 5])
def test_rows_follow_the_running_requests(requests, verifies):
    config = VeriCacheConfig(max_verifies=verifies)
    shape = block_table_shape(config, requests, 1000, 1, 0.25)
    own = range(1, 1 + requests)
    rows = [0, *own, *shape.verify_rows, *shape.draft_rows]
    assert rows == list(range(shape.rows))
    assert len(shape.verify_rows) == verifies
    assert len(shape.draft_rows) == requests


@pytest.mark.parametrize(
    ("kept", "page", "width"), [(0.25, 1, 1250 + 18 + 2), (1.0, 16, 2000 + 18 + 32)]
)
def test_a_row_lists_a_prompt_its_draft_kv_and_two_verifications(kept, page, width):
    shape = block_table_shape(VeriCacheConfig(draft_length=8), 4, 1000, page, kept)
    assert shape.width == width
    assert shape.nbytes == shape.rows * width * 4
