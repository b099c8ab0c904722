"""What a server takes from its settings for the store."""

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from vericache_sglang.compress import refuse_unshared
from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.errors import ConfigError
from vericache_sglang.prefix_cache.assembly import _better
from vericache_sglang.prefix_cache.ranks import Ranks
from vericache_sglang.prefix_cache.store.opening import identity_of
from vericache_sglang.scheduling.estimates import Estimates

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize(
    ("line", "offline"),
    [("keynorm", False), ("no-such", False), ("kvzip", True), ("kvzip:chunk=64", True)],
)
def test_only_a_cheap_method_takes_what_was_chosen_offline_first(line, offline):
    create_compressor("keynorm", 0)  # fills the catalog
    config = VeriCacheConfig(compressor=line, keep=0.375)
    assert _better(config) == ([] if offline else [identity_of("kvzip", config)])


def test_what_was_chosen_offline_is_taken_with_the_same_codec_only():
    create_compressor("keynorm", 0)
    found = [
        _better(VeriCacheConfig(compressor=line))
        for line in ("keynorm+kivi:bits=4", "kvzip+kivi", "kivi", "split-planes")
    ]
    wanted = identity_of("kvzip+kivi:bits=4", VeriCacheConfig())
    assert found == [[wanted], [], [], []]


@pytest.mark.parametrize(
    ("line", "ranks", "named"),
    [
        ("snapkv", 1, "--compressor snapkv: which tokens it keeps depends"),
        ("snapkv+kivi", 1, "Choose kvzip, kvzap without"),
        ("kvzip+kivi", 2, "--engine asks for a tp_size of 2. Leave the codec out"),
        ("kvzap:threshold=-4", 1, "or on its length"),
        ("no-such", 1, "no-such"),
    ],
)
def test_what_cannot_be_compressed_beforehand_is_refused_by_name(line, ranks, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        refuse_unshared(line, ranks)


@pytest.mark.parametrize(
    ("line", "ranks"), [("kvzip", 2), ("kvzap", 1), ("split-planes", 1)]
)
def test_what_can_be_compressed_beforehand_is_not_refused(line, ranks):
    refuse_unshared(line, ranks)


def test_the_store_is_priced_as_it_was_measured():
    estimates = Estimates()
    assert Ranks(estimates).prices(None).store_s_per_byte == float("inf")
    stored = SimpleNamespace(s_per_byte=0.25)
    assert Ranks(estimates).prices(stored).store_s_per_byte == 0.25
