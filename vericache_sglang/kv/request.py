"""What the engine remembers of a running request between iterations."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import InvariantError

if TYPE_CHECKING:
    import torch

    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.observability.request_stats import RequestStats
    from vericache_sglang.sampling.grammar import GrammarCursor
    from vericache_sglang.sampling.penalties import Penalties
    from vericache_sglang.sampling.profile import Profile


class Layout(Enum):
    """What a request's row of ``req_to_token`` lists before its decode slots.

    B prompt slots in whole pages; the draft part is c slots of codes, none without a
    codec, and n of exact entries; m = B - n entries are neither exact nor kept so. The
    prompt's last partial page counts as decode slots.
    """

    WHOLE = "whole"
    """The B prompt slots in order; plain SGLang's row."""

    BESIDE = "beside"
    """The B prompt slots in order, then the draft part: c + n slots of its own; a
    shared draft part only the shadow row lists."""

    PERMUTED = "permuted"
    """n slots of exact entries, then m of the other ones; never with codes."""

    KEPT = "kept"
    """The draft part; the complement is on the host."""

    SWAPPED = "parked"
    """One page of no content: all of it is on the host."""


@dataclass(slots=True)
class Parts:
    """The two parts of a prompt's KV.

    Attributes:
        budget: Counts.
        kept: [L, H, n] int32 on the pool's device, the prompt positions that stayed
            exact.
        coded: [L, H, coded] int32, likewise those a codec packed.
        layout: How the row lists them.
        insertable: ``Req.skip_radix_cache_insert`` as it was, negated: whether the
            finished request may enter the prefix tree once its row is whole again.
        draft_row: Row of the table that lists the draft part and the decode slots,
            where the request's own row lists more; -1 for none.
        listed: Decode slots listed in the shadow row.
        swapped_slots: Slots held when it was parked.
        noted: Per layer [H, B], scores of the prompt's tokens; empty without any.
        segments: Names of the prompt's segments, where other prompts share its parts.
        shared_slots: [n] int64, the slots of a shared draft part, which are not the
            request's own; None for one of its own.
    """

    budget: Budget
    kept: torch.Tensor
    coded: torch.Tensor
    layout: Layout
    insertable: bool
    draft_row: int = -1
    listed: int = 0
    swapped_slots: int = 0
    noted: list[torch.Tensor] = field(default_factory=list)
    segments: tuple[str, ...] = ()
    shared_slots: torch.Tensor | None = None

    @property
    def shared_count(self) -> int:
        """Slots the own row begins with that are not the request's to free."""
        listed = self.layout in (Layout.KEPT, Layout.PERMUTED)
        return self.budget.slots if listed and self.shared_slots is not None else 0

    @property
    def head(self) -> int:
        """Slots the own row lists before the decode slots."""
        budget = self.budget
        own = budget.slots if self.shared_slots is None else 0
        return {
            Layout.WHOLE: budget.offered,
            Layout.BESIDE: budget.offered + own,
            Layout.PERMUTED: budget.offered,
            Layout.KEPT: budget.slots,
            Layout.SWAPPED: 0,
        }[self.layout]


