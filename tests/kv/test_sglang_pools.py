"""The staging buffer is there, behind SGLang's slots, and SGLang does not see it."""

import pytest
import torch

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang


def new_pool(staging_tokens, size=24, page_size=4, **more):
    from vericache_sglang.kv.sglang_pools import staged_pool_class

    return staged_pool_class(staging_tokens)(
        size,
        page_size=page_size,
        dtype=torch.float32,
        head_num=2,
        head_dim=8,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
        start_layer=0,
        end_layer=2,
        **more,
    )


@pytest.mark.parametrize(
    ("size", "page_size", "start"), [(24, 4, 28), (24, 1, 25), (26, 4, 32)]
)
def test_region_starts_at_the_page_behind_the_pool(size, page_size, start):
    pool = new_pool(40, size=size, page_size=page_size)
    assert (pool.size, pool.staging_start, pool.staging_tokens) == (size, start, 40)
    for buffer in [*pool.k_buffer, *pool.v_buffer]:
        assert buffer.shape == (start + 40, 2, 8)


def test_tables_of_addresses_describe_the_enlarged_buffers():
    pool = new_pool(40)
    assert pool.k_data_ptrs.tolist() == [b.data_ptr() for b in pool.k_buffer]
    assert pool.data_strides.tolist() == [2 * 8 * 4] * 6
    one = 3 * (28 + 40) * 2 * 8 * 4
    assert pool.get_kv_size_bytes() == (one, one)


def test_stock_slots_and_staging_are_written_apart():
    pool = new_pool(8)
    layer = type("Layer", (), {"layer_id": 1})
    ones = torch.ones(2, 2, 8)
    pool.set_kv_buffer(layer, torch.tensor([27, pool.staging_start]), ones, 2 * ones)
    written = pool.get_key_buffer(1).sum((1, 2)).nonzero().flatten()
    assert written.tolist() == [27, 28]
    assert pool.get_value_buffer(1)[28].eq(2).all()
    assert pool.get_key_buffer(0).eq(0).all()


def test_no_staging_is_the_stock_pool():
    pool = new_pool(0, page_size=1)
    assert pool.staging_tokens == 0
    assert pool.k_buffer[0].shape[0] == pool.staging_start == 25


def test_equal_sizes_share_one_class():
    from vericache_sglang.kv.sglang_pools import staged_pool_class

    assert staged_pool_class(16) is staged_pool_class(16)
    assert staged_pool_class(16) is not staged_pool_class(32)


def test_impossible_regions_are_refused(monkeypatch):
    from vericache_sglang.kv.sglang_pools import staged_pool_class

    with pytest.raises(ValueError, match="staging_tokens must be >= 0, got -1"):
        staged_pool_class(-1)
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    with pytest.raises(ValueError, match="in a KV pool of layout hnd"):
        new_pool(40)
