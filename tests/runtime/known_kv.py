"""KV that is known: random bits for every token of a text, and where they are to be.

NaN payloads are among the bits, so that one entry in the wrong place shows.
"""

import torch

from vericache_sglang.device.upload import send
from vericache_sglang.kv.split_layers import as_bits

LAYERS, HEADS, DIM = 2, 2, 16
"""Heads of 16 numbers: the least that kernels take."""
LONGEST = 48
"""Tokens of the longest prompt; the width of SGLang's row table is twice that."""


class KnownKV:
    """What every token's KV is, and what a pool holds.

    Args:
        pool: SGLang's KV pool.
        dtype: Of the KV.
    """

    def __init__(self, pool, dtype):
        self._buffers = list(zip(pool.k_buffer, pool.v_buffer, strict=True))
        self._dtype, self._device = dtype, pool.k_buffer[0].device
        self._texts, self._decoded = {}, {}
        self._random = torch.Generator().manual_seed(0)

    def drawn(self, tokens):
        """Return the KV of ``tokens`` tokens, [L, 2, tokens, H, D] as integers."""
        shape = (LAYERS, 2, tokens, HEADS, DIM, self._dtype.itemsize)
        raw = torch.randint(0, 256, shape, generator=self._random, dtype=torch.uint8)
        return as_bits(raw.view(self._dtype)).squeeze(-1)

    def truth(self, text):
        """Return a text's KV [L, 2, T, H, D] as integers, and scores [L, H, T]."""
        if text not in self._texts:
            scores = torch.randn(LAYERS, HEADS, LONGEST, generator=self._random)
            self._texts[text] = self.drawn(LONGEST), scores
        return self._texts[text]

    def at(self, slots):
        """Return the pool's bits [L, 2, n, H, D] in these slots, on the host."""
        slots = slots.to(self._device, torch.int64)
        return torch.stack(
            [torch.stack([as_bits(b)[slots] for b in pair]) for pair in self._buffers]
        ).cpu()

    def put(self, slots, bits):
        for layer, pair in enumerate(self._buffers):
            for buffer, entries in zip(pair, bits[layer], strict=True):
                as_bits(buffer)[slots] = send(entries, buffer.device)

    def holds(self, slots, text, positions):
        """Check that slot i holds, in head h, token ``positions[l][h, i]``."""
        kv, found = self.truth(text)[0], self.at(slots)
        for layer, where in enumerate(positions):
            where = where.cpu()
            for head in range(HEADS):
                wanted = kv[layer, :, where[head].long(), head]
                assert torch.equal(found[layer, :, :, head], wanted)

    def decoded(self, codec, text, layer, where):
        """Return what a codec makes of the tokens ``where`` [H, t], as integers."""
        where = where.cpu()
        key = text, layer, where.numpy().tobytes()
        if key not in self._decoded:
            kv = self.truth(text)[0][layer]
            heads = range(HEADS)
            packed = [
                torch.stack([kv[i, where[h].long(), h] for h in heads])
                for i in range(2)
            ]
            draft, _ = codec.encode(
                *(entries.view(self._dtype) for entries in packed),
                layer=layer,
                positions=where,
                sinks=torch.empty(0, dtype=torch.int64),
            )
            self._decoded[key] = [as_bits(near) for near in codec.decode(draft)]
        return self._decoded[key]


def in_order(tokens):
    """Positions [L][H, tokens] of a prompt that is whole."""
    return [torch.arange(tokens).expand(HEADS, -1)] * LAYERS


def parted(kept, tokens):
    """Positions [L][H, tokens]: those of ``kept`` [L, H, n], then the other ones."""
    return [
        torch.tensor(
            [[*row, *(i for i in range(tokens) if i not in set(row))] for row in rows]
        )
        for rows in kept.tolist()
    ]
