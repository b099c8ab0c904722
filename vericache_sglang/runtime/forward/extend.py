"""Forwards over known tokens, for their KV or for what the layers show of them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from vericache_sglang.device.upload import upload
from vericache_sglang.runtime.forward.graphs import present
from vericache_sglang.runtime.forward.rows import ForwardInputs, build_forward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from vericache_sglang.kv.prefill_observer import PrefillObserver, ProbeObserver
    from vericache_sglang.runtime.tp_sync import TensorParallelSync

LONGEST = 512
"""Most tokens of one forward, unless a probe asks for more or codes for fewer."""


class KnownTokens(NamedTuple):
    """Consecutive tokens of one request, and where their KV goes.

    Attributes:
        owner: The request's ``req_pool_idx``.
        tokens: n token ids.
        position: Position of the first of them in the text.
        row: Block-table row, which lists ``prefix`` slots and behind them ``slots``.
        prefix: Slots before the first token, which all of them attend to.
        slots: [n] int64, slots their KV is written to.
        longest: Most tokens of one forward.
        codes: Has the attention of a forward read the codes with which the row begins;
            called with it, the slots before its first token, and its tokens. None
            without codes.
    """

    owner: int
    tokens: Sequence[int]
    position: int
    row: int
    prefix: int
    slots: torch.Tensor
    longest: int = LONGEST
    codes: Callable[[ForwardBatch, int, int], None] | None = None


class Extend:
    """Computes the KV of known tokens, and no next token.

    Args:
        model_runner: The target's runner.
        observer: Is shown the layers of every forward.
        tp_sync: Synchronises the ranks before a forward.
    """

    def __init__(
        self, model_runner: Any, observer: PrefillObserver, tp_sync: TensorParallelSync
    ) -> None:
        self._runner = model_runner
        self._observer = observer
        self._tp_sync = tp_sync

    def run(
        self,
        batch: ScheduleBatch,
        batch_index: int,
        known: KnownTokens,
        show: ProbeObserver | None = None,
    ) -> None:
        """Run the tokens over their row.

        Args:
            batch: The decode batch; not modified.
            batch_index: The request's index in it.
            known: The tokens.
            show: Is shown every layer, in place of the selector; None: the selector is,
                as of a prefill, for which ``prefix`` must be ``position``.
        """
        self._observer.probe = show
        try:
            for begin in range(0, len(known.tokens), known.longest):
                part = slice(begin, begin + known.longest)
                self._forward(batch, batch_index, known, part)
        finally:
            self._observer.probe = None

    def _forward(
        self, batch: ScheduleBatch, batch_index: int, known: KnownTokens, part: slice
    ) -> None:
        own, begin = known.tokens[part], part.start
        first, before = known.position + begin, known.prefix + begin
        tokens, positions, table_row, prefix, owners = upload(
            known.slots.device,
            own,
            range(first, first + len(own)),
            [known.row],
            [before],
            [known.owner] * len(own),
        )
        inputs = ForwardInputs(
            batch_indices=[batch_index],
            lengths=[len(own)],
            bounds=[before],
            table_rows=table_row,
            prefixes=prefix,
            tokens=tokens,
            slots=known.slots[part],
            positions=positions,
            owners=owners,
        )
        forward = build_forward(copy.copy(batch), inputs, self._runner)
        if known.codes is None:
            # For an extend SGLang computes the logits of the last token only.
            forward.forward_mode = ForwardMode.EXTEND
            forward.spec_info = None
        else:  # which backends for prefill cannot read
            known.codes(forward, before, len(own))
            present(forward, self._runner)
        with self._tp_sync.forward(last=False):
            self._runner.forward(forward)


def unseen(
    layer: int, queries: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor | None
) -> bool:
    """Show a layer to nothing; its attention is needed."""
    return True
