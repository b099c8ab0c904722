"""Bytes, errors and the choice of planes, by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.calibrate.acceptance import Cycles, read
from vericache_sglang.calibrate.planes import Point, choose, grid, measure, speedup
from vericache_sglang.compression.codecs.base import PartShape
from vericache_sglang.compression.codecs.catalog import create_codec
from vericache_sglang.compression.codecs.split_planes import SplitPlanes
from vericache_sglang.errors import CompressionError, ConfigError


def test_the_grid_holds_every_pair_that_fits_a_byte_once():
    lines = grid([4, 2, 4], [3, 0, 4], 64)
    assert lines == [
        "split-planes:exponent_bits=4,mantissa_bits=3",
        "split-planes:exponent_bits=2,mantissa_bits=4",
        "split-planes:exponent_bits=2,mantissa_bits=3",
        "split-planes:exponent_bits=4,mantissa_bits=0",
        "split-planes:exponent_bits=2,mantissa_bits=0",
    ]
    assert create_codec(grid([3], [1], 32)[0]) == SplitPlanes(3, 1, 32)
    assert grid([7], [1], 64) == []


def test_bytes_and_errors_are_those_of_a_count_by_hand(tiny, prompt):
    reading = read(tiny, prompt, 8, torch.bfloat16)
    point = measure(
        tiny, "split-planes:exponent_bits=3,mantissa_bits=1", [reading], [4]
    )
    # A token of a head: 16 codes of 5 bits in 10 bytes, keys and values; a shared
    # exponent of 8 bits a key channel (30 tokens are one block) and one a value row.
    head = 30 * (10 + 10) + 16 + 30
    assert point.keep == pytest.approx(head / (30 * 64))
    codec, escapes = SplitPlanes(3, 1), 0
    errors = {"keys": [0.0, 0.0], "values": [0.0, 0.0]}
    for kv in reading.prompt_kv():
        keys, values = kv.keys.contiguous(), kv.values.contiguous()
        draft, residual = codec.encode(keys, values)
        escapes += residual.part_shape.escapes
        for name, near, exact in zip(
            errors, codec.decode(draft), (keys, values), strict=True
        ):
            for guess, number in zip(
                near.flatten().tolist(), exact.flatten().tolist(), strict=True
            ):
                errors[name][0] += (guess - number) ** 2
                errors[name][1] += number**2
    # The other 6 bits of 16 numbers are 12 bytes; an escape is its exponent.
    rest = 2 * 2 * 30 * (12 + 12) + escapes
    assert point.transfer == pytest.approx(rest / (2 * 2 * 30 * 64))
    for name, found in (("keys", point.key_error), ("values", point.value_error)):
        error, norm = errors[name]
        assert found == pytest.approx(math.sqrt(error / norm))


def test_a_lossy_codec_transfers_the_whole_kv(tiny, prompt):
    reading = read(tiny, prompt, 8, torch.bfloat16)
    point = measure(tiny, "kivi:bits=2,group=16,window=16", [reading] * 2, [4, 7])
    part_shape = PartShape(
        heads=2, tokens=30, key_dim=16, value_dim=16, dtype=torch.bfloat16
    )
    bits = create_codec("kivi:bits=2,group=16,window=16").draft_bits(part_shape)
    assert point.transfer == 1
    assert point.keep == pytest.approx(bits / 16)
    assert set(point.cycles) == {4, 7}
    assert point.cycles[4].cycles % 2 == 0, "both readings count"
    with pytest.raises(CompressionError, match="group 32 does not divide"):
        measure(tiny, "kivi:bits=2", [reading], [4])


def point(line="a", keep=0.25, transfer=0.5, **rounds):
    found = {int(k[1:]): Cycles(10, int(k[1:]) * 10, n) for k, n in rounds.items()}
    return Point(line, keep, transfer, 0.0, 0.0, found)


def test_the_speedup_is_tokens_over_the_slower_of_reads_and_prefetches():
    one = point(x16=150)  # 15 accepted of 16: 16 tokens a round
    # Reads: 16 / 4 + 1 = 5 of the full KV. Reload: 0.5 / 0.2 = 2.5 or 0.5 / 0.016.
    assert speedup(one, 16, 0.2) == pytest.approx(16 / 5)
    assert speedup(one, 16, 0.016) == pytest.approx(16 / 31.25)
    with pytest.raises(ConfigError, match="--link-gbps / --memory-gbps"):
        speedup(one, 16, 0.0)


def test_the_choice_prefers_the_smaller_part_and_the_shorter_draft():
    small, large = point("small", 0.2, x8=80, x16=80), point("large", 0.3, x8=80)
    # The link binds: 9 tokens for the same reload, whatever the rest.
    choice = choose([large, small], 0.01)
    assert (choice.line, choice.draft_length) == ("small", 8)
    assert choice.speedup == pytest.approx(9 * 0.01 / 0.5)
    assert choice.accepted == 8


POINTS = st.lists(
    st.builds(
        lambda keep, transfer, a, b: point("p", keep, transfer, x8=a, x32=b),
        st.floats(0.1, 1),
        st.floats(0.1, 1),
        st.integers(0, 80),
        st.integers(0, 320),
    ),
    min_size=1,
    max_size=6,
)


@given(points=POINTS, ratio=st.floats(0.001, 1), more=st.floats(1, 10))
def test_nothing_beats_the_choice_and_a_faster_link_never_hurts(points, ratio, more):
    best = choose(points, ratio).speedup
    assert best == max(speedup(p, x, ratio) for p in points for x in p.cycles)
    assert choose(points, ratio * more).speedup >= best * (1 - 1e-12)
