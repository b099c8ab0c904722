"""Engine-side state of a running request between iterations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import InvariantError
from vericache_sglang.scheduling.plan import Residency

if TYPE_CHECKING:
    import torch

    from vericache_kernels.packed_attention import Segment
    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.observability.request_stats import RequestStats
    from vericache_sglang.sampling.grammar import GrammarCursor
    from vericache_sglang.sampling.penalties import Penalties
    from vericache_sglang.sampling.profile import Profile


@dataclass(slots=True)
class Parts:
    """Draft KV and residual KV of a compressed prompt.

    B prompt tokens in whole pages are compressed; a last partial page counts as decoded
    tokens. The draft KV is c slots of codes, none without a codec, and n slots of exact
    entries; the residual KV restores the other B - n entries. The request's block-table
    row lists, before its decode slots, the full KV in order and behind it the draft KV
    the request owns (DEVICE), the draft KV (HOST, STORE), or nothing (SWAPPED).

    Attributes:
        budget: Counts of tokens and slots.
        kept: [L, H, n] int32 on the pool's device, prompt positions kept exactly.
        coded: [L, H, coded] int32, likewise, prompt positions a codec packed.
        residency: Where the residual KV is; None: there is none, because the request
            fell back to full KV, which its row lists in order.
        insertable: ``Req.skip_radix_cache_insert`` as it was, negated: whether the
            finished request may enter the prefix tree once its row is restored.
        draft_row: Index of the draft block-table row, which lists the draft KV and the
            decode slots, where the request's own row lists more; -1 for none.
        listed: Decode slots listed in the draft block-table row.
        noted: Per layer [H, B], scores of the prompt's tokens; empty without any.
        segments: Names of the prompt's segments, where other prompts share its KV.
        shared_slots: [n] int64, slots of shared draft KV, which the request does not
            own; None where it owns its draft KV.
        decoded: See ``Codes.decoded``.
    """

    budget: Budget
    kept: torch.Tensor
    coded: torch.Tensor
    residency: Residency | None
    insertable: bool
    draft_row: int = -1
    listed: int = 0
    noted: list[torch.Tensor] = field(default_factory=list)
    segments: tuple[str, ...] = ()
    shared_slots: torch.Tensor | None = None
    decoded: dict[int, list[Segment]] = field(default_factory=dict)

    @property
    def shared_count(self) -> int:
        """Leading slots of the own row that the request does not own."""
        shared = self.lists_draft and self.shared_slots is not None
        return self.budget.slots if shared else 0

    @property
    def lists_draft(self) -> bool:
        """Whether the own row lists the draft KV, and nothing else of the prompt."""
        return self.residency in (Residency.HOST, Residency.STORE)

    @property
    def head(self) -> int:
        """Slots the own row lists before the decode slots."""
        budget = self.budget
        if self.residency is Residency.DEVICE:
            return budget.offered + (budget.slots if self.shared_slots is None else 0)
        if self.residency is None:
            return budget.offered
        return budget.slots if self.lists_draft else 0


@dataclass(slots=True)
class RequestState:
    """One request from its prefill to its release.

    Lengths are in tokens. Row = the request's block-table row.

    A forward is launched before the results of the last one are reported
    (``in_flight.py``): tokens it certainly emits are counted at its launch, the others
    when its results are reported.

    Attributes:
        req: SGLang's ``Req``.
        prompt: Tokens prefilled, T; after a retraction this includes earlier output.
        verified: F, committed tokens whose exact KV exists.
        outputs: Output tokens verified and reported; the last one has no KV yet.
        profile: How the next token is sampled from the logits.
        stops: Token ids that end the request.
        stats: Its speculation statistics, and whether and how far it may draft.
        penalties: Of its output tokens; None where it has none.
        cursor: Its state in its grammar; None without a grammar.
        asynchronous: Results may be processed one iteration later: only the end of the
            request depends on them.
        drafts: Tokens drafted since the last verification, as far as reported; a new
            list in every draft-verify cycle.
        drafted_from: The distributions [V] they were sampled from, under rejection
            sampling.
        drafts_in_flight: Further draft tokens certainly in flight, not reported yet.
        proposals_in_flight: Upper bound of the draft tokens beyond ``drafted``.
        committed_in_flight: Committed tokens counted in ``verified``, not yet reported.
        pending_max: Upper bound of the tokens verified beyond ``verified``.
        parts: Draft KV and residual KV once the prompt is compressed; None before.
        planned: The scheduler has the request.
        lost: See ``leave_row``; its results are discarded from then on.
        behind: The last tokens before ``verified`` without draft KV, which the next
            draft computes: a verifier has decided them.
        inexact: The last tokens before ``verified`` whose KV was computed over the
            draft KV; none was emitted but by another server. 0 from the first
            verification on.
    """

    req: Any
    prompt: int
    verified: int
    outputs: list[int]
    profile: Profile
    stops: frozenset[int]
    stats: RequestStats
    penalties: Penalties | None = None
    cursor: GrammarCursor | None = None
    asynchronous: bool = False
    drafts: list[int] = field(default_factory=list)
    drafted_from: list[torch.Tensor] = field(default_factory=list)
    drafts_in_flight: int = 0
    proposals_in_flight: int = 0
    committed_in_flight: int = 0
    pending_max: int = 0
    parts: Parts | None = None
    planned: bool = False
    lost: bool = False
    inexact: int = 0
    behind: int = 0

    @property
    def rid(self) -> str:
        """Request id."""
        rid: str = self.req.rid
        return rid

    @property
    def req_pool_idx(self) -> int:
        """Its row in the block table and in the draft token buffer."""
        row: int = self.req.kv.req_pool_idx
        return row

    @property
    def pending(self) -> int:
        """The last verified token reported, or of the prompt; it has no KV yet."""
        return self.outputs[-1] if self.outputs else self.req.origin_input_ids[-1]

    @property
    def drafted(self) -> int:
        """Draft tokens since the last verification, those in flight included.

        With proposals in flight it is a lower bound.
        """
        return len(self.drafts) + self.drafts_in_flight

    @property
    def drafted_max(self) -> int:
        """Upper bound of the draft tokens since the last verification."""
        return self.drafted + self.proposals_in_flight

    @property
    def emitted(self) -> int:
        """Committed output tokens, those before a retraction included."""
        return len(self.outputs) + self.committed_in_flight

    def text(self, first: int, end: int) -> list[int]:
        """Return the tokens of prompt and output from one position to another."""
        prompt, known = self.req.origin_input_ids, len(self.req.origin_input_ids)
        later = self.outputs[max(0, first - known) : max(0, end - known)]
        return [*prompt[first:end], *later]

    @property
    def shares_output(self) -> bool:
        """Whether inner drafters may use its output for other requests, and theirs."""
        return self.stats.proposals > 0 and self.req.extra_key is None

    @property
    def split(self) -> Parts:
        """Draft KV and residual KV of the prompt.

        Raises:
            InvariantError: It was not compressed.
        """
        if self.parts is None:
            raise InvariantError(f"{self.rid} is not split")
        return self.parts

    @property
    def residency(self) -> Residency | None:
        """Where its residual KV is; None: its row lists the full KV alone."""
        return self.parts.residency if self.parts else None

    @property
    def row_length(self) -> int:
        """Committed slots of the own row."""
        if self.parts is None:
            return self.verified
        if self.parts.residency is Residency.SWAPPED:
            return 0
        return self.verified - self.parts.budget.offered + self.parts.head

    @property
    def swappable_slots(self) -> int:
        """Slots of its draft KV and decoded tokens: on the device, or swapped out."""
        budget = self.split.budget
        decoded = self.verified - budget.offered + self.pending_max + self.drafted
        return budget.slots + decoded

    @property
    def remaining(self) -> int:
        """Tokens the request may still emit if all unreported tokens were accepted."""
        limit: int = self.req.sampling_params.max_new_tokens
        return max(0, limit - self.emitted - self.pending_max)

    # -- launches and results of forwards ------------------------------------------

    def launch_draft(self, queries: int = 1) -> None:
        """Record the launch of a forward that drafts 1 to ``queries`` tokens."""
        self.drafts_in_flight += 1
        self.proposals_in_flight += queries - 1

    def record_draft(
        self, tokens: list[int], drafts: list[int], queries: int = 1
    ) -> bool:
        """Record reported draft tokens; return whether one would end the request.

        Args:
            tokens: 1 to ``queries`` tokens.
            drafts: ``self.drafts`` at the launch, which the tokens extend.
            queries: As at the launch.
        """
        drafts += tokens
        if drafts is not self.drafts:
            return False
        self.drafts_in_flight -= 1
        self.proposals_in_flight -= queries - 1
        ended = not self.stops.isdisjoint(tokens)
        if self.cursor is not None:
            ended = not all(map(self.cursor.draft, tokens)) or ended
        return ended

    def launch_emission(self, queries: int) -> None:
        """Record the launch of a row that emits 1 to ``queries`` tokens."""
        self.verified += 1
        self.committed_in_flight += 1
        self.pending_max += queries - 1
        self._next_round()

    def record_emission(self, tokens: list[int], queries: int) -> None:
        """Record the reported tokens of a launched emission.

        Args:
            tokens: Accepted drafts and the correction or bonus token, >= 1.
            queries: As at the launch.
        """
        self.verified += len(tokens) - 1
        self.committed_in_flight -= 1
        self.pending_max -= queries - 1
        self.outputs.extend(tokens)
        if self.penalties is not None:
            self.penalties.note(tokens)
        if self.cursor is not None:
            self.cursor.settle()

    def draft(self, token: int) -> bool:
        """Record a draft token at once; return whether it would end the request."""
        self.launch_draft()
        return self.record_draft([token], self.drafts)

    def accept(self, tokens: list[int]) -> None:
        """Record verified tokens at once and start the next draft-verify cycle.

        Args:
            tokens: Accepted drafts and the correction or bonus token, >= 1.
        """
        queries = self.drafted + 1
        self.launch_emission(queries)
        self.record_emission(tokens, queries)

    def drop_drafts(self) -> None:
        """Discard unverified drafts, and roll the grammar back."""
        self._next_round()
        if self.cursor is not None:
            self.cursor.settle()

    def leave_row(self) -> None:
        """Have SGLang take the request from the batch, as if it were retracted.

        The hook on the scheduler reads the mark
        (patches: managers_scheduler_retraction).
        """
        self.lost = self.req.vericache_lost = True

    def _next_round(self) -> None:
        self.drafts = []
        self.drafted_from = []
        self.drafts_in_flight = self.proposals_in_flight = 0
