"""A compressor that fails for one request: nothing leaks, and the next one is split."""

import pytest
import torch

pytest.importorskip("sglang")

from tiny_engine import opened
from tiny_selector import Noted

from vericache_sglang.compression.codecs.split_planes import SplitPlanes
from vericache_sglang.errors import CompressionError
from vericache_sglang.scheduling.plan import Compress, Residency

pytestmark = pytest.mark.sglang

PLANES = "split-planes:exponent_bits=4,mantissa_bits=3,block=4"
TO_HOST, TO_DEVICE = Compress("a", Residency.HOST), Compress("a", Residency.DEVICE)


def fail(*given, **named):
    raise KeyError("theirs")


CASES = [
    *((Noted, call, "", True) for call in ("scores", "open", "update", "keep_share")),
    (Noted, "scores", PLANES, True),
    *((SplitPlanes, "_encode_draft", PLANES, selects) for selects in (False, True)),
]
"""What fails, of a server with this codec, with a selector or without one."""


@pytest.mark.parametrize("move", [TO_HOST, TO_DEVICE])
@pytest.mark.parametrize(("owner", "call", "codec", "selects"), CASES)
def test_its_request_is_told_and_the_next_one_is_split(
    owner, call, codec, selects, move, monkeypatch
):
    right, broken = getattr(owner, call), [True]

    def now_and_then(*given, **named):
        return fail() if broken else right(*given, **named)

    monkeypatch.setattr(owner, call, now_and_then)
    with opened(codec=codec, selects=selects) as engine:
        placement = engine.placement
        state = engine.admit("a", "x", 34)
        placement.budget(state)
        with pytest.raises(CompressionError, match="its compressor failed"):
            engine.move(move, "a")
        placement.guard.abandon("a")
        placement.check(engine.requests)
        engine.abort("a")
        broken.clear()
        placement.check(engine.requests)
        assert placement.host.used_bytes == 0
        held = placement.report()
        assert held["compressor_failures"] == 1
        assert held[f"compressor_errors_{call.removeprefix('_')}"] >= 1
        again = engine.admit("a", "y", 34)
        assert engine.move(move, "a")
        assert placement.guard.sound("a")
        if not codec:
            scores = engine.kv.truth("y")[1]
            best = torch.topk(scores[0, 0, 2:31], 12).indices.sort().values + 2
            assert again.split.kept[0, 0, 2:14].tolist() == best.tolist()
        engine.verify("a", 2)
        engine.finish("a")
        placement.check(engine.requests)


def test_a_draft_part_that_cannot_be_decoded_reads_as_zeros(monkeypatch):
    with opened(codec=PLANES, selects=False) as engine:
        state = engine.admit("a", "x", 34)
        assert engine.move(TO_HOST, "a")
        monkeypatch.setattr(SplitPlanes, "_decode", fail)
        (segment,) = engine.placement.codes.segments(state)(0)
        keys, values = segment()
        assert not keys.any()
        assert not values.any()
        assert engine.placement.report()["compressor_errors_decode"] == 1
        monkeypatch.undo()
        engine.verify("a", 2)
        engine.finish("a")
