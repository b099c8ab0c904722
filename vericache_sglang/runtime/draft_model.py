"""The small model or head of an inner drafter: SGLang's runner over its own KV."""

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
from vericache_sglang.errors import ConfigError
from vericache_sglang.runtime.forward.spec_input import VeriCacheSpecInput
from vericache_sglang.runtime.planned_memory import DRAFT_MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping

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

    Raises:
        ConfigError: The weights do not have the shapes of their config.

    Attributes:
        table: [requests + 1, window] int32, block table of the rings; set by ``open``.
        context: Longest text that it was made for, in tokens.
    """

    table: torch.Tensor

    def __init__(self, server_args: Any, target_worker: Any) -> None:
        self.context: int = draft_model_config(server_args).context_len
        try:
            self._runner = TpModelWorker(
                server_args,
                target_worker.gpu_id,
                target_worker.nccl_port,
                is_draft_worker=True,
                context_length=self.context,
                draft_attention_backend=BACKEND_NAME,
                random_seed=target_worker.random_seed,
            ).model_runner
        except AssertionError as error:  # of SGLang's weight loaders
            raise ConfigError(
                f"{DRAFT_MODEL}: the weights do not fit their config.json: {error}; "
                "name a folder with a whole checkpoint"
            ) from error

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

    def next_tokens(self, rows: RingRows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``SmallModel.next_tokens``."""
        found = self._run(_forward_batch(rows, self.table.shape[1]))
        return found.next_token_logits.argmax(dim=-1), None

    def _run(self, forward: ForwardBatch) -> Any:
        """Return SGLang's ``LogitsProcessorOutput`` of a forward."""
        runner = self._runner
        with forward_context(ForwardContext(attn_backend=runner.attn_backend)):
            runner.attn_backend.init_forward_metadata(forward)
            return runner.model.forward(forward.input_ids, forward.positions, forward)


class DraftHead(DraftModel):
    """A head of the served model, whose embeddings it shares.

    Attributes:
        features: Numbers that it reads with every token.
    """

    features: int
    _ids: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Type of what it reads."""
        kind: torch.dtype = self._runner.dtype
        return kind

    def next_tokens(self, rows: RingRows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``SmallModel.next_tokens``."""
        forward = _forward_batch(rows, self.table.shape[1])
        forward.spec_info = VeriCacheSpecInput()
        forward.spec_info.hidden_states = rows.hidden
        forward.capture_hidden_mode = CaptureHiddenMode.LAST
        found = self._run(forward)
        chosen = found.next_token_logits.argmax(dim=-1)
        if self._ids is not None:
            chosen = self._ids[chosen]
        return chosen, found.hidden_states


class Eagle3Head(DraftHead):
    """An EAGLE3 head, which reads the outputs of some layers.

    Args:
        server_args: As in ``DraftModel``.
        target_worker: As in ``DraftModel``; its model returns them from now on.

    Raises:
        ConfigError: See ``DraftModel``; or the head's tokens are not the model's.
    """

    def __init__(self, server_args: Any, target_worker: Any) -> None:
        super().__init__(server_args, target_worker)
        served, head = target_worker.model_runner, self._runner.model
        embed, output = served.model.get_embed_and_head()
        if head.load_lm_head_from_target:
            head.set_embed_and_head(embed, output)
        else:
            head.set_embed(embed)
        self._ids = proposed_ids(head, served.model_config.vocab_size, embed.device)
        served.model.set_eagle3_layers_to_capture(
            captured_layers(self._runner.model_config.hf_config)
        )
        self.features = head.model.fc.in_features


class PredictionHead(DraftHead):
    """A multi-token prediction head, which reads the final hidden states.

    Args:
        server_args: As in ``DraftModel``.
        target_worker: As in ``DraftModel``.
    """

    def __init__(self, server_args: Any, target_worker: Any) -> None:
        super().__init__(server_args, target_worker)
        served, head = target_worker.model_runner, self._runner.model
        # SGLang's setters of the MoE heads call torch.cuda, whatever the device is.
        embed, output = served.model.get_embed_and_head()
        head.model.embed_tokens.weight, head.lm_head.weight = embed, output
        self.features = served.model_config.hidden_size


WEIGHTED: Mapping[str, type[DraftModel]] = {
    "model": DraftModel,
    "eagle3": Eagle3Head,
    "mtp": PredictionHead,
}
"""Inner drafters with weights, by ``VeriCacheConfig.inner``."""


def captured_layers(head: Any) -> list[int] | None:
    """Return the layers whose outputs an EAGLE3 head reads; None: SGLang's choice.

    Args:
        head: Its ``hf_config``.
    """
    eagle = getattr(head, "eagle_config", None) or {}
    return eagle.get("eagle_aux_hidden_state_layer_ids")


def proposed_ids(head: Any, vocabulary: int, device: Any) -> torch.Tensor | None:
    """Return [draft vocabulary] int64, the head's tokens as the model's; None: equal.

    Raises:
        ConfigError: It has other tokens, or does not say which.
    """
    words, ids = head.config.draft_vocab_size or vocabulary, head.hot_token_id
    if ids is None and words == vocabulary:
        return None
    if ids is None or len(ids) != words:
        listed = 0 if ids is None else len(ids)
        raise ConfigError(
            f"{DRAFT_MODEL}: d2t lists {listed} of the head's {words} tokens; name a "
            "checkpoint in SGLang's format"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise ConfigError(
            f"{DRAFT_MODEL}: d2t names tokens beyond the model's {vocabulary}; name a "
            "head that was trained for this model"
        )
    found: torch.Tensor = ids.to(device=device, dtype=torch.int64)
    return found


def _forward_batch(rows: RingRows, longest: int) -> ForwardBatch:
    """Return the forward: a decode if all queries are single, else an extend.

    Both compute the logits of a row's last query only. Lengths on the host are exact on
    a CPU and upper bounds on a GPU.
    """
    device, queries = rows.prefixes.device, list(rows.queries)
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
