"""Shared assumptions of all predicted figures."""

from __future__ import annotations

from vericache_sglang.planning.acceptance import (
    PUBLISHED_LLAMA_70B,
    PUBLISHED_QWEN_32B,
    Geometric,
)
from vericache_sglang.planning.hardware import MEMORY_SHARE, gpu_named, machine_of
from vericache_sglang.planning.intra import ServerModel
from vericache_sglang.planning.models import find_model

CONTEXT_TOKENS = 24_414
"""4 GB of Mistral-24B's KV, the request of section 4.1's example, in tokens."""

KEEP = 0.2
DRAFT_LENGTH = 25
"""x; ``KEEP`` and this are stated for pipeline 1 in section 6.2."""

LLAMA = "llama-3.1-70b"
RTX = "rtx-pro-6000"

SHARED = (
    f"every request has {CONTEXT_TOKENS} tokens: the 4 GB of Mistral-24B's KV in the "
    "worked example; the text names no other context length",
    f"c = {KEEP}, x = {DRAFT_LENGTH} (section 6.2) unless the row says otherwise",
    "acceptance: geometric through the two points the text gives at c = 1/4, 23 of 30 "
    "for Llama-70B and 19 of 30 for Qwen-32B; every other model takes Qwen-32B's, and "
    "c = 0.2 takes c = 1/4's",
    f"{MEMORY_SHARE:.0%} of datasheet memory holds weights and KV (vLLM's default)",
    "bandwidths: measured where the catalogue has one, else datasheet; tensor "
    "parallelism adds both up and costs nothing",
    "BF16 weights and KV with the shapes of each published config.json",
    "appendix A.1 with B_c free, a verification prefetches 1 - c of the KV, bytes "
    "cross the link once (not the printed t_xfer, which divides by l again)",
)
"""Assumptions of every row that states no others, as text."""


def server(
    model: str,
    gpu: str,
    *,
    devices: int = 1,
    context_tokens: int = CONTEXT_TOKENS,
    printed_transfer: bool = False,
) -> ServerModel:
    """Return the server of a figure under the shared assumptions."""
    shape = find_model(model)
    survival = PUBLISHED_LLAMA_70B if model == LLAMA else PUBLISHED_QWEN_32B
    return ServerModel(
        machine=machine_of(gpu_named(gpu), devices),
        weight_bytes=shape.weight_bytes,
        kv_bytes=context_tokens * shape.kv_bytes_per_token,
        acceptance=Geometric(survival),
        flops_per_token=2.0 * shape.params,
        printed_transfer=printed_transfer,
    )
