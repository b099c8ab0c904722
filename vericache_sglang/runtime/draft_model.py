"""The small model of an inner drafter: SGLang's runner over KV of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.utils.hf_transformers_utils import (
    get_config,
    get_context_length,
    get_hf_text_config,
)

from vericache_sglang.attention.layer import BACKEND_NAME
from vericache_sglang.device.upload import upload

if TYPE_CHECKING:
    from vericache_sglang.drafters.model import RingRows
    from vericache_sglang.drafters.ring import SlotRing


def draft_model_config(server_args: Any) -> ModelConfig:
    """Return the config of ``--speculative-draft-model-path``, with its own context.

    Args:
        server_args: SGLang's ``ServerArgs``, or a view of them.
    """
    args = resolving_view(server_args)
    path = args.speculative_draft_model_path
    revision = args.speculative_draft_model_revision
    text = get_hf_text_config(get_config(path, args.trust_remote_code, revision))
    return ModelConfig.from_server_args(
        server_args,
        model_path=path,
        model_revision=revision,
        is_draft_model=True,
        context_length=get_context_length(text),
    )


class DraftModel:
    """See ``drafters.model.SmallModel``.

    SGLang loads the weights as it does for its own speculation. Its pools, batches and
    graphs are made for rows that its scheduler knows, so the forward is called here.

    Args:
        server_args: SGLang's ``ServerArgs``.
        target_worker: SGLang's ``TpModelWorker`` of the served model.

    Attributes:
        table: [requests + 1, window] int32, block table of the rings; set by ``open``.
        context: Longest text that it was made for, in tokens.
    """

    table: torch.Tensor

    def __init__(self, server_args: Any, target_worker: Any) -> None:
        self.context: int = draft_model_config(server_args).context_len
        self._runner = TpModelWorker(
            server_args,
            target_worker.gpu_id,
            target_worker.nccl_port,
            is_draft_worker=True,
            context_length=self.context,
            draft_attention_backend=BACKEND_NAME,
            random_seed=target_worker.random_seed,
        ).model_runner

    def open(self, ring: SlotRing, requests: int) -> None:
        """Allocate the rings and their attention backend.

        Args:
            ring: Layout of a row.
            requests: Most running requests; their rows are 1 to ``requests``.
        """
        runner, config = self._runner, self._runner.model_config
        runner.page_size = 1
        runner.req_to_token_pool = ReqToTokenPool(
            requests, ring.window, runner.device, enable_memory_saver=False
        )
        self.table = runner.req_to_token_pool.req_to_token
        runner.token_to_kv_pool = MHATokenToKVPool(
            len(self.table) * ring.capacity,
            page_size=1,
            dtype=runner.kv_cache_dtype,
            head_num=config.get_num_kv_heads(runner.tp_size),
            head_dim=config.head_dim,
            layer_num=runner.layer_info.num_effective_layers,
            device=runner.device,
            enable_memory_saver=False,
            start_layer=runner.layer_info.start_layer,
            end_layer=runner.layer_info.end_layer,
        )
        runner.init_kv_index_translator()
        runner.init_attention_backends()

    def next_tokens(self, rows: RingRows) -> torch.Tensor:
        """See ``SmallModel.next_tokens``."""
        runner, queries = self._runner, list(rows.queries)
        forward = _forward_batch(rows, queries, self.table.shape[1])
        with forward_context(ForwardContext(attn_backend=runner.attn_backend)):
            runner.attn_backend.init_forward_metadata(forward)
            found = runner.model.forward(forward.input_ids, forward.positions, forward)
        chosen: torch.Tensor = found.next_token_logits.argmax(dim=-1)
        return chosen


def _forward_batch(rows: RingRows, queries: list[int], longest: int) -> ForwardBatch:
    """Return the forward: a decode if all queries are single, else an extend.

    Both compute the logits of a row's last query only. Lengths on the host are exact on
    a CPU and upper bounds on a GPU.
    """
    device = rows.prefixes.device
    if device.type == "cpu":
        prefixes: list[int] = rows.prefixes.tolist()
    else:
        prefixes = [longest - count for count in queries]
    totals = [before + count for before, count in zip(prefixes, queries, strict=True)]
    (lengths,) = upload(device, queries)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE if max(queries) == 1 else ForwardMode.EXTEND,
        batch_size=len(queries),
        input_ids=rows.tokens.to(torch.int64),
        req_pool_indices=rows.rows,
        seq_lens=rows.prefixes + lengths,
        seq_lens_cpu=torch.tensor(totals, dtype=torch.int64),
        seq_lens_sum=sum(totals),
        out_cache_loc=rows.slots,
        positions=rows.places,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        extend_num_tokens=sum(queries),
        extend_seq_lens=lengths.to(torch.int32),
        extend_seq_lens_cpu=queries,
        extend_prefix_lens=rows.prefixes.to(torch.int32),
        extend_prefix_lens_cpu=prefixes,
    )
