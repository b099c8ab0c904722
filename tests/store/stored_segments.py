"""Segments whose content follows from a number."""

import time

import torch

from vericache_sglang.store.keys import Fingerprint, compressor_identity, segment_names
from vericache_sglang.store.payload import About

FINGERPRINT = Fingerprint(
    model="demo",
    weights="00ff",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    layers=2,
    kv_heads=2,
    head_dim=4,
    v_head_dim=4,
)
KIVI = compressor_identity("kivi:bits=4", 1.0, "0.1.0")
SNAPKV = compressor_identity("snapkv", 0.25, "0.1.0")
TOKENS = 8


def names_of(count, first=0):
    """Names of a prompt of ``count`` segments of 8 tokens."""
    tokens = range(first, first + count * TOKENS)
    return segment_names(FINGERPRINT, (None,), list(tokens), TOKENS)


def about(compressor=""):
    return About(tuple(range(TOKENS)), "parent", (None, "salt"), compressor)


def tensors_of(seed, tokens=TOKENS):
    """Bit patterns of every kind, NaNs with payloads among them."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (tokens * 32,), generator=generator).to(torch.uint8)
    return {
        "keys": raw.view(torch.bfloat16).view(2, tokens, 2, 4),
        "codes": raw[: tokens * 4].clone(),
    }


def pair_parts(seed):
    return {"draft": tensors_of(seed), "rest": tensors_of(seed + 1, TOKENS + 1)}


def same(one, other):
    """Say whether two dicts of tensors are equal bit by bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].view(torch.uint8).equal(other[name].view(torch.uint8))
        for name in one
    )


def is_content(payload, seeds):
    """Say whether a payload holds what one of the seeds makes."""
    return any(
        same(payload.tensors, tensors_of(seed, tokens))
        for seed in seeds
        for tokens in (TOKENS, TOKENS + 1)
    )


NAMES = names_of(5)


def fill(store):
    """Store three whole segments and two pairs."""
    for seed, name in enumerate(NAMES):
        kind = ({"whole": tensors_of(seed)}, about())
        stored = store.put(
            name, *(kind if seed < 3 else (pair_parts(seed), about(KIVI)))
        )
        assert stored


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
