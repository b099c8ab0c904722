"""Runs RaggedAttnBackend over Triton's interpreter; prints errors as JSON.

A process of its own: Triton decides at import whether it interprets. The truth is the
CPU's backend on the same pool, which decodes the codes through the codec.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import torch
from ragged_world import KV_HEADS, Runner, World, layer, layout_batch, simple_batch

from vericache_kernels.packed_attention import KIVIStep
from vericache_sglang.compression.codecs.kivi import KIVI
from vericache_sglang.engine.coded_rows import CodedRows
from vericache_sglang.engine.spec_input import VeriCacheSpecInput

DIM, SEGMENTS = 32, (64, 32)
STEP, CODEC = KIVIStep(2, 32), KIVI(2, 32, window=0)
FIRST_CODES = 300
"""Codes lie in slots from here on, those of a row in 40 of their own."""


def write_codes(world, row, start, seed):
    """Write codes into consecutive slots from ``start`` that a row lists first.

    Key fields lie in the K buffer of layer 1 and value fields in its V buffer.

    Returns:
        Slots taken, offsets of each segment's fields, and decoders of the segments.
    """
    random = torch.Generator().manual_seed(seed)
    pools = world.pool.k_buffer, world.pool.v_buffer
    buffers = [layers[1].view(torch.uint8).view(-1) for layers in pools]
    slot_bytes = KV_HEADS * DIM * 4
    at, offsets, decoders = [start * slot_bytes] * 2, [], []
    for tokens in SEGMENTS:
        kv = torch.randn(2, KV_HEADS, tokens, DIM, generator=random)
        draft, _ = CODEC.encode(*kv, positions=torch.arange(tokens))
        places = []
        for name in STEP.fields:
            side = int(name.startswith("value"))
            content = draft.tensors[name].contiguous().view(torch.uint8).flatten()
            buffers[side][at[side] : at[side] + len(content)] = content
            places.append(at[side])
            at[side] += -(-len(content) // 16) * 16
        offsets.append(places)
        decoders.append(lambda draft=draft: CODEC.decode(draft))
    taken = -(-max(at) // slot_bytes) - start
    row[:taken] = torch.arange(start, start + taken, dtype=torch.int32)
    return taken, offsets, decoders


def batch_with_codes(world, queries, coded, grid):
    """Return a layout batch, the same for the CPU backend, and its tokens.

    Rows in ``coded`` begin with codes, their exact entries are 9.
    """
    lengths = [60 if i not in coded else 9 for i in range(len(queries))]
    where, parts = world.list_rows(lengths, FIRST_CODES)
    parts, begins, offsets, counts, packed = list(parts), [], [], [], {}
    for i in range(len(queries)):
        begin, own, decoders = 0, [], []
        if i in coded:
            row, start = world.table[where[i]], FIRST_CODES + 40 * i
            begin, own, decoders = write_codes(world, row, start, i)
            row[begin : begin + 9] = parts[i]
            parts[i] = torch.cat([row[:begin].clone(), parts[i]])
            packed[i] = begin, lambda layer, decoders=decoders: decoders
        begins.append(begin)
        offsets += own
        counts.append(len(own))
    plain = simple_batch("TARGET_VERIFY", where, parts, queries)
    plain.spec_info = VeriCacheSpecInput(len(queries), None, queries)
    plain.spec_info.packed = packed
    batch = layout_batch(where, parts, queries, grid)
    batch.spec_info.coded = None
    if coded:
        batch.spec_info.coded = record(begins, counts, offsets, 9 * len(coded))
    return batch, plain, world.tokens(sum(queries))


def record(begins, counts, offsets, exact):
    return CodedRows(
        STEP,
        torch.tensor(begins, dtype=torch.int32),
        torch.tensor([0, *counts]).cumsum(0).int(),
        torch.tensor(offsets, dtype=torch.int64).view(-1, len(STEP.fields)),
        torch.tensor(SEGMENTS * (len(offsets) // len(SEGMENTS)), dtype=torch.int32),
        exact,
    )


def expected(world, plain, tokens):
    world.plain.init_forward_metadata(plain)
    return world.plain.forward(*tokens, layer(DIM), plain)


def without_codes(world, plain, tokens):
    packed = plain.spec_info.packed
    plain.spec_info.packed = {i: (n, lambda _: []) for i, (n, _) in packed.items()}
    return expected(world, plain, tokens)


def error(out, wanted):
    return float((out[: len(wanted)] - wanted).abs().max())


def eager(world, queries, coded):
    batch, plain, tokens = batch_with_codes(world, queries, coded, [sum(queries)])
    world.ragged.init_forward_metadata(batch)
    out = world.ragged.forward(*tokens, layer(DIM), batch)
    return out, expected(world, plain, tokens), plain, tokens


def main():
    found = {}
    out, wanted, plain, tokens = eager(World(DIM), [1, 5, 1, 1], {0, 3})
    found["eager"] = error(out, wanted)
    out, wanted, *_ = eager(World(DIM), [1, 6, 2], set())
    found["mixed"] = error(out, wanted)

    world = World(DIM)
    out, wanted, plain, tokens = eager(world, [1, 5, 1, 1], {0, 3})
    plain.spec_info.packed = {
        i: (n, lambda _: []) for i, (n, _) in plain.spec_info.packed.items()
    }
    found["without-codes"] = error(out, expected(world, plain, tokens))

    world = World(DIM)
    runner = Runner(world, [2, 4])
    room = record([2] * 4, [2] * 4, [[0] * len(STEP.fields)] * 8, 60)
    runner.capture(12, room)
    for name, queries, coded in (
        ("graph", [5, 1, 1], {1, 2}),
        ("graph-none-coded", [1, 3], set()),
    ):
        batch, plain, tokens = batch_with_codes(world, queries, coded, runner.grid)
        out = runner.replay(batch, *tokens)
        found[name] = error(out, expected(world, plain, tokens))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
