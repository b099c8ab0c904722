"""SGLang attention on a CPU that reads a row as contiguous slot runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from vericache_kernels.packed_attention import Segment, attend_packed
from vericache_kernels.run_attention import RowPlan, attend_row, plan_row
from vericache_sglang.attention.layer import refuse_layer, refuse_pool, store_kv

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class RunMetadata:
    """Attention plans of the rows of one forward.

    Attributes:
        plans: One plan per row, in batch order; rows without queries are omitted.
        packed: Index of a plan -> layer -> decoders of the row's leading coded
            segments; the plan covers the slots after them.
    """

    plans: Sequence[RowPlan]
    packed: dict[int, Callable[[int], list[Segment]]] = field(default_factory=dict)


class SlotRunAttnBackend(AttentionBackend):
    """Causal full attention over slot runs; a row's result depends on it alone.

    Serves DECODE, EXTEND, MIXED, TARGET_VERIFY (presented as a ragged extend:
    ``extend_seq_lens_cpu`` and ``extend_prefix_lens_cpu`` set) and IDLE. Rows are
    read through ``req_pool_indices``, which may name rows past the pool's size.

    Raises:
        ValueError: The pool stores the KV of sliding-window layers separately.
    """

    forward_metadata: RunMetadata | None

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        refuse_pool(model_runner)
        self.forward_metadata = None
        # The table may be replaced later, so it is read through its pool each time.
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan every row of ``forward_batch`` once, for all its layers.

        Raises:
            ValueError: A target verify that is not a ragged extend.
        """
        if forward_batch.forward_mode.is_idle():
            self.forward_metadata = RunMetadata(plans=())
            return
        table = self.req_to_token_pool.req_to_token
        rows = forward_batch.req_pool_indices.tolist()
        coded = getattr(forward_batch.spec_info, "packed", {})
        plans: list[RowPlan] = []
        packed: dict[int, Callable[[int], list[Segment]]] = {}
        for i, (row, (length, queries)) in enumerate(
            zip(rows, _row_lengths(forward_batch), strict=True)
        ):
            if not queries:
                continue
            begin = 0
            if i in coded:
                begin, packed[len(plans)] = coded[i]
            plans.append(plan_row(table[row, begin:length], queries))
        self.forward_metadata = RunMetadata(plans=plans, packed=packed)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **features: Any,
    ) -> torch.Tensor:
        """See ``forward_extend``; one query a row."""
        return self.forward_extend(
            q, k, v, layer, forward_batch, save_kv_cache, **features
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **features: Any,
    ) -> torch.Tensor:
        """Store K and V of the new tokens, then compute attention over their rows.

        Shapes: T new tokens of all rows, Hq and Hkv heads, D head dim.

        Args:
            q: [T, Hq * D] or [T, Hq, D].
            k: [T, Hkv, D], or None if another layer's KV is shared.
            v: As ``k``.
            layer: Gives the layer index, its heads and the scaling.
            forward_batch: The batch planned by ``init_forward_metadata``.
            save_kv_cache: False if the KV is already in the pool.
            features: Further inputs of special layers; must be None.

        Returns:
            [T, Hq * D], dtype of ``q``; rows after the planned ones are zero.

        Raises:
            ValueError: The layer needs attention that is not causal and full.
        """
        refuse_layer(layer, features)
        if save_kv_cache:
            store_kv(self.token_to_kv_pool, layer, forward_batch, (k, v))
        if self.forward_metadata is None:
            raise ValueError("attention backend vericache: forward was not planned")
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = torch.zeros_like(queries)
        k_buffer = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        v_buffer = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        start = 0
        for i, plan in enumerate(self.forward_metadata.plans):
            stop = start + plan.query_len
            mine = queries[start:stop]
            decoded = self.forward_metadata.packed.get(i)
            if decoded is None:
                rows = attend_row(mine, k_buffer, v_buffer, plan, layer.scaling)
            else:
                segments = decoded(layer.layer_id)
                rows = attend_packed(
                    mine, segments, k_buffer, v_buffer, plan, layer.scaling
                )
            out[start:stop] = rows
            start = stop
        return out.view(out.shape[0], -1)

    def support_triton(self) -> bool:
        """Return False: there is no Triton on a CPU."""
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a padded row, in tokens."""
        return 1


def _row_lengths(batch: ForwardBatch) -> list[tuple[int, int]]:
    """Return (row length, queries) of each row, in tokens, from host lists."""
    if batch.forward_mode.is_decode():
        lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        return [(length, 1) for length in lengths.tolist()]
    queries, prefixes = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    if queries is None or prefixes is None:
        raise ValueError(
            f"attention backend vericache: {batch.forward_mode.name} without "
            "extend_seq_lens_cpu and extend_prefix_lens_cpu (tree verification?)"
        )
    return [(p + n, n) for p, n in zip(prefixes, queries, strict=True)]