@dataclass(slots=True)
class RequestState:
    """One request from its prefill to its release.

    Lengths are in tokens. Row = the request's row of ``req_to_token``.

    A forward is launched before the outcome of the last one was heard
    (``in_flight.py``): what it certainly emits is counted at its launch, the rest when
    it lands.

    Attributes:
        req: SGLang's ``Req``.
        prompt: Tokens prefilled, T; after a retraction this includes earlier output.
        verified: Tokens whose exact KV exists, F, as far as it is certain.
        pending: The last verified token heard of; it has no KV yet.
        outputs: Output tokens verified and heard of, ``pending`` included.
        profile: How the next token follows from the logits.
        eligible: The request may be split when there is room.
        stops: Token ids that end the request.
        longest: Most drafts between two verifications.
        figures: What its drafting came to.
        penalties: Of its output tokens; None where it has none.
        cursor: Its place in its grammar; None without one.
        late: Nothing the host decides depends on its tokens but its end, so they may
            be heard one iteration late.
        drafts: Tokens drafted since the last verification, as far as they were heard.
        drafted_from: The distributions [V] they were drawn from, under rejection.
        flying: Further drafts, still on the device.
        sure: Verified tokens counted in ``verified`` and not heard yet.
        pending_max: Most tokens that may have been verified beyond ``verified``.
        round: Counts verifications launched, and drafts given up.
        parts: The two parts once the prompt was split; None before.
        planned: The runtime knows the request.
        lost: The complement is damaged; the request is to prefill again.
    """

    req: Any
    prompt: int
    verified: int
    pending: int
    outputs: list[int]
    profile: Profile
    eligible: bool
    stops: frozenset[int]
    longest: int
    figures: RequestStats
    penalties: Penalties | None = None
    cursor: GrammarCursor | None = None
    late: bool = False
    drafts: list[int] = field(default_factory=list)
    drafted_from: list[torch.Tensor] = field(default_factory=list)
    flying: int = 0
    sure: int = 0
    pending_max: int = 0
    round: int = 0
    parts: Parts | None = None
    planned: bool = False
    lost: bool = False

    @property
    def rid(self) -> str:
        """Request id."""
        rid: str = self.req.rid
        return rid

    @property
    def req_pool_idx(self) -> int:
        """Its row of the row table, and of the token board."""
        row: int = self.req.kv.req_pool_idx
        return row

    @property
    def drafted(self) -> int:
        """Drafts since the last verification, those still on the device included."""
        return len(self.drafts) + self.flying

    @property
    def emitted(self) -> int:
        """Output tokens certainly verified, those before a retraction included."""
        return len(self.outputs) + self.sure

    @property
    def split(self) -> Parts:
        """The two parts of the prompt.

        Raises:
            InvariantError: It was not split.
        """
        if self.parts is None:
            raise InvariantError(f"{self.rid} is not split")
        return self.parts

    @property
    def layout(self) -> Layout:
        """How the own row lists the prompt."""
        return self.parts.layout if self.parts else Layout.WHOLE

    @property
    def row_length(self) -> int:
        """Committed slots of the own row."""
        if self.parts is None:
            return self.verified
        if self.parts.layout is Layout.SWAPPED:
            return 0
        return self.verified - self.parts.budget.offered + self.parts.head

    @property
    def remaining(self) -> int:
        """Tokens the request may still emit if all that was not heard was emitted."""
        limit: int = self.req.sampling_params.max_new_tokens
        return max(0, limit - self.emitted - self.pending_max)

    # -- a forward is launched, and lands -----------------------------------------

    def launch_draft(self) -> None:
        """A forward that drafts one token was launched."""
        self.flying += 1

    def land_draft(self, token: int, round: int) -> bool:
        """Hear of a drafted token; say whether it would end the request.

        Args:
            token: The draft.
            round: ``self.round`` at its launch; of an earlier round it is of no use.
        """
        if round != self.round:
            return False
        self.flying -= 1
        self.drafts.append(token)
        ended = token in self.stops
        if self.cursor is not None:
            ended = not self.cursor.draft(token) or ended
        return ended

    def launch_emission(self) -> int:
        """A forward that verifies the drafts, or decodes plainly, was launched.

        Returns:
            The drafts it verifies, d; it emits one token and up to d more.
        """
        drafts = self.drafted
        self.verified += 1
        self.sure += 1
        self.pending_max += drafts
        self._next_round()
        return drafts

    def land_emission(self, tokens: list[int], drafts: int) -> None:
        """Hear of the tokens of a launched emission.

        Args:
            tokens: Accepted drafts and the correction or bonus token, >= 1.
            drafts: What ``launch_emission`` returned.
        """
        self.verified += len(tokens) - 1
        self.sure -= 1
        self.pending_max -= drafts
        self.outputs.extend(tokens)
        self.pending = tokens[-1]
        if self.penalties is not None:
            self.penalties.note(tokens)
        if self.cursor is not None:
            self.cursor.settle()

    def draft(self, token: int) -> bool:
        """Record one drafted token at once; say whether it would end the request."""
        self.launch_draft()
        return self.land_draft(token, self.round)

    def accept(self, tokens: list[int]) -> None:
        """Record verified tokens at once and start the next round.

        Args:
            tokens: Accepted drafts and the correction or bonus token, >= 1.
        """
        self.land_emission(tokens, self.launch_emission())

    def drop_drafts(self) -> None:
        """Forget what was drafted and not verified; the grammar goes back too."""
        self._next_round()
        if self.cursor is not None:
            self.cursor.settle()

    def _next_round(self) -> None:
        self.drafts = []
        self.drafted_from = []
        self.flying = 0
        self.round += 1
