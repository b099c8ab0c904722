"""How large the pool of host pages is, and when it is refused."""

import pytest
from simulated_cuda import simulated

from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.errors import ConfigError
from vericache_sglang.kv import host_memory
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.host_memory import open_page_pool

MIB = 1 << 20

GEOMETRY = KVGeometry(
    layers=2, kv_heads=2, head_dim=64, v_head_dim=64, element_bytes=2, page_size=1
)
"""A page is 128 tokens' keys of one layer: 32 KiB."""


@pytest.fixture(autouse=True)
def container(monkeypatch):
    """A container that leaves 64 MiB, whatever the machine has."""
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 64 * MIB)


@pytest.mark.parametrize(("given", "ranks", "mib"), [(0, 1, 16), (0, 4, 4), (8, 4, 8)])
def test_the_default_is_a_part_of_what_the_container_leaves(given, ranks, mib):
    config = VeriCacheConfig(host_gb=given / 1024)
    pool = open_page_pool(config, GEOMETRY, ranks)
    assert (pool.size, pool.page_bytes) == (mib * MIB, 32 << 10)
    with simulated() as device:
        page_pool = open_page_pool(config, GEOMETRY, ranks)
        assert list(device.registered.values()) == [mib * MIB]
        page_pool.close()


def test_more_than_the_container_leaves_is_not_page_locked():
    config = VeriCacheConfig(host_gb=65 / 1024)
    pool = open_page_pool(config, GEOMETRY, 1)
    assert pool.size == 65 * MIB, "pages nothing writes cost nothing"
    with simulated() as device:
        with pytest.raises(ConfigError, match=r"--vericache-host-gb: 0\.1 GiB asked"):
            open_page_pool(config, GEOMETRY, 1)
        assert device.registered == {}
