"""A cached segment: what is kept of it, where each part is, how much it is used."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from vericache_sglang.errors import InvariantError


class Tier(IntEnum):
    """Where a part is, the fastest first; a larger value is further away.

    DEVICE: slots of the KV pool. HOST: host memory. STORE: the storage backend below
    it. GONE: nowhere; only computing the prompt again brings it back.
    """

    DEVICE = 0
    HOST = 1
    STORE = 2
    GONE = 3


class Part(Enum):
    """What a segment consists of: both together are its KV, bit by bit.

    DRAFT: what drafting reads. COMPLEMENT: the rest; the whole KV of a segment that has
    no draft part.
    """

    DRAFT = "draft"
    RESIDUAL = "complement"


@dataclass(frozen=True, slots=True)
class Held:
    """One part: its size and its place.

    Attributes:
        nbytes: Its bytes over all layers, >= 1.
        tier: Where it is.

    Raises:
        InvariantError: ``nbytes`` is below 1.
    """

    nbytes: int
    tier: Tier

    def __post_init__(self) -> None:
        if self.nbytes < 1:
            raise InvariantError(f"a part of {self.nbytes} bytes cannot be")


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What is kept of a segment; parts made by two compressors never mix in one.

    Attributes:
        tokens: Tokens of the segment, >= 1.
        residual: The complement; the whole KV when there is no draft part.
        draft: The draft part; None: the segment is whole.
        compressor: Identity of what made the two parts; "" if and only if whole.
        parts: The parts there are, the complement first: it leaves first, too.

    Raises:
        InvariantError: ``tokens`` is below 1, or the compressor does not fit the parts.
    """

    tokens: int
    residual: Held
    draft: Held | None = None
    compressor: str = ""
    parts: tuple[tuple[Part, Held], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InvariantError(f"a segment of {self.tokens} tokens cannot be")
        if (self.draft is None) != (self.compressor == ""):
            raise InvariantError(
                f"compressor {self.compressor!r} with draft part {self.draft}: "
                "a whole segment has neither, a parted one both"
            )
        parts = [(Part.RESIDUAL, self.residual)]
        if self.draft is not None:
            parts.append((Part.DRAFT, self.draft))
        object.__setattr__(self, "parts", tuple(parts))

    @property
    def restorable(self) -> bool:
        """Whether no part is gone."""
        draft = self.draft
        if draft is not None and draft.tier is Tier.GONE:
            return False
        return self.residual.tier is not Tier.GONE

    @property
    def away(self) -> bool:
        """Whether nothing of it is nearer than the store."""
        draft = self.draft
        near = draft is not None and draft.tier < Tier.STORE
        return self.residual.tier >= Tier.STORE and not near

    def held(self, part: Part) -> Held | None:
        """Return one part; None for the draft part of a whole segment."""
        return self.draft if part is Part.DRAFT else self.residual

    def is_in(self, tier: Tier) -> bool:
        """Say whether a part is in ``tier``."""
        draft = self.draft
        return self.residual.tier is tier or (draft is not None and draft.tier is tier)

    def nbytes_of(self, part: Part) -> int:
        """Return the bytes of ``part``; 0 for the draft part of a whole segment."""
        held = self.held(part)
        return 0 if held is None else held.nbytes

    def tokens_of(self, part: Part) -> int:
        """Return the tokens that count as held by ``part``: every token counts once.

        Tokens are shared out as bytes are. With a selector these are the tokens it
        kept and dropped, since the KV of every token is of one size; with a codec each
        part holds some bits of every token.
        """
        if self.draft is None:
            return 0 if part is Part.DRAFT else self.tokens
        both = self.draft.nbytes + self.residual.nbytes
        kept = self.tokens * self.draft.nbytes // both
        return kept if part is Part.DRAFT else self.tokens - kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One segment as the index has it now.

    Attributes:
        name: Chained hash, so that it stands for the whole prefix up to its end.
        parent: Name of the segment before it; None for the first of a prompt.
        start: Tokens before it, >= 0.
        content: What is kept of it, and where.
        last_use: When it was used last, in seconds of the caller's clock.
        uses: Uses, each halved every half-life, as of ``last_use``; >= 1.
        pins: Running requests that hold it, >= 0.
        stored: The store has all of it, wherever else its parts are.
    """

    name: str
    parent: str | None
    start: int
    content: Content
    last_use: float
    uses: float = 1.0
    pins: int = 0
    stored: bool = False

    @property
    def end(self) -> int:
        """Tokens up to its end."""
        return self.start + self.content.tokens

    def uses_at(self, now: float, half_life_s: float) -> float:
        """Return the decayed count of uses at ``now``, in seconds.

        The CRF value of LRFU with F(x) = (1/2)^(lambda x), lambda = 1 / half-life (Lee
        et al. 2001, doi 10.1109/TC.2001.970573, section 2). A clock that went back
        decays nothing.
        """
        past = now - self.last_use
        return self.uses * math.pow(2.0, -past / half_life_s) if past > 0 else self.uses
