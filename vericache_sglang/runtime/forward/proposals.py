"""Asks the inner drafter before a forward and stores what it proposes."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vericache_sglang.device.upload import upload
from vericache_sglang.drafters.base import Wanted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from vericache_sglang.attention.forward_row import ForwardRow
    from vericache_sglang.drafters.base import Drafter
    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.runtime.forward.draft_tokens import DraftTokenBuffer
    from vericache_sglang.runtime.tp_sync import TensorParallelSync

logger = logging.getLogger(__name__)

CONTEXT = 8
"""Prompt tokens that a finished output is learned with, so that its beginning can be
found again."""


class PromptChunk(NamedTuple):
    """A part of a text that is prefilled.

    Attributes:
        request: Its ``req_pool_idx``.
        start: Position of its first token.
        tokens: Their number.
        whole: Tokens of the text.
    """

    request: int
    start: int
    tokens: int
    whole: int


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
        self._features = drafter.features
        # By request, the positions of its prompt whose features are stored.
        self._stored: dict[int, range] = {}
        self._off = False
        self.spent_s = 0.0

    @property
    def most(self) -> int:
        """Most proposals per row; 0 once the drafter is switched off."""
        return 0 if self._off else self._proposals

    def begin(self, state: RequestState, length: int) -> None:
        """Note that a request whose text is known begins to decode.

        Args:
            state: A request that may have proposals.
            length: Tokens of its text.
        """
        if not self._off:
            stored = self._stored.pop(state.req_pool_idx, range(0))
            self._drafter.begin(state.req_pool_idx, length, stored.start)

    def reads(self, states: Iterable[RequestState]) -> bool:
        """Return whether a forward of requests should return hidden states."""
        needed = self._features is not None and not self._off
        return needed and any(state.stats.proposals for state in states)

    def observe(
        self, pool_idx: torch.Tensor, position: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        """Store what a forward computed; see ``Features.write``."""
        if self._features is not None:
            self._features.write(pool_idx, position, hidden)

    def of_prompts(self, chunks: Iterable[PromptChunk]) -> list[tuple[int, int, int]]:
        """Return the tokens of a prefill whose features are stored: a text's last ones.

        Args:
            chunks: Those of the prefill, in order.

        Returns:
            ``req_pool_idx``, position in the text and index in the prefill of each.
        """
        if self._features is None or self._off:
            return []
        kept, before = [], 0
        for chunk in chunks:
            end = chunk.start + chunk.tokens
            first = max(chunk.start, chunk.whole - self._features.length)
            if first < end:
                stored = self._stored.get(chunk.request, range(0))
                begin = stored.start if stored.stop == first else first
                self._stored[chunk.request] = range(begin, end)
            ahead = before - chunk.start
            kept += [(chunk.request, at, at + ahead) for at in range(first, end)]
            before += chunk.tokens
        return kept

    def observe_prompts(
        self, kept: Sequence[tuple[int, int, int]], hidden: torch.Tensor
    ) -> None:
        """Store what a prefill computed.

        Args:
            kept: From ``of_prompts``, not empty.
            hidden: [T, F] of all its tokens.
        """
        request, position, index = upload(
            hidden.device, *map(list, zip(*kept, strict=True))
        )
        self.observe(request, position, hidden[index])

    def prepare(self) -> Collection[int]:
        """Let the drafter read the texts that have begun.

        Returns:
            ``req_pool_idx`` of the requests for which nothing can be proposed yet.
        """
        if self._off:
            return ()
        began = time.perf_counter()
        try:
            return self._drafter.prepare()
        except Exception as error:  # noqa: BLE001 (raised again where it has to be)
            self._switch_off(error)
            return ()
        finally:
            self.spent_s += time.perf_counter() - began

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
                Wanted(
                    own,
                    position[at] + 1,
                    shared,
                    max(room),
                    requests=[rows[i].own for i in wanted],
                    certain=[rows[i].text for i in wanted],
                )
            )
            tokens = tokens[row, place].to(torch.int64)
        except Exception as error:  # noqa: BLE001 (raised again where it has to be)
            self._switch_off(error)
            return
        spent_s = time.perf_counter() - began
        self.spent_s += spent_s
        self._tp_sync.measured.drafter_s.observe(spent_s)
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
