"""Reported builds of the kernels that copy KV, commit tokens and find proposals."""

from __future__ import annotations

import torch

from vericache_kernels.compile_report import Build
from vericache_kernels.packed_attention.steps import SplitPlanesStep

KV_HEADS = 8
DIM = 128
MOST_TOKENS = 512
"""Tokens of a segment."""
DRAFTS = 15
INTEGERS = {torch.bfloat16: "*i16", torch.float16: "*i16", torch.float32: "*i32"}

JOINED: dict[str, tuple[SplitPlanesStep, torch.dtype, int]] = {
    "E3M0": (SplitPlanesStep(3, 0), torch.bfloat16, DIM),
    "E3M1": (SplitPlanesStep(3, 1), torch.bfloat16, DIM),
    "E4M3": (SplitPlanesStep(4, 3), torch.bfloat16, DIM),
    "E3M1, float16": (SplitPlanesStep(3, 1), torch.float16, DIM),
    "E3M1, float32, D 64": (SplitPlanesStep(3, 1), torch.float32, 64),
}
"""Step, dtype, D."""


def move_builds() -> list[Build]:
    """Return the builds; needs Triton."""
    made = [
        _entries("pick entries", mapped=False, put=False),
        _entries("pick entries, 1 byte, D 64", "*u8", 64, mapped=True, put=False),
        _entries("pick entries, D 576", dim=576, mapped=True, put=False),
        _entries("pick entries of slots", mapped=True, put=False),
        _entries("put entries", mapped=False, put=True),
        _entries("pick entries, one side", mapped=False, put=False, sides=1),
    ]
    for name, (step, dtype, dim) in JOINED.items():
        made += [_count(name, step, dim), _join(name, step, dtype, dim)]
    return [*made, _commit(), _match()]


def _entries(
    name: str,
    kv: str = "*i16",
    dim: int = DIM,
    *,
    mapped: bool,
    put: bool,
    sides: int = 2,
) -> Build:
    from vericache_kernels.head_entries import triton_impl as impl

    strides = (f"{side}_{kind}_stride" for side in "kv" for kind in ("entry", "head"))
    signature = {
        **dict.fromkeys(("k_layer", "v_layer", "k_rows", "v_rows"), kv),
        **dict.fromkeys(("slots", "index"), "*i64"),
        **dict.fromkeys(strides, "i32"),
        "count": "i32",
    }
    fixed = impl.constants(KV_HEADS, dim, dim if sides == 2 else 0)
    fixed |= {"MAPPED": mapped, "PUT": put}
    return Build(name, impl.entries_kernel, signature, fixed, impl.NUM_WARPS)


def _count(name: str, step: SplitPlanesStep, dim: int) -> Build:
    from vericache_kernels.join_planes import triton_impl as impl

    fixed = impl.constants(step, KV_HEADS, (dim, dim), MOST_TOKENS)
    kernel, warps = impl.count_kernel, impl.COUNT_WARPS
    return Build(f"count escapes {name}", kernel, _planes(), fixed, warps)


def _join(name: str, step: SplitPlanesStep, dtype: torch.dtype, dim: int) -> Build:
    from vericache_kernels.join_planes import triton_impl as impl

    strides = (f"{side}_{kind}_stride" for side in "kv" for kind in ("slot", "head"))
    signature = {
        **_planes(),
        **dict.fromkeys(("k_buffer", "v_buffer"), INTEGERS[dtype]),
        **dict.fromkeys(("plane_offsets", "slots"), "*i64"),
        **dict.fromkeys(("escapes", "found", "places", "first"), "*i32"),
        **dict.fromkeys(strides, "i32"),
        "plane_bytes": "*u8",
        "columns": "i32",
    }
    fixed = impl.constants(step, KV_HEADS, (dim, dim), MOST_TOKENS)
    fixed |= impl.join_constants(step, dtype, KV_HEADS * fixed["TILES"])
    return Build(
        f"join planes {name}",
        impl.join_kernel,
        signature,
        fixed,
        impl.JOIN_WARPS,
        impl.JOIN_REGISTERS,
    )


def _planes() -> dict[str, str]:
    """Return the types of the leading arguments of both ``join_planes`` kernels."""
    return {
        **dict.fromkeys(("key_bytes", "value_bytes"), "*u8"),
        "offsets": "*i64",
        **dict.fromkeys(("segment_tokens", "counts"), "*i32"),
    }


def _commit() -> Build:
    from vericache_kernels.token_commit import triton_impl as impl

    signature = {
        "tokens": "*i64",
        "drafted": "*i32",
        **dict.fromkeys(("verified", "pool_idx_at"), "*i64"),
        **dict.fromkeys(("first", "kind_at"), "*i32"),
        **dict.fromkeys(("target", "tokens_out"), "*i64"),
        "counts_out": "*i32",
    }
    fixed = {"MOST": DRAFTS + 1, "PLACES": DRAFTS + 1}
    return Build("token commit", impl.commit_kernel, signature, fixed, impl.NUM_WARPS)


def _match() -> Build:
    from vericache_kernels.suffix_match import triton_impl as impl

    signature = {
        "texts": "*i32",
        **dict.fromkeys(("pool_idx_at", "length_at", "shared_at"), "*i64"),
        "corpus": "*i32",
        **dict.fromkeys(("end_at", "out"), "*i64"),
        **dict.fromkeys(("width", "size"), "i32"),
    }
    fixed = {"DEPTH": 4, "PLACES": 4, "BLOCK": impl.BLOCK}
    return Build("suffix match", impl.match_kernel, signature, fixed, impl.NUM_WARPS)
