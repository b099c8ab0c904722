"""Segments whose content follows from a number."""

import time

import torch

from vericache_sglang.prefix_cache.store.keys import (
    Fingerprint,
    compressor_identity,
    segment_names,
)

FINGERPRINT = Fingerprint(
    model="demo",
    weights="00ff",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    layers=2,
    kv_heads=2,
    head_dim=4,
    v_head_dim=6,
)
KIVI = compressor_identity("kivi:bits=4", 1.0, "0.1.0")
SNAPKV = compressor_identity("snapkv", 0.25, "0.1.0")
TOKENS = 8
KEPT = 3


def names_of(count, first=0):
    """Names of a prompt of ``count`` segments of 8 tokens."""
    tokens = range(first, first + count * TOKENS)
    return segment_names(FINGERPRINT, (None,), list(tokens), TOKENS)


def kv_of(generator, count):
    """Keys and values of tokens: bit patterns of every kind that is finite."""
    found = {}
    for name, dim in (("keys", 4), ("values", 6)):
        shape = (2, count, 2, dim * 2)
        raw = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
        raw[..., 1::2] &= 0xBF  # one bit less of the exponent
        found[name] = raw.view(torch.bfloat16)
    return found


def whole_of(seed, tokens=TOKENS):
    """A whole segment; every other one has scores."""
    generator = torch.Generator().manual_seed(seed)
    whole = kv_of(generator, tokens)
    if seed % 2:
        whole["noted"] = torch.randn(2, 2, tokens, generator=generator)
    return {"whole": whole}


def pair_of(seed, tokens=TOKENS, kept=KEPT):
    """Draft KV and residual KV of a segment."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(tokens, generator=generator)[:kept] for _ in range(4)]
    positions = torch.stack(rows).sort(dim=1).values.to(torch.int32)
    draft = {**kv_of(generator, kept), "kept": positions.view(2, 2, kept)}
    return {"draft": draft, "residual": kv_of(generator, tokens - kept)}


def same(one, other):
    """Say whether two dicts of tensors are equal bit by bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].view(torch.uint8).equal(other[name].view(torch.uint8))
        for name in one
    )


def is_content(found, seeds, make=whole_of):
    """Say whether a segment holds what ``make`` makes of one of the seeds."""
    return found is not None and any(
        all(same(found.parts[part], make(seed)[part]) for part in found.parts)
        and found.parts.keys() == make(seed).keys()
        for seed in seeds
    )


def is_by(found, compressor):
    return found.manifest.compressor == compressor


NAMES = names_of(5)


def fill(store):
    """Store three whole segments and two pairs."""
    for seed, name in enumerate(NAMES):
        kind = (whole_of(seed), "") if seed < 3 else (pair_of(seed), KIVI)
        assert store.put(name, *kind)


def bit_flipped(data, bit):
    """Return bytes with one bit changed."""
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def took(action):
    """Return the seconds an action took."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
