"""A small model or a head as an inner drafter: it reads the last tokens of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from vericache_sglang.device.upload import upload
from vericache_sglang.drafters.base import Drafter
from vericache_sglang.drafters.ring import SINKS, SlotRing

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.drafters.base import Wanted
    from vericache_sglang.drafters.features import Features
    from vericache_sglang.drafters.texts import Texts

PIECE = 512
"""Most tokens of begun texts that are read before one forward of the target."""

NOTHING = -1
"""No token id: a row for which nothing is proposed."""


@dataclass(frozen=True, slots=True, eq=False)
class RingRows:
    """Inputs of one forward of the small model: T query tokens of n rows.

    Attributes:
        rows: [n] int64, rows of its block table.
        queries: n query lengths, >= 1.
        prefixes: [n] int64, entries of each row before its first query.
        tokens: [T] token ids.
        places: [T] int64, positions of the tokens.
        slots: [T] int64, KV slots that the forward writes.
        hidden: [T, F] features that a head reads with the tokens, or [T, H] its own
            hidden states; None for a small model.
    """

    rows: torch.Tensor
    queries: Sequence[int]
    prefixes: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    slots: torch.Tensor
    hidden: torch.Tensor | None = None


class SmallModel(Protocol):
    """A model, or a head of the served one, with KV in the slots of a ``SlotRing``.

    Attributes:
        table: [requests + 1, window] int32, its block table.
        context: Longest text that it was made for, in tokens.
    """

    table: torch.Tensor
    context: int

    def next_tokens(self, rows: RingRows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what follows the last query of each row.

        Returns:
            [n] int64, its most likely tokens; a head's hidden states [n, H], which it
            reads with them, else None.
        """


@dataclass(slots=True)
class _Read:
    """What was read of one text.

    Attributes:
        first: First token that can be read.
        skipped: Tokens between the sinks and the window, when it began.
        places: Places read, whose tokens the host knows to be in the text.
    """

    first: int
    skipped: int
    places: int = 0


def ring_of(config: VeriCacheConfig) -> SlotRing:
    """Return the ring of a server.

    A head has no sinks: their features would be missing after a cached prefix.
    """
    sinks = SINKS if config.inner == "model" else 0
    return SlotRing(config.inner_window, config.ring_spare, sinks)


