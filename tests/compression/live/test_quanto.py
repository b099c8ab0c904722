"""KIVI's primitive against optimum-quanto, on which transformers' own KIVI cache rests.

The cache itself is no oracle: it packs its whole history anew at every flush. Its two
groupings are: axis -1 is a channel's tokens, axis 0 a token's channels.
"""

import pytest
import torch

from vericache_sglang.compression.codecs.kivi import KIVI


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("group", [32, 64])
def test_kivi_decodes_to_what_quanto_decodes_to(quanto, bits, group):
    generator = torch.Generator().manual_seed(bits * group)
    keys, values = torch.randn(2, 1, 3, 128, 64, generator=generator)
    kivi = KIVI(bits=bits, group=group, window=0)
    ours = kivi.decode(kivi.encode(keys[0], values[0])[0])
    kind = {2: quanto.qint2, 4: quanto.qint4}[bits]
    for mine, given, axis in zip(ours, (keys, values), (-1, 0), strict=True):
        scale, shift = quanto.MaxOptimizer()(given, kind, axis, group)
        packed = quanto.quantize_weight(given, kind, axis, scale, shift, group)
        found = packed.dequantize()[0]
        assert (found - given[0]).abs().max() > 0.05, "nothing was quantized"
        assert (mine - found).abs().max() <= 1e-6
