"""Runs RaggedAttnBackend over Triton's interpreter; prints errors as JSON.

A process of its own: Triton decides at import whether it interprets. The truth is the
CPU's backend on the same pool, which decodes the codes through the codec. Codes are
written by the engine's own layout, into slots that lie anywhere.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import torch
from ragged_world import KV_HEADS, World, layer, layout_batch, simple_batch

from vericache_sglang.compression.codecs.kivi import KIVI
from vericache_sglang.compression.codecs.split_planes import SplitPlanes
from vericache_sglang.engine.coded_rows import DraftCodes
from vericache_sglang.engine.spec_input import VeriCacheSpecInput
from vericache_sglang.memory.code_slots import CodeLayout
from vericache_sglang.memory.geometry import KVGeometry

DIM, EXACT = 32, 9
KIVI_2BIT = KIVI(2, 32, window=0)
PLANES = SplitPlanes(exponent_bits=2, mantissa_bits=1, block=32)
CODED = {0: 544, 3: 96}
"""Row -> packed tokens; the first ones are two segments."""
FIRST_CODES = 300
"""Codes lie in slots from here on."""
GEOMETRY = KVGeometry(
    layers=2,
    kv_heads=KV_HEADS,
    head_dim=DIM,
    v_head_dim=DIM,
    element_bytes=4,
    page_size=1,
)


class Coded:
    """A batch some rows of which begin with codes, for both backends.

    Args:
        codec: Of the codes.
        queries: Of the rows; 1 where coded.
        coded: Row -> packed tokens.
    """

    def __init__(self, codec, queries, coded):
        self.world = world = World(DIM)
        self.codec, self.queries = codec, queries
        free = torch.randperm(499 - FIRST_CODES, generator=world.random) + FIRST_CODES
        lengths = [EXACT if i in coded else 60 for i in range(len(queries))]
        where, parts = world.list_rows(lengths, FIRST_CODES)
        parts, rows, self.packed = list(parts), [], {}
        for i, n in enumerate(queries):
            state, used = None, 0
            if i in coded:
                layout = CodeLayout(codec, GEOMETRY, torch.float32, coded[i])
                slots, free = free[: layout.slots], free[layout.slots :]
                used = len(slots)
                self._write(layout, slots, i)
                world.table[where[i], :used] = slots
                world.table[where[i], used : used + EXACT] = parts[i]
                parts[i] = torch.cat([slots.int(), parts[i]])
                budget = SimpleNamespace(code_slots=used, coded=coded[i])
                state = SimpleNamespace(split=SimpleNamespace(budget=budget))
            rows.append(
                SimpleNamespace(
                    packed=state,
                    table_row=int(where[i]),
                    prefix=len(parts[i]) - n,
                    loose=2,
                    columns=range(n),
                )
            )
        places = SimpleNamespace(
            geometry=GEOMETRY,
            table=world.table,
            host=SimpleNamespace(dtype=torch.float32),
        )
        self.plain = simple_batch("TARGET_VERIFY", where, parts, queries)
        self.plain.spec_info = VeriCacheSpecInput(len(queries), None, queries)
        self.batch = layout_batch(where, parts, queries, [sum(queries)])
        self.batch.spec_info.coded = DraftCodes(codec, places).of(rows)
        self.tokens = world.tokens(sum(queries))

    def _write(self, layout, slots, i):
        """Pack random KV of layer 1 into the slots, as ``Codes`` does."""
        pool = self.world.pool
        buffers = pool.k_buffer[1], pool.v_buffer[1]
        decoders = []
        for segment in layout.segments:
            kv = torch.randn(
                2, KV_HEADS, segment.tokens, DIM, generator=self.world.random
            )
            where = torch.arange(segment.tokens)
            draft, _ = self.codec.encode(*kv, positions=where)
            layout.write(segment, buffers, slots, draft)
            read = partial(layout.read, segment, buffers, slots, 1, where)
            decoders.append(lambda read=read: self.codec.decode(read()))
        self.packed[i] = len(slots), lambda layer: decoders

    def found(self):
        self.world.ragged.init_forward_metadata(self.batch)
        return self.world.ragged.forward(*self.tokens, layer(DIM), self.batch)

    def expected(self, packed):
        self.plain.spec_info.packed = packed
        self.world.plain.init_forward_metadata(self.plain)
        return self.world.plain.forward(*self.tokens, layer(DIM), self.plain)


def error(out, wanted):
    return float((out[: len(wanted)] - wanted).abs().max())


def main():
    found = {}
    case = Coded(KIVI_2BIT, [1, 5, 1, 1], CODED)
    out = case.found()
    found["eager"] = error(out, case.expected(case.packed))
    without = {i: (n, lambda _: []) for i, (n, _) in case.packed.items()}
    found["without-codes"] = error(out, case.expected(without))
    case = Coded(PLANES, [1, 2, 1, 1], {2: 64})
    found["split-planes"] = error(case.found(), case.expected(case.packed))
    case = Coded(KIVI_2BIT, [1, 6, 2], {})
    assert case.batch.spec_info.coded is None
    found["mixed"] = error(case.found(), case.expected({}))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
