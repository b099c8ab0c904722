"""Records of a cached segment: its parts, their tiers and its uses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from vericache_sglang.errors import InvariantError


class Tier(IntEnum):
    """Location of a part, the fastest first.

    DEVICE: slots of the KV pool. HOST: host memory. STORE: the storage backend. GONE:
    no copy; only a prefill recomputes it.
    """

    DEVICE = 0
    HOST = 1
    STORE = 2
    GONE = 3


class Part(Enum):
    """Parts of a segment; together they are its full KV, bit by bit.

    DRAFT: draft KV. RESIDUAL: residual KV; the full KV of a segment that is not
    compressed.
    """

    DRAFT = "draft"
    RESIDUAL = "complement"


@dataclass(frozen=True, slots=True)
class Held:
    """Size and tier of one part.

    Attributes:
        nbytes: Its bytes over all layers, >= 1.
        tier: Its tier.

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
    """Parts of a segment, both made by the same compressor.

    Attributes:
        tokens: Tokens of the segment, >= 1.
        residual: Residual KV; the full KV if the segment is not compressed.
        draft: Draft KV; None: the segment is not compressed.
        compressor: Identity of the compressor; "" if and only if not compressed.
        parts: The existing parts, residual KV first.

    Raises:
        InvariantError: ``tokens`` is below 1, or just one of ``draft`` and
            ``compressor`` is given.
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
        """Whether no part is GONE."""
        draft = self.draft
        if draft is not None and draft.tier is Tier.GONE:
            return False
        return self.residual.tier is not Tier.GONE

    @property
    def away(self) -> bool:
        """Whether no part is on the device or the host."""
        draft = self.draft
        near = draft is not None and draft.tier < Tier.STORE
        return self.residual.tier >= Tier.STORE and not near

    def held(self, part: Part) -> Held | None:
        """Return one part; None for the draft KV of an uncompressed segment."""
        return self.draft if part is Part.DRAFT else self.residual

    def is_in(self, tier: Tier) -> bool:
        """Return whether a part is in ``tier``."""
        draft = self.draft
        return self.residual.tier is tier or (draft is not None and draft.tier is tier)

    def nbytes_of(self, part: Part) -> int:
        """Return the bytes of ``part``; 0 for draft KV of an uncompressed segment."""
        held = self.held(part)
        return 0 if held is None else held.nbytes

    def tokens_of(self, part: Part) -> int:
        """Return the tokens attributed to ``part``; every token counts once.

        Tokens are divided in proportion to bytes. With a selector these are the kept
        and dropped tokens, as all tokens' KV has one size; with a codec each part holds
        some bits of every token.
        """
        if self.draft is None:
            return 0 if part is Part.DRAFT else self.tokens
        both = self.draft.nbytes + self.residual.nbytes
        kept = self.tokens * self.draft.nbytes // both
        return kept if part is Part.DRAFT else self.tokens - kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Immutable record of one segment in the index.

    Attributes:
        name: Chained hash, which identifies the whole prefix up to its end.
        parent: Name of the segment before it; None for a root segment.
        start: Tokens before it, >= 0.
        content: Its parts and their tiers.
        last_use: Time of the last use, in seconds of the caller's clock.
        uses: Decayed count of uses as of ``last_use``, halved per half-life; >= 1.
        pins: Pins of running requests and operations, >= 0.
        stored: Whether the store has all of it, in addition to other tiers.
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
        et al. 2001, doi 10.1109/TC.2001.970573, section 2). Without decay if ``now`` is
        before ``last_use``.
        """
        past = now - self.last_use
        return self.uses * math.pow(2.0, -past / half_life_s) if past > 0 else self.uses
