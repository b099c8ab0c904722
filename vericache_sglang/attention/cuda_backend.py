"""SGLang attention backend on a GPU for ragged rows, with CUDA-graph support."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import (
    AttentionBackend,
    SharedReadEnds,
)

from vericache_kernels.ragged_attention import RaggedRows, ragged_attention
from vericache_sglang.attention.layer import refuse_layer, refuse_pool, store_kv
from vericache_sglang.attention.packed_rows import (
    CodedForward,
    CodedRows,
    coded_forward,
)

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True, slots=True, eq=False)
class RaggedMetadata:
    """Rows of one forward, the same in every layer.

    Attributes:
        rows: All rows; coded rows have empty ranges here.
        coded: The coded rows; None if there are none.
    """

    rows: RaggedRows
    coded: CodedForward | None = None


class RaggedAttnBackend(AttentionBackend):
    """Causal full attention whose result for a row is independent of other rows.

    Decodes and ragged target verifications use our kernels; prefill uses another
    backend. The row lengths of a verification come from one of three sources: SGLang's
    ``ragged_verify_layout`` on the spec input, with ``seq_lens`` excluding the queries;
    a ragged extend with ``extend_seq_lens`` and ``extend_prefix_lens``; or, in SGLang's
    warm-up without a spec input, equal lengths. Rows are read through
    ``req_pool_indices`` while the layers run.

    Args:
        model_runner: SGLang's runner; its pools are read in every forward.
        prefill: Backend of EXTEND and MIXED.
        most_queries: Maximum query tokens of a verified row, the draft length plus one.
        decode_queries: Query count that decodes are compiled for. With ``most_queries``
            a token's attention is bitwise equal in a decode and in a verification; with
            1 a decode is as fast as without speculation.

    Raises:
        ValueError: The pool stores the KV of sliding-window layers separately.
    """

    supports_ragged_verify_graph = True
    needs_cpu_seq_lens = False
    # As in SGLang's Triton backend, which serves prefill.
    extend_dummy_seqs_capped_by_req_pool = True

    forward_metadata: RaggedMetadata | None

    def __init__(
        self,
        model_runner: ModelRunner,
        prefill: AttentionBackend,
        most_queries: int,
        decode_queries: int = 1,
    ) -> None:
        super().__init__()
        refuse_pool(model_runner)
        self.forward_metadata = None
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._prefill = prefill
        self._most_queries, self._decode_queries = most_queries, decode_queries
        self._static: RaggedRows | None = None

    # -- before the layers --------------------------------------------------------

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Set the metadata of a forward that runs without a graph.

        Raises:
            ValueError: The row lengths of a verification are unknown.
        """
        mode = forward_batch.forward_mode
        self.forward_metadata = None
        if mode.is_idle():
            return
        if not _ours(mode):
            self._prefill.init_forward_metadata(forward_batch)
            return
        self.forward_metadata = self._described(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the static int32 row metadata of graphs, for ``max_bs`` rows."""
        places = torch.zeros(
            4, max_bs + 1, dtype=torch.int32, device=self._table.device
        )
        row, first, begin, end = places
        self._static = RaggedRows(
            self._table, row[:max_bs], first, begin[:max_bs], end[:max_bs]
        )

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Write a forward's row metadata into the static buffers of its graph.

        Rows after the live ones have no tokens.

        Raises:
            ValueError: See ``init_forward_metadata``; also if the batch is larger than
                the captured one or has coded rows, whose size is unknown at capture.
        """
        if not _ours(forward_batch.forward_mode):
            self._prefill.init_forward_metadata_out_graph(forward_batch, in_capture)
            return
        if self._static is None:
            raise ValueError("attention backend vericache: no init_cuda_graph_state")
        described = self._described(forward_batch)
        if described.coded is not None:
            raise ValueError("attention backend vericache: coded rows in a CUDA graph")
        static = _part(self._static, forward_batch.batch_size)
        _fill(static, described.rows)
        self.forward_metadata = RaggedMetadata(static)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a padded row, in tokens."""
        return 1

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """Return that the block table is read until the last layer is done."""
        return SharedReadEnds.POST_REPLAY if _ours(fm) else SharedReadEnds.UNKNOWN

    # -- in every layer -----------------------------------------------------------

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
        """See ``forward_decode``; prefill is passed to the prefill backend."""
        serve = self._prefill.forward_extend
        if _ours(forward_batch.forward_mode):
            serve = self.forward_decode
        refuse_layer(layer, features)
        out: torch.Tensor = serve(
            q, k, v, layer, forward_batch, save_kv_cache, **features
        )
        return out

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
        """Store K and V of the new tokens, then compute attention over their rows.

        Shapes: T new tokens of all rows, Hq and Hkv heads, D head dim.

        Args:
            q: [T, Hq * D] or [T, Hq, D].
            k: [T, Hkv, D], or None if another layer's KV is shared.
            v: As ``k``.
            layer: Gives the layer index, its heads and the scaling.
            forward_batch: The batch whose metadata are set.
            save_kv_cache: False if the KV is already in the pool.
            features: Further inputs of special layers; must be None.

        Returns:
            [T, Hq * D], dtype of ``q``; zeros for tokens that belong to no row.

        Raises:
            ValueError: The layer needs attention that is not causal and full.
        """
        refuse_layer(layer, features)
        if save_kv_cache:
            store_kv(self.token_to_kv_pool, layer, forward_batch, (k, v))
        metadata = self.forward_metadata
        if metadata is None:
            raise ValueError("attention backend vericache: forward was not described")
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        kv = (
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
        )
        decodes = forward_batch.forward_mode.is_decode()
        out = ragged_attention(
            queries,
            kv,
            metadata.rows,
            layer.scaling,
            most_queries=self._decode_queries if decodes else self._most_queries,
        )
        if metadata.coded is not None:
            coded = metadata.coded
            out = coded.attend(layer.layer_id, queries, kv, layer.scaling, out)
        return out.view(len(out), -1)

    # -- rows of a batch ----------------------------------------------------------

    @property
    def _table(self) -> torch.Tensor:
        """The block table; read through its pool, because the worker may replace it."""
        table: torch.Tensor = self.req_to_token_pool.req_to_token
        return table

    def _described(self, batch: Any) -> RaggedMetadata:
        """Return metadata of a batch's live rows, or of SGLang's replay view of one.

        Raises:
            ValueError: See ``init_forward_metadata``.
        """
        count = batch.batch_size - getattr(batch, "num_padding", 0)
        first, end = self._bounds(batch, count)
        row = batch.req_pool_indices[:count]
        rows = RaggedRows(self._table, row, first, torch.zeros_like(end), end)
        spec_info = batch.spec_info
        coded: CodedRows | None = getattr(spec_info, "coded", None)
        if coded is None:
            if getattr(spec_info, "packed", None):
                raise ValueError(
                    "attention backend vericache: rows with codes are read from "
                    "spec_info.coded on a GPU"
                )
            return RaggedMetadata(rows)
        forward, others = coded_forward(coded, rows, len(batch.input_ids))
        return RaggedMetadata(others, forward)

    def _bounds(self, batch: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return first tokens [count + 1] and lengths [count] of the rows.

        Raises:
            ValueError: See ``init_forward_metadata``.
        """
        lengths: torch.Tensor = batch.seq_lens[:count]
        if batch.forward_mode.is_decode():
            first = torch.arange(count + 1, dtype=torch.int32, device=lengths.device)
            return first, lengths
        spec_info = batch.spec_info
        layout = None if spec_info is None else spec_info.ragged_verify_layout
        if layout is not None:
            first = layout.qo_indptr_device[: count + 1]
            return first, lengths + layout.verify_lens[:count]
        queries = getattr(batch, "extend_seq_lens", None)
        if queries is not None and batch.extend_prefix_lens is not None:
            first = torch.nn.functional.pad(queries.cumsum(0), (1, 0))
            return first, batch.extend_prefix_lens + queries
        if spec_info is not None:
            raise ValueError(
                "attention backend vericache: TARGET_VERIFY without "
                "ragged_verify_layout and without extend_seq_lens (tree verification?)"
            )
        width = len(batch.input_ids) // count
        first = torch.arange(count + 1, dtype=torch.int32, device=lengths.device)
        return first * width, lengths + width


def _ours(mode: ForwardMode) -> bool:
    """Return whether our kernels serve a mode; else the prefill backend does."""
    return bool(mode.is_decode_or_idle() or mode.is_target_verify())


def _part(static: RaggedRows, count: int) -> RaggedRows:
    """Return views of the first ``count`` static rows.

    Raises:
        ValueError: There are fewer rows.
    """
    if count > len(static.row):
        raise ValueError(f"{count} rows, graphs have at most {len(static.row)}")
    return replace(
        static,
        row=static.row[:count],
        first=static.first[: count + 1],
        begin=static.begin[:count],
        end=static.end[:count],
    )


def _fill(static: RaggedRows, live: RaggedRows) -> None:
    """Write the live rows into the static ones; remaining rows get no tokens."""
    count = len(live.row)
    static.row[:count].copy_(live.row)
    static.begin[:count].copy_(live.begin)
    static.end[:count].copy_(live.end)
    static.first[: count + 1].copy_(live.first)
    for places in (static.row, static.begin, static.end):
        places[count:].zero_()
    static.first[count + 1 :].copy_(live.first[-1:].expand(len(static.row) - count))
