"""Asks the inner drafter before a forward and stores what it proposes."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from vericache_sglang.device.upload import upload
from vericache_sglang.drafters.base import Wanted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.attention.forward_row import ForwardRow
    from vericache_sglang.drafters.base import Drafter
    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.runtime.forward.draft_tokens import DraftTokenBuffer
    from vericache_sglang.runtime.tp_sync import TensorParallelSync

logger = logging.getLogger(__name__)

CONTEXT = 8
"""Prompt tokens that a finished output is learned with, so that its beginning can be
found again."""


class InnerProposer:
    """Calls the inner drafter, and serves without it after an exception.

    Args:
        drafter: The inner drafter.
        draft_tokens: Receives the proposals.
        vocabulary: Number of token ids.
        proposals: Most proposals per row.
        tp_sync: Its measurements observe the drafter's time. Ranks that propose
            different tokens would run different forwards, so with several ranks an
            exception is raised.
        counters: Its ``inner_errors`` counts exceptions.

    Attributes:
        spent_s: Time in the drafter so far, in seconds. On a GPU it is that of its
            launches.
    """

    def __init__(
        self,
        drafter: Drafter,
        draft_tokens: DraftTokenBuffer,
        vocabulary: int,
        proposals: int,
        tp_sync: TensorParallelSync,
        counters: Any,
    ) -> None:
        self._drafter = drafter
        self._draft_tokens = draft_tokens
        self._vocabulary = vocabulary
        self._proposals = proposals
        self._tp_sync = tp_sync
        self._counters = counters
        self._off = False
        self.spent_s = 0.0

    @property
    def most(self) -> int:
        """Most proposals per row; 0 once the drafter is switched off."""
        return 0 if self._off else self._proposals

    def propose(
        self,
        rows: Sequence[ForwardRow],
        pool_idx: torch.Tensor,
        last: torch.Tensor,
        position: torch.Tensor,
    ) -> None:
        """Store proposals for every row that has room for some.

        Args:
            rows: R rows of a forward.
            pool_idx: [R] int64, ``req_pool_idx``.
            last: [R], any integer dtype, column of each request's last draft, or of
                its pending token.
            position: [R] int64, position of that token in the text.
        """
        wanted = [i for i, row in enumerate(rows) if row.proposals]
        if self._off or not wanted:
            return
        room = [rows[i].proposals for i in wanted]
        at, shared, row, place = upload(
            self._draft_tokens.device,
            wanted,
            [rows[i].shared for i in wanted],
            [i for i, k in enumerate(room) for _ in range(k)],
            [j for k in room for j in range(k)],
        )
        own = pool_idx[at]
        began = time.perf_counter()
        try:
            tokens = self._drafter.propose(
                Wanted(own, position[at] + 1, shared, max(room))
            )
            tokens = tokens[row, place].to(torch.int64)
        except Exception as error:  # noqa: BLE001 (raised again where it has to be)
            self._switch_off(error)
            return
        spent_s = time.perf_counter() - began
        self.spent_s += spent_s
        self._tp_sync.measured.drafter_s.observe(spent_s / len(wanted))
        known = (tokens >= 0) & (tokens < self._vocabulary)
        self._draft_tokens.propose(
            own[row], last[at][row] + 1 + place, torch.where(known, tokens, 0)
        )

    def finish(self, state: RequestState) -> None:
        """Let the drafter learn from a finished request, if it shares its output."""
        if self._off or not state.shares_output:
            return
        req = state.req
        prompt = list(req.origin_input_ids[-CONTEXT:])
        try:
            self._drafter.finish([*prompt, *req.output_ids])
        except Exception as error:  # noqa: BLE001 (raised again where it has to be)
            self._switch_off(error)

    def stop(self) -> None:
        """Propose nothing from now on."""
        self._off = True

    def _switch_off(self, error: Exception) -> None:
        self.stop()
        self._counters.inner_errors += 1
        logger.error("VeriCache: the inner drafter is switched off", exc_info=error)
        if not self._tp_sync.alone or isinstance(error, torch.AcceleratorError):
            raise error
