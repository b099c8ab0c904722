"""Reported builds: every Triton kernel in its usual sizes."""

from __future__ import annotations

from typing import Any

from vericache_kernels.compile_report import Build
from vericache_kernels.compile_report.move_builds import move_builds
from vericache_kernels.packed_attention import (
    SPLITS,
    DecodedStep,
    DecodeStep,
    KIVIStep,
    KVQuantStep,
    RotateKVStep,
    SplitPlanesStep,
)

KV_HEADS = 8
GROUP = 4
"""Query heads per KV head, as in Llama 3 8B and Qwen3 8B with 8 KV heads."""

STEPS: dict[str, DecodeStep] = {
    "decoded before": DecodedStep(),
    "split planes E3M0": SplitPlanesStep(3, 0),
    "split planes E3M1": SplitPlanesStep(3, 1),
    "split planes E3M2": SplitPlanesStep(3, 2),
    "split planes E4M3": SplitPlanesStep(4, 3),
    "KIVI 2 bits": KIVIStep(2),
    "KIVI 4 bits": KIVIStep(4),
    "KVQuant 4 bits": KVQuantStep(4, places=13),
    "RotateKV 2 bits": RotateKVStep(2),
    "RotateKV 3 bits": RotateKVStep(3),
    "RotateKV 4 bits": RotateKVStep(4),
}
"""All with D = 128, bfloat16, one query; 13 ``places`` are 1.25 % of 1024 columns."""

OTHER_SHAPES: dict[str, tuple[DecodeStep, str, int, int]] = {
    "split planes E3M1, D 64": (SplitPlanesStep(3, 1), "bf16", 64, 1),
    "split planes E3M1, float16": (SplitPlanesStep(3, 1), "fp16", 128, 1),
    "split planes E3M1, float32, D 64": (SplitPlanesStep(3, 1), "fp32", 64, 1),
    "split planes E3M1, 8 queries": (SplitPlanesStep(3, 1), "bf16", 128, 8),
    "KIVI 2 bits, D 64": (KIVIStep(2), "bf16", 64, 1),
}
"""Decode step, dtype, D, queries per row."""

RAGGED_SHAPES: dict[str, tuple[str, int, int, int]] = {
    "ragged rows of 32": ("bf16", 128, 32, 64),
    "ragged rows of 32, batch of 128": ("bf16", 128, 32, 128),
    "ragged rows of 32, batch of 256": ("bf16", 128, 32, 256),
    "ragged rows of 1": ("bf16", 128, 1, 64),
    "ragged rows of 32, float16, D 64": ("fp16", 64, 32, 64),
    "ragged rows of 32, float32": ("fp32", 128, 32, 64),
}
"""Dtype, D, maximum queries per row, rows; 32 are a pending token and 31 drafts."""


def builds() -> dict[str, Build]:
    """Return every build by its name; needs Triton."""
    shapes = {name: (step, "bf16", 128, 1) for name, step in STEPS.items()}
    made = [_attend(name, *shape) for name, shape in (shapes | OTHER_SHAPES).items()]
    made += [_merge(counted=False), _merge(counted=True), *_ragged(), *move_builds()]
    return {build.name: build for build in made}


def _attend(name: str, step: DecodeStep, kv: str, dim: int, queries: int) -> Build:
    import triton.language as tl

    from vericache_kernels.packed_attention import triton_impl as impl

    product = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[kv]
    constants = impl.constants(step, product, queries, KV_HEADS, GROUP, dim)
    signature = {
        **dict.fromkeys(("q_at", "k_buffer", "v_buffer"), f"*{kv}"),
        **dict.fromkeys(("out_at", "lse_at", "tables", "rope"), "*fp32"),
        **dict.fromkeys(("key_bytes", "value_bytes"), "*u8"),
        **dict.fromkeys(("offsets", "places"), "*i64"),
        **dict.fromkeys(("segment_tokens", "first_segment", "positions"), "*i32"),
        **dict.fromkeys(("order", "slots", "first_slot"), "*i32"),
        **dict.fromkeys(("slot_stride", "head_stride"), "i32"),
        "scale": "fp32",
    }
    fixed: dict[str, Any] = {**constants, "SPLITS": SPLITS}
    kernel, warps = impl.attend_kernel, impl.NUM_WARPS
    return Build(name, kernel, signature, fixed, warps, step.registers)


def _merge(*, counted: bool) -> Build:
    from vericache_kernels.split_softmax import triton_impl as impl

    pointers = {"out_at": "*fp32", "lse_at": "*fp32", "result_at": "*bf16"}
    signature = pointers | {"total_at": "*i32" if counted else "*fp32"}
    fixed = {"COUNTED": counted, "D": 128, "SPLITS": SPLITS}
    name = "merge of splits" + (" of ragged rows" if counted else "")
    return Build(name, impl.merge_kernel, signature, fixed, impl.NUM_WARPS)


def _ragged() -> list[Build]:
    import triton.language as tl

    from vericache_kernels.ragged_attention import SPLITS as splits  # noqa: N811
    from vericache_kernels.ragged_attention import triton_impl as impl

    products = {"bf16": (tl.bfloat16, 2), "fp16": (tl.float16, 2)}
    products["fp32"] = (tl.float32, 4)
    made = []
    for name, (kv, dim, queries, rows) in RAGGED_SHAPES.items():
        signature = {
            **dict.fromkeys(("q_at", "k_buffer", "v_buffer"), f"*{kv}"),
            **dict.fromkeys(("out_at", "lse_at"), "*fp32"),
            **dict.fromkeys(("table", "row_at", "first_at"), "*i32"),
            **dict.fromkeys(("begin_at", "end_at"), "*i32"),
            **dict.fromkeys(("q_stride", "slot_stride"), "i32"),
            **dict.fromkeys(("head_stride", "table_stride", "rows"), "i32"),
            "scale": "fp32",
        }
        product, size = products[kv]
        fixed = impl.constants(product, size, queries, GROUP, dim)
        kernel, most = impl.attend_kernel, impl.REGISTERS[size]
        fixed |= {"ROWS": rows, "SPLITS": splits}
        made.append(Build(name, kernel, signature, fixed, impl.NUM_WARPS, most))
    return made
