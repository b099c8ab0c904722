"""Runs RaggedAttnBackend over Triton's interpreter; prints errors as JSON.

A process of its own: Triton decides at import whether it interprets. The truth is the
CPU's backend on the same pool, which decodes the codes through the codec. Codes are
written by the engine's own layout, into slots that lie anywhere.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import torch
from ragged_world import KV_HEADS, World, layer, layout_batch, simple_batch

from vericache_sglang.attention.packed_rows import DraftCodes
from vericache_sglang.compression.budget import Budget
from vericache_sglang.compression.codecs.kivi import KIVI
from vericache_sglang.compression.codecs.kvquant import KVQuant
from vericache_sglang.compression.codecs.kvquant_tables import KVQuantTables
from vericache_sglang.compression.codecs.rope import Rope
from vericache_sglang.compression.codecs.rotatekv import RotateKV
from vericache_sglang.compression.codecs.rotatekv_tables import RotateKVTables
from vericache_sglang.compression.codecs.split_planes import SplitPlanes
from vericache_sglang.compression.codecs.turboquant import TurboQuant
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.handles import KVHandles
from vericache_sglang.kv.packed_drafts import Codes
from vericache_sglang.runtime.forward.spec_input import VeriCacheSpecInput
from vericache_sglang.scheduling.plan import Residency

DIM, EXACT, WHOLE, LAYER, POSITIONS = 32, 9, 45, 1, 900
CODED, FEW = {0: 544, 2: 32}, {0: 64, 2: 32}
"""Row -> packed tokens; those of the first row are two segments."""
FIRST_CODES = 150
"""Codes lie in slots from here on."""
GEOMETRY = KVGeometry(
    layers=2,
    kv_heads=KV_HEADS,
    head_dim=DIM,
    v_head_dim=DIM,
    element_bytes=4,
    page_size=1,
)
RANDOM = torch.Generator().manual_seed(1)
COLUMNS = KV_HEADS * DIM
ROPE = Rope(100.0 ** -(torch.arange(DIM // 2) / (DIM // 2)), 1.25)


def drawn(*shape):
    return torch.randn(shape, generator=RANDOM)


def kvquant():
    """Return KVQuant with other tables in every layer."""
    low = -1 - drawn(2, COLUMNS).abs()
    books = [drawn(2, 8).sort().values for _ in range(2)]
    tables = KVQuantTables(Path("t"), "t", 0.01, low, 1 - low, *books)
    return KVQuant(tables, 0.05, sinks=0).bind(ROPE)


def rotatekv(heads):
    """Return RotateKV with another order in every layer."""
    order = torch.stack([torch.randperm(COLUMNS, generator=RANDOM) for _ in range(2)])
    tables = RotateKVTables(Path("t"), "t", heads, order)
    return RotateKV(tables, 3, 16, 1.0).bind(ROPE)


CODECS = {
    "kivi": KIVI(2, 32, window=0),
    "split-planes": SplitPlanes(exponent_bits=2, mantissa_bits=1, block=32),
    "kvquant": kvquant(),
    "rotatekv": rotatekv(KV_HEADS),
    "turboquant": TurboQuant(3),
}
"""By the name of the case; no kernel decodes the last one."""


class Coded:
    """A batch some rows of which begin with codes, for both backends.

    Args:
        codec: Of the codes.
        queries: Of the rows.
        coded: Row -> packed tokens.
        alike: Heads have the same tokens, as without a selector.
        proposals: Most queries of a coded row beyond the first one.
    """

    def __init__(self, codec, queries, coded, alike=False, proposals=3):
        self.world = world = World(DIM)
        host = SimpleNamespace(dtype=torch.float32)
        handles = KVHandles(GEOMETRY, world.pool, world.table, host, None)
        codes = Codes(codec, handles)
        free = torch.randperm(499 - FIRST_CODES, generator=world.random) + FIRST_CODES
        lengths = [EXACT if i in coded else WHOLE for i in range(len(queries))]
        where, parts = world.list_rows(lengths, FIRST_CODES)
        parts, rows, self.packed = list(parts), [], {}
        for i, n in enumerate(queries):
            state = None
            if i in coded:
                used = codes.used(coded[i])
                slots, free = free[:used], free[used:]
                world.table[where[i], :used] = slots
                world.table[where[i], used : used + EXACT] = parts[i]
                parts[i] = torch.cat([slots.int(), parts[i]])
                state = self._coded(codes, coded[i], slots, int(where[i]), alike)
                self.packed[i] = used, codes.segments(state)
            rows.append(
                SimpleNamespace(
                    packed=state,
                    table_row=int(where[i]),
                    prefix=len(parts[i]) - n,
                    pending_max=2,
                    columns=range(n),
                )
            )
        self.plain = simple_batch("TARGET_VERIFY", where, parts, queries)
        self.plain.spec_info = VeriCacheSpecInput(None, queries)
        self.batch = layout_batch(where, parts, queries, [sum(queries)])
        self.drafts = DraftCodes(codes, handles, POSITIONS, proposals)
        self.batch.spec_info.coded = self.drafts.of(rows)
        self.tokens = world.tokens(sum(queries))

    def _coded(self, codes, count, slots, row, alike):
        """Return a request whose random KV of one layer is packed into slots."""
        heads = 1 if alike else KV_HEADS
        scores = torch.rand(2, heads, POSITIONS, generator=self.world.random)
        kept = scores.argsort()[..., :count].sort().values.to(torch.int32)
        kept = kept.expand(2, KV_HEADS, count)
        shape = (2, count, KV_HEADS, DIM)
        kv = torch.randn(shape, generator=self.world.random)
        codes.put(LAYER, slots, codes.encode(LAYER, *kv, kept[LAYER]))
        return SimpleNamespace(
            req=SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row)),
            split=SimpleNamespace(
                budget=Budget(count, count, 0, 0, count, len(slots)),
                coded=kept,
                shared_slots=None,
                residency=Residency.HOST,
            ),
        )

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
    for name, codec in CODECS.items():
        queries = [1, 3, 1] if name == "kivi" else [3, 3, 1]
        case = Coded(codec, queries, CODED if name == "kivi" else FEW)
        out = case.found()
        found[name] = error(out, case.expected(case.packed))
        assert case.drafts.in_kernel is (name != "turboquant")
    without = {i: (n, lambda _: []) for i, (n, _) in case.packed.items()}
    found["without-codes"] = error(out, case.expected(without))
    # The kernel is asked more than a coded row has behind its codes.
    case = Coded(CODECS["kivi"], [2, 3, 4], FEW, proposals=EXACT + 2)
    found["proposals"] = error(case.found(), case.expected(case.packed))
    case = Coded(CODECS["kvquant"], [1, 2, 4], {0: 40, 2: 7}, alike=True)
    found["heads-alike"] = error(case.found(), case.expected(case.packed))
    case = Coded(CODECS["kivi"], [1, 4, 2], {})
    assert case.batch.spec_info.coded is None
    found["mixed"] = error(case.found(), case.expected({}))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
