"""How large the arena of host memory is, and when it is refused."""

import pytest
from simulated_cuda import simulated

from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.engine import host_arena
from vericache_sglang.engine.host_arena import open_arena
from vericache_sglang.errors import ConfigError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def container(monkeypatch):
    """A container that leaves 64 MiB, whatever the machine has."""
    monkeypatch.setattr(host_arena, "available_host_bytes", lambda: 64 * MIB)


@pytest.mark.parametrize(("given", "ranks", "mib"), [(0, 1, 16), (0, 4, 4), (8, 4, 8)])
def test_the_default_is_a_part_of_what_the_container_leaves(given, ranks, mib):
    config = VeriCacheConfig(host_gb=given / 1024)
    assert open_arena(config, ranks).size == mib * MIB
    with simulated() as device:
        arena = open_arena(config, ranks)
        assert list(device.registered.values()) == [mib * MIB]
        arena.close()


def test_more_than_the_container_leaves_is_not_page_locked():
    config = VeriCacheConfig(host_gb=65 / 1024)
    assert open_arena(config, 1).size == 65 * MIB, "pages nobody writes cost nothing"
    with simulated() as device:
        with pytest.raises(ConfigError, match=r"--vericache-host-gb: 0\.1 GiB asked"):
            open_arena(config, 1)
        assert device.registered == {}
