"""Forwards over a prefilled prompt, for selectors that need what they show.

Probes (KVzip), and the end of a prompt that another server has prefilled (SnapKV).
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from vericache_sglang.compression.base import Probe, ProbeLayer
from vericache_sglang.kv.row_edit import allocate, free
from vericache_sglang.kv.swapped import gathered
from vericache_sglang.runtime.forward.extend import Extend, KnownTokens
from vericache_sglang.scheduling.iteration_model import Work

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from vericache_sglang.compression.base import Selector
    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.kv.prefill_observer import PrefillObserver
    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.runtime.tp_sync import TensorParallelSync

logger = logging.getLogger(__name__)


class Probing:
    """Runs a selector's probes, one per iteration, during autoregressive decoding.

    A probe's tokens follow the prompt, in slots that are freed after the forward; the
    prompt's KV is read and not changed. Of the last layer only queries and keys are
    needed, so its attention is skipped. Where the prompt's last queries are needed and
    its prefill was not observed, on a decode server, its last tokens are run again in
    the same way.

    Args:
        selector: Bound selector; None, or one without ``Needs.probes``, has no probes.
        observer: Prefill observer that holds the selector's state per request.
        handles: KV pool and block table.
        model_runner: The target's runner.
        row: Block-table row that is unused outside a forward.
        tp_sync: Synchronises the ranks before a probe.

    Attributes:
        extend: Runs the probes, and whatever other tokens are known.
    """

    def __init__(
        self,
        selector: Selector | None,
        observer: PrefillObserver,
        handles: KVHandles,
        model_runner: Any,
        row: int,
        tp_sync: TensorParallelSync,
    ) -> None:
        wanted = selector is not None and selector.needs.probes
        self._selector = selector if wanted else None
        self._prefill = observer
        self._handles = handles
        self._runner = model_runner
        self._row = row
        self.extend = Extend(model_runner, observer, tp_sync)
        self._waiting: dict[str, deque[Probe]] = {}
        self.forwards = 0

    def done(self, state: RequestState) -> bool:
        """Return whether all probes of a prompt have run; True if it has none."""
        if not self._prefill.ready(state.rid):
            return False
        if self._selector is None:
            return True
        if state.rid not in self._waiting:
            self._prefill.open(state.rid)
            probes = self._selector.probes(state.rid, _prompt(state))
            self._waiting[state.rid] = deque(
                probe for probe in probes if self._fits(state, probe)
            )
        return not self._waiting[state.rid]

    def work(self, state: RequestState) -> list[Work]:
        """Return the work of the forwards that are still to be run over a prompt."""
        lengths = [len(probe.tokens) for probe in self._waiting.get(state.rid, ())]
        if not self._prefill.ready(state.rid):
            lengths.append(self._prefill.tails.width)
        slots = state.prompt
        return [Work(tokens, slots + tokens, tokens * slots) for tokens in lengths]

    def step(self, state: RequestState, batch_index: int, batch: ScheduleBatch) -> bool:
        """Run the next probe of a request, or the end of its prompt.

        Args:
            state: An uncompressed request of the batch that is not ``done``.
            batch: The decode batch; not modified.

        Returns:
            False if not enough slots are free; nothing changed.
        """
        probe: Probe | None = None
        if self._prefill.ready(state.rid):
            probe = self._waiting[state.rid][0]
            tokens, first = list(probe.tokens), state.prompt
        else:
            tokens = _prompt(state)[-self._prefill.tails.width :]
            first = state.prompt - len(tokens)
        page = self._handles.geometry.page_size
        slots = allocate(batch.tree_cache, -(-len(tokens) // page) * page)
        if slots is None:
            return False
        own = slots[: len(tokens)]
        where = first, self._row, first, own
        known = KnownTokens(state.req_pool_idx, tokens, *where, longest=len(tokens))
        try:
            self._run(state, batch_index, batch, known, probe)
        finally:
            free(batch.tree_cache, slots)
        if probe is not None:
            self._waiting[state.rid].popleft()
        self.forwards += 1
        return True

    def forget(self, rid: str) -> None:
        """Drop the probes of a request, if any."""
        self._waiting.pop(rid, None)

    def _run(
        self,
        state: RequestState,
        batch_index: int,
        batch: ScheduleBatch,
        known: KnownTokens,
        probe: Probe | None,
    ) -> None:
        row, first, slots = self._handles.table[self._row], known.prefix, known.slots
        before = self._handles.row(state)[:first]
        row[:first] = before
        row[first : first + len(slots)] = slots.to(row.dtype)
        show = None
        if probe is not None:
            show = self._observer(state.rid, probe, before.long())
        self.extend.run(batch, batch_index, known, show)

    def _observer(self, rid: str, probe: Probe, body: torch.Tensor) -> Any:
        pool, selector = self._handles.pool, self._selector
        last = self._handles.geometry.layers - 1

        def observe(
            layer: int,
            queries: torch.Tensor,
            keys: torch.Tensor,
            hidden: torch.Tensor | None,
        ) -> bool:
            at = slice(layer, layer + 1)
            blocks = gathered(pool.k_buffer[at], pool.v_buffer[at], body)
            prompt_keys, prompt_values = next(blocks)
            if selector is None:
                return True
            read = ProbeLayer(
                layer=layer,
                queries=queries.transpose(0, 1),
                probe_keys=keys.transpose(0, 1),
                keys=prompt_keys.transpose(0, 1),
                values=prompt_values.transpose(0, 1),
                hidden=hidden,
            )
            selector.observe(rid, probe, read)
            return layer < last

        return observe

    def _fits(self, state: RequestState, probe: Probe) -> bool:
        """Return whether a probe after the prompt fits the model's context."""
        end = state.prompt + len(probe.tokens)
        context: int = self._runner.model_config.context_len
        fits = end <= min(self._handles.table.shape[1], context)
        if not fits:
            logger.warning(
                "VeriCache: %s: a probe to token %d does not fit the context of %d; "
                "tokens %d to %d are not scored",
                state.rid,
                end,
                context,
                probe.start,
                probe.stop,
            )
        return fits


def _prompt(state: RequestState) -> list[int]:
    tokens = [*state.req.origin_input_ids, *state.req.output_ids]
    return tokens[: state.prompt]
