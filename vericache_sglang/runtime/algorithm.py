"""Registers VERICACHE as a custom speculative algorithm of SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from vericache_sglang.config.files import active_config, is_disabled
from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.prefix_cache import tiered_cache
from vericache_sglang.runtime import cuda_arguments
from vericache_sglang.runtime.forward.spec_input import VeriCacheSpecInput

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from sglang.srt.managers.schedule_batch import ScheduleBatch

NAME = "VERICACHE"


def served_config() -> VeriCacheConfig | None:
    """Return this process's settings; None if VeriCache is off."""
    if is_disabled() or (get_spec().speculative_algorithm or "").upper() != NAME:
        return None
    return active_config() or VeriCacheConfig()


class EmptyRelay(FutureMap):
    """A ``FutureMap`` that relays lengths only; our worker stores its own tokens.

    Upstream's ``_resolve_spec_extras`` calls ``record_stream``, which CPU tensors
    do not support, and ``stash`` copies a device payload. Ours is empty.
    """

    def stash(self, future_indices: Any, payload: Any) -> None:
        """Store nothing."""

    def _resolve_spec_extras(self, batch: ScheduleBatch) -> None:
        """Relay nothing."""


def relayed(batch: ScheduleBatch, future_map: FutureMap) -> VeriCacheSpecInput:
    """Return the relay of a PREBUILT batch, whose row lengths are published."""
    relay = VeriCacheSpecInput()
    if batch.enable_overlap:
        relay.future_indices = batch.req_pool_indices
        future_map.publish(batch.req_pool_indices, batch.seq_lens)
    return relay


class VeriCacheAlgorithm(CustomSpecAlgo):
    """See ``CustomSpecAlgo``; SGLang 0.5.21 calls three methods that it lacks."""

    refuse: Callable[[Any], None]
    """Checks server arguments; set by the plugin before registration."""

    most_drafts: int
    """``VeriCacheConfig.most_drafts``; set by the plugin before registration."""

    def carries_draft_hidden_states(self) -> bool:
        """Return False: no hidden states are relayed (called by ``Scheduler``)."""
        return False

    def need_topk(self) -> bool:
        """Return False: no top-k is relayed (called by ``FutureMap``)."""
        return False

    def create_future_map(
        self,
        device: Any,
        pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        """Build the overlap relay (called by ``Scheduler``).

        Lengths are not copied to the host: the copy would wait for the running forward,
        and our worker builds its own lists.
        """
        return EmptyRelay(device, self, pool, False, needs_confidence_relay)

    def supports_ragged_verify(self) -> bool:
        """Return True: verified rows differ in length (``graph_runner.py``)."""
        return True

    def has_draft_kv(self) -> bool:
        """Return False: drafts use the request's own slots, not a second pool."""
        return False

    def build_disagg_draft_input(
        self, batch: ScheduleBatch, last_tokens_tensor: torch.Tensor, future_map: Any
    ) -> VeriCacheSpecInput:
        """Admit requests whose prompt KV has arrived (``process_prebuilt``).

        Args:
            batch: Their PREBUILT batch, which runs no forward.
            last_tokens_tensor: [n] int64, their last tokens, without KV.
            future_map: Relay between iterations under overlap.
        """
        batch.req_to_token_pool.on_arrival(batch, last_tokens_tensor)
        return relayed(batch, future_map)

    def handle_server_args(self, server_args: Any) -> None:
        """Refuse unsupported arguments and set SGLang's verification width.

        On a GPU this also chooses the attention backend and the CUDA-graph sizes that
        the user left open.

        Raises:
            UnsupportedError: A flag or the model is on the refusal list.
        """
        if str(server_args.device).startswith("cuda"):
            cuda_arguments.settle(server_args)
        config = active_config() or VeriCacheConfig()
        if config.inner == "mtp" and server_args.speculative_draft_model_path is None:
            # A prediction head is part of the served model's checkpoint.
            server_args.speculative_draft_model_path = server_args.model_path
            server_args.speculative_draft_model_revision = server_args.revision
        type(self).refuse(server_args)
        if not server_args.disable_radix_cache:
            server_args.radix_cache_backend = tiered_cache.NAME
        if server_args.disaggregation_mode == "decode":
            # Unused (patches: disaggregation_decode), but a host pool is allocated.
            server_args.disaggregation_decode_retraction_backup = "cpu_tensor"
        server_args.speculative_num_steps = self.most_drafts
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_draft_tokens = self.most_drafts + 1
