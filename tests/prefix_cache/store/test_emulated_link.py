"""The emulated link to a store: one read after the other, and a latency for each."""

import pytest
import torch
from storages import MemoryStorage

from vericache_sglang.errors import ConfigError
from vericache_sglang.prefix_cache.store import emulated_link
from vericache_sglang.prefix_cache.store.backend import Backend
from vericache_sglang.prefix_cache.store.emulated_link import EmulatedLink

pytestmark = pytest.mark.sglang


class Clock:
    """``time`` as ``emulated_link`` sees it."""

    now = 50.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_reads_take_the_time_of_their_bytes_one_after_the_other(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(emulated_link, "time", clock)
    asked = {"directory": "d", "read_mb_per_s": 2, "latency_ms": 250}
    link, others = EmulatedLink.taken_from(asked)
    assert others == {"directory": "d"}
    backend = Backend(MemoryStorage(), link=link)
    assert backend.write("a", torch.zeros(1_000_000, dtype=torch.uint8))
    assert clock.now == 50.0, "writes are not delayed"
    assert backend.read(["a"], 1_000_000)[0] is not None
    assert clock.now == 50.75
    assert backend.read(["a", "missing"], 1_000_000)[1] is None
    assert clock.now == 51.5
    clock.now = 60.0
    link.carry(0)
    assert clock.now == 60.25


@pytest.mark.parametrize(
    "extra", [{"read_mb_per_s": 0}, {"read_mb_per_s": "9"}, {"latency_ms": -1}]
)
def test_a_link_that_cannot_be_is_refused(extra):
    with pytest.raises(ConfigError, match=next(iter(extra))):
        EmulatedLink.taken_from(extra)


def test_without_its_keys_there_is_no_link():
    assert EmulatedLink.taken_from({"max_size": "1"}) == (None, {"max_size": "1"})
