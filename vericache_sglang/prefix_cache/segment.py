"""The record of a cached segment: tiers, KV off the radix tree, uses and users."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import TYPE_CHECKING, cast

from vericache_sglang.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from vericache_sglang.kv.host_image import HostImage
    from vericache_sglang.kv.residual import HostResidual
    from vericache_sglang.prefix_cache.segment_images import SegmentDraft


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

    DRAFT = "draft KV"
    RESIDUAL = "residual KV"


class Form(IntEnum):
    """Contents of a host image.

    WHOLE: full KV. DRAFT: draft KV. RESIDUAL: residual KV. SCORES: scores of the
    tokens, beside residual KV.
    """

    WHOLE = auto()
    DRAFT = auto()
    RESIDUAL = auto()
    SCORES = auto()


class Use(IntEnum):
    """What a user of a segment reads, which must stay where it is until it ends.

    Values are combined by ``|``. Any user, also of NONE of these, protects the segment
    from eviction.

    DRAFT: draft KV on the device. RESIDUAL: residual KV. IMAGES: other host images.
    """

    NONE = 0
    DRAFT = 1
    RESIDUAL = 2
    IMAGES = 4
    ALL = 7


_READ = dict.fromkeys(Form, Use.IMAGES) | {Form.RESIDUAL: Use.RESIDUAL}
"""What a user reads if it reads an image."""


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """Size and tier of one part.

    Attributes:
        nbytes: Its bytes over all layers, >= 1.

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
    residual: PlacedPart
    draft: PlacedPart | None = None
    compressor: str = ""
    parts: tuple[tuple[Part, PlacedPart], ...] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InvariantError(f"a segment of {self.tokens} tokens cannot be")
        if (self.draft is None) != (self.compressor == ""):
            raise InvariantError(
                f"compressor {self.compressor!r} with draft KV {self.draft}: "
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

    def held(self, part: Part) -> PlacedPart | None:
        """Return one part; None for the draft KV of an uncompressed segment."""
        return self.draft if part is Part.DRAFT else self.residual

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


UNKNOWN = Content(tokens=1, residual=PlacedPart(1, Tier.GONE))
"""Content of a segment that is not in the index."""


@dataclass(slots=True, kw_only=True)
class Segment:
    """The one record of a segment; ``SegmentIndex`` changes it.

    Attributes:
        name: Chained hash, which identifies the whole prefix up to its end.
        parent: Name of the segment before it; None for a root segment.
        start: Tokens before it, >= 0.
        content: Its parts and their tiers, as eviction prices them.
        last_use: Time of the last use, in seconds of the caller's clock.
        uses: Decayed count of uses as of ``last_use``, halved per half-life; >= 1.
        stored: Whether the store has all of it, in addition to other tiers.
        draft: Draft KV on the device, outside the radix tree.
        images: Its host images.
        damaged: Those found corrupt, whose pages stay until their last reader ends.
        users: What each user reads, by request id; an operation uses it while it runs.
        distrusted: One of its copies is corrupt: it is not shared any more.
    """

    name: str
    parent: str | None = None
    start: int = 0
    content: Content = UNKNOWN
    last_use: float = 0.0
    uses: float = 1.0
    stored: bool = False
    draft: SegmentDraft | None = None
    images: dict[Form, HostImage] = field(default_factory=dict)
    damaged: set[Form] = field(default_factory=set)
    users: dict[Hashable, int] = field(default_factory=dict)
    distrusted: bool = False

    @property
    def end(self) -> int:
        """Tokens up to its end."""
        return self.start + self.content.tokens

    @property
    def split(self) -> bool:
        """Whether it is compressed, and not in the store only."""
        return self.content.draft is not None and not self.content.away

    @property
    def held(self) -> int:
        """What a user could read now."""
        held = 0 if self.draft is None else int(Use.DRAFT)
        for form in self.images:
            held |= _READ[form]
        return held

    @property
    def in_use(self) -> bool:
        """Whether users read the parts of ``content``.

        Draft KV and residual KV are not parts of a segment that is known as full KV.
        """
        split = self.content.draft is not None
        return self.is_used(Use.DRAFT | Use.RESIDUAL if split else Use.IMAGES)

    @property
    def empty(self) -> bool:
        """Whether it holds no KV and has no user."""
        return not (self.users or self.images or self.draft)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host pages of all its images."""
        return sum(image.held_bytes for image in self.images.values())

    @property
    def restorable(self) -> bool:
        """Whether its full KV can be restored from what it holds."""
        if self.has(Form.WHOLE):
            return True
        draft = self.draft is not None or self.has(Form.DRAFT)
        # Its copy to the host may be running: a restore waits for it.
        return draft and self.residual is not None

    @property
    def residual(self) -> HostResidual | None:
        """Its residual KV on the host."""
        return cast("HostResidual | None", self.images.get(Form.RESIDUAL))

    def has(self, form: Form) -> bool:
        """Return whether it has a host image that is not known to be corrupt."""
        return form in self.images and form not in self.damaged

    def reads(self, form: Form) -> bool:
        """Return whether a user reads a host image."""
        return self.is_used(_READ[form])

    def is_used(self, use: int) -> bool:
        """Return whether a user reads any of these."""
        return any(each & use for each in self.users.values())

    def uses_at(self, now: float, half_life_s: float) -> float:
        """Return the decayed count of uses at ``now``, in seconds.

        The CRF value of LRFU with F(x) = (1/2)^(lambda x), lambda = 1 / half-life (Lee
        et al. 2001, doi 10.1109/TC.2001.970573, section 2). Without decay if ``now`` is
        before ``last_use``.
        """
        past = now - self.last_use
        return self.uses * math.pow(2.0, -past / half_life_s) if past > 0 else self.uses
