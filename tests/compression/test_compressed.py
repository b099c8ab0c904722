"""Results and models that a compressor does not fit."""

from dataclasses import replace

import pytest
import torch

from vericache_sglang.compression.base import ModelSpec
from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.compression.codecs.rotatekv_tables import write_tables
from vericache_sglang.compression.compressed import CompressedKV
from vericache_sglang.errors import CompressionError

KV = list(torch.randn(2, 2, 2, 32, 8, generator=torch.Generator().manual_seed(0)))


def test_only_an_equal_compressor_reads_what_is_whole():
    raw = create_compressor("keynorm", 0)
    packed = create_compressor("keynorm+kivi:group=8,window=8", 0)
    result = raw.compress(KV, 0.5)
    for call in (packed.decompress, packed.restore):
        with pytest.raises(CompressionError, match=r"by keynorm@1.*, not by .*\+kivi"):
            call(result, 0)
    again = create_compressor("keynorm", 0)
    assert torch.equal(again.restore(result, 1).keys, KV[1][0])
    posing = replace(result, identity=packed.identity)
    for call in (packed.decompress, packed.restore):
        with pytest.raises(CompressionError, match="layer 0 lacks a part of the codec"):
            call(posing, 0)
    posing = replace(packed.compress(KV, 0.5), identity=raw.identity)
    with pytest.raises(CompressionError, match="layer 0 was packed by kivi@1"):
        raw.restore(posing, 0)


def test_a_damaged_result_cannot_be_built():
    result = create_compressor("keynorm", 0).compress(KV, 0.5)
    index = result.dropped_indices[0]
    for wrong, says in [
        ((), "equally many layers, got 0, 2 and 2"),
        ((index[0], index), r"dropped_indices\[0\] must be \[heads, dropped\] int32"),
        ((index, index.long()), r"dropped_indices\[1\] must be .*int64"),
        ((index, index.flip(1)), r"dropped_indices\[1\] must be ascending"),
        ((index + 32, index), r"dropped_indices\[0\] must be .* in \[0, 32\)"),
    ]:
        with pytest.raises(CompressionError, match=says):
            replace(result, dropped_indices=wrong)
    with pytest.raises(CompressionError, match="equally many layers, got 0, 0 and 0"):
        CompressedKV(identity="", tokens=1, dropped_indices=(), payload=(), residual=())


def test_binding_refuses_what_does_not_fit_the_model(make_services, tmp_path):
    spec = ModelSpec(layers=2, query_heads=4, kv_heads=2, head_dim=8, name="served")
    services = make_services(spec)
    tables = write_tables(tmp_path / "o", [torch.arange(16)] * 2, 2).source
    line = f"keynorm+rotatekv:group=8,tables={tables}"
    bound = create_compressor(line, 0).bind(services)
    assert bound.codec.rope == services.rope
    assert bound.identity == create_compressor(line, 0).identity
    for changed, says in [
        (replace(spec, layers=3), "'layers' is 2, served has 3"),
        (replace(spec, kv_heads=1), "'columns' is 16, served has 8"),
    ]:
        with pytest.raises(CompressionError, match=says):
            create_compressor(line, 0).bind(make_services(changed))
    with pytest.raises(CompressionError, match="group 32 does not divide the value"):
        create_compressor("kivi", 0).bind(services)
