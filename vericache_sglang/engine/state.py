"""What the engine remembers of a running request between iterations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vericache_sglang.scheduling.plan import Phase, RowView, Staged

if TYPE_CHECKING:
    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.memory.complement import Complement
    from vericache_sglang.memory.staging import Span
    from vericache_sglang.memory.transfers import Transfer


@dataclass(slots=True)
class TwoParts:
    """The KV of a request whose prompt is split.

    Attributes:
        budget: Kept and dropped counts; ``budget.dropped`` is m.
        complement: The dropped entries, in host memory.
        insertable: ``Req.skip_radix_cache_insert`` as it was, negated: whether the
            finished request may enter the prefix tree once its row is whole again.
        span: Staging slots held for the next verification.
        transfer: The copy into ``span``.
        loaded: The copy is complete.
    """

    budget: Budget
    complement: Complement
    insertable: bool
    span: Span | None = None
    transfer: Transfer | None = None
    loaded: bool = False

    @property
    def staged(self) -> Staged:
        """Where the complement is on its way to the device."""
        if self.span is None:
            return Staged.ABSENT
        return Staged.READY if self.loaded else Staged.LOADING


@dataclass(slots=True)
class RequestState:
    """One request from its prefill to its release.

    Lengths are in tokens. Row = the request's row of ``req_to_token``.

    Attributes:
        req: SGLang's ``Req``.
        prompt: Tokens prefilled, T; after a retraction this includes earlier output.
        verified: Tokens whose exact KV exists, F; grows by every accepted token.
        pending: The last verified token; it has no KV yet.
        emitted: Output tokens known, ``pending`` included.
        greedy: The next token is the argmax of the logits and nothing but tokens is
            asked for; other requests are decoded plainly, by SGLang's sampler.
        eligible: The request may be split when there is room (greedy, long enough).
        stops: Token ids that end the request.
        launches: Decode iterations launched since the prefill.
        drafts: Tokens drafted since the last verification.
        closed: A stop token was drafted; drafting beyond it is wasted.
        target: Drafts after which a verification is wanted.
        waited: Iterations left out of the forward in a row.
        parts: The two parts once the prompt is split; None while decoding plainly.
        broken: The complement was lost; the request only waits for its abort.
    """

    req: Any
    prompt: int
    verified: int
    pending: int
    emitted: int
    greedy: bool
    eligible: bool
    stops: frozenset[int]
    launches: int = 0
    drafts: list[int] = field(default_factory=list)
    closed: bool = False
    target: int = 0
    waited: int = 0
    parts: TwoParts | None = None
    broken: bool = False

    @property
    def row_length(self) -> int:
        """Committed slots of the row: F while plain, F - m once split."""
        if self.parts is None:
            return self.verified
        return self.verified - self.parts.budget.dropped

    @property
    def remaining(self) -> int:
        """Tokens the request may still emit; 0 once only its end is outstanding."""
        limit: int = self.req.sampling_params.max_new_tokens
        return max(0, limit - self.emitted)

    def view(self, draft_length: int, splittable: bool) -> RowView:
        """Describe the request to the planner.

        Args:
            draft_length: Most tokens drafted between verifications.
            splittable: The prompt may be split in this iteration.
        """
        drafts = len(self.drafts)
        # A verification of d drafts emits up to d + 1 tokens.
        cap = drafts if self.closed else min(draft_length, self.remaining - 1)
        return RowView(
            rid=self.req.rid,
            phase=Phase.PLAIN if self.parts is None else Phase.DRAFTING,
            drafts=drafts,
            target=self.target,
            cap=max(0, cap),
            staged=self.parts.staged if self.parts else Staged.ABSENT,
            complement=self.parts.budget.dropped if self.parts else 0,
            splittable=splittable,
            waited=self.waited,
            over=self.broken or self.remaining == 0,
        )

    def draft(self, token: int) -> None:
        """Record one drafted token."""
        self.drafts.append(token)
        self.closed = token in self.stops

    def accept(self, tokens: list[int], draft_length: int) -> None:
        """Record verified tokens and start the next round.

        Args:
            tokens: Accepted drafts and the correction or bonus token, >= 1.
            draft_length: Target of the next round.
        """
        self.verified += len(tokens)
        self.emitted += len(tokens)
        self.pending = tokens[-1]
        self.drafts = []
        self.closed = False
        self.target = draft_length