class ModelDrafter(Drafter):
    """Proposes the small model's most likely tokens.

    It reads lazily, so that it costs nothing where its proposals do not pay. A text
    that begins is read in pieces. Before proposing for a row, its last
    ``most`` + 1 tokens are run whether they were read or not: that covers whatever the
    last forward has drafted, accepted or corrected, so the host need not know how many
    there are. Tokens that were rejected while nothing was proposed may stay in the ring
    until they leave the window; they cost acceptance at most.

    A head reads what the served model computed for a token together with the next
    token, so it reads one token fewer than there are; its first proposal follows the
    last one. It begins at the first token whose features it was given: those of a
    cached prefix were never computed, and a short beginning costs acceptance only.

    Args:
        texts: Texts of the running requests.
        ring: Layout of the model's KV.
        model: The small model.
        most: Most tokens proposed per row.
        features: What a head reads; None for a small model.
    """

    def __init__(
        self,
        texts: Texts,
        ring: SlotRing,
        model: SmallModel,
        most: int,
        features: Features | None = None,
    ) -> None:
        self._texts, self._ring, self._model = texts, ring, model
        self.features, self._ahead = features, int(features is not None)
        self._last = most + 1
        self._read: dict[int, _Read] = {}
        self._begun: dict[int, int] = {}

    def begin(self, request: int, length: int, first: int = 0) -> None:
        """See ``Drafter.begin``."""
        length -= self._ahead
        self._read[request] = self._from(length, first)
        self._begun.pop(request, None)
        self._begun[request] = length

    def prepare(self) -> Collection[int]:
        """See ``Drafter.prepare``; the request that began first comes first."""
        if self._begun:
            self._catch_up(self._begun.items())
            self._begun = {
                request: length
                for request, length in self._begun.items()
                if self._missing(request, length)
            }
        return self._begun

    def propose(self, wanted: Wanted) -> torch.Tensor:
        """See ``Drafter.propose``."""
        device, depth = wanted.pool_idx.device, wanted.depth
        found = torch.full(
            (len(wanted.requests), depth), NOTHING, dtype=torch.int64, device=device
        )
        ready = self._ready(wanted)
        if not ready:
            return found
        at, skipped = upload(
            device,
            ready,
            [self._read[wanted.requests[i]].skipped for i in ready],
        )
        rows, length = wanted.pool_idx[at], wanted.length[at] - self._ahead
        ends = length - skipped
        # One list serves all steps: each sees as much of it as there is by then.
        whole = ends + depth - 1
        self._model.table[rows] = self._ring.listing(rows, whole).to(torch.int32)
        seen = whole.clamp(max=self._ring.window) - (depth - 1)
        back = torch.arange(-self._last, 0, device=device)
        tokens, hidden = self._inputs(rows[:, None], length[:, None] + back)
        queries, places = self._last, ends[:, None]
        token, hidden = self._run(rows, seen - queries, tokens, places + back, hidden)
        steps = [token]
        for step in range(depth - 1):
            token, hidden = self._run(
                rows, seen + step, token[:, None], places + step, hidden
            )
            steps.append(token)
        found[at] = torch.stack(steps, dim=1)
        return found

    def _ready(self, wanted: Wanted) -> list[int]:
        """Read what rows lack; return the indices of those that may be proposed for."""
        lengths = {
            request: length - self._ahead
            for request, length in zip(wanted.requests, wanted.certain, strict=True)
        }
        for request, length in lengths.items():
            if self._outgrown(request, length):
                first = self._read[request].first
                self._read[request] = self._from(length, first)
        behind = {}
        for request, length in lengths.items():
            read = self._read[request]
            covered = self._last if read.places else 0
            if length - read.skipped < self._last:
                read.places = 0
            elif self._missing(request, length) > covered:
                behind[request] = length
        if behind:
            self._catch_up(behind.items())
        ready = []
        for i, (request, length) in enumerate(lengths.items()):
            read = self._read[request]
            if read.places and self._missing(request, length) <= self._last:
                ready.append(i)
                read.places = length - read.skipped
        return ready

    def _from(self, length: int, first: int) -> _Read:
        return _Read(first, max(first, length - self._ring.window))

    def _inputs(
        self, rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the tokens read at positions of texts, and a head's features."""
        tokens = self._texts.tokens[rows, positions + self._ahead]
        if self.features is None:
            return tokens, None
        return tokens, self.features.read(rows, positions).flatten(0, -2)

    def _outgrown(self, request: int, length: int) -> bool:
        """Return whether a text has to be read anew, from its sinks on."""
        read, ring = self._read[request], self._ring
        # Two forwards may not have been reported, each of which adds at most `spare`.
        places = length - read.skipped + 2 * ring.spare
        beyond = self._missing(request, length) > ring.window
        return beyond or places > self._model.context

    def _missing(self, request: int, length: int) -> int:
        """Return the tokens of a text of ``length`` that were not read."""
        read = self._read[request]
        return max(0, length - read.skipped - read.places)

    def _catch_up(self, wanted: Iterable[tuple[int, int]]) -> None:
        """Read at most ``PIECE`` tokens of texts, in order, up to their lengths."""
        room, sinks = PIECE, self._ring.sinks
        owners: list[int] = []
        queries: list[int] = []
        places: list[int] = []
        skipped: list[int] = []
        for request, length in wanted:
            read = self._read[request]
            # The sinks are listed too, unless they are among what is read.
            most = min(room, self._ring.window - min(sinks, read.places))
            count = min(most, self._missing(request, length))
            if not count:
                continue
            owners.append(request)
            queries.append(count)
            run = range(read.places, read.places + count)
            places += run
            skipped += [read.skipped if place >= sinks else 0 for place in run]
            read.places += count
            room -= count
        if not owners:
            return
        device = self._texts.tokens.device
        of_token = [i for i, n in enumerate(queries) for _ in range(n)]
        row, lengths, end, token_row, place, skip = upload(
            device,
            owners,
            queries,
            [self._read[request].places for request in owners],
            [owners[i] for i in of_token],
            places,
            skipped,
        )
        self._model.table[row] = self._ring.listing(row, end).to(torch.int32)
        tokens, hidden = self._inputs(token_row, place + skip)
        self._model.next_tokens(
            RingRows(
                rows=row,
                queries=queries,
                prefixes=end.clamp(max=self._ring.window) - lengths,
                tokens=tokens,
                places=place,
                slots=self._ring.slots(token_row, place),
                hidden=hidden,
            )
        )

    def _run(
        self,
        rows: torch.Tensor,
        prefixes: torch.Tensor,
        tokens: torch.Tensor,
        places: torch.Tensor,
        hidden: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run equally many tokens [n, q] at ``places`` [n, q] of every row.

        Args:
            rows: As in ``RingRows``.
            prefixes: As in ``RingRows``.
            tokens: Token ids.
            places: int64.
            hidden: [n * q, F] or [n * q, H]; see ``RingRows``.

        Returns:
            See ``SmallModel.next_tokens``.
        """
        count, queries = tokens.shape
        return self._model.next_tokens(
            RingRows(
                rows=rows,
                queries=[queries] * count,
                prefixes=prefixes,
                tokens=tokens.flatten(),
                places=places.flatten(),
                slots=self._ring.slots(rows[:, None], places).flatten(),
                hidden=hidden,
            )
        )
