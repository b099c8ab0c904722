"""A verifier's guests: ordinary requests in its scheduler that drafters own.

They are admitted, batched, drafted for, retracted and cached like any other request;
only their output goes to the drafter instead of a client (``remote.guests``). The row
of one whose drafter drafts waits for drafts and verifies them. It keeps its full KV on
the device meanwhile (cached), or leaves it to the prefix cache after each verdict and
is prefilled again, from there, for its next drafts: when Algorithm 1 has reserved the
link and the pool for it, or when they have come (stateless; arXiv:2605.17613, section
5.3).
"""

from __future__ import annotations

from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.sampling.sampling_params import SamplingParams

from vericache_sglang.errors import MessageError
from vericache_sglang.kv.row_edit import room
from vericache_sglang.remote.guests import Guest, Guests
from vericache_sglang.remote.messages import (
    CHANGED,
    Measured,
    WantedLogprobs,
    unpack,
)
from vericache_sglang.remote.verifiers import BEAT_S
from vericache_sglang.runtime.known_tokens import know_next, take_back
from vericache_sglang.runtime.request_logprobs import logprobs_from
from vericache_sglang.sampling.grammar import MOST_DRAFTS
from vericache_sglang.sampling.profile import SamplingRule
from vericache_sglang.scheduling.ewma import Ewma
from vericache_sglang.scheduling.iteration_model import LONGEST_S
from vericache_sglang.scheduling.network import POOL, STORE_LINK, NetworkRings
from vericache_sglang.scheduling.plan import Plain, Verify, Wait

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sglang.srt.managers.schedule_batch import Req

    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.observability.counters import Counters
    from vericache_sglang.prefix_cache.store.stored_segments import StoredSegments
    from vericache_sglang.remote.messages import Hello, Open, ToVerifier
    from vericache_sglang.remote.transport import VerifierTransport
    from vericache_sglang.runtime.forward.draft_tokens import DraftTokenBuffer
    from vericache_sglang.scheduling.estimates import Estimates
    from vericache_sglang.scheduling.plan import RowAction


RESERVED = {STORE_LINK: "remote_reserved_link", POOL: "remote_reserved_pool"}
"""What figures call the reserved part of each ring."""
LONGEST_RETURN_S = 60.0
"""Longest time to bring a guest's KV back that is believed, in seconds."""


class Hosting:
    """See ``remote_role.Role`` and ``RemoteRows``: the role of a verifier.

    Args:
        config: Frozen settings.
        hello: What drafters must be like.
        transport: Its connections.
        counters: Counts expired leases.

    Attributes:
        draft_tokens: Receives the drafts of guests; set before the first iteration, as
            the others are.
        estimates: Measured times of this server.
        stored: Its segments in the store; None without one.
    """

    draft_tokens: DraftTokenBuffer
    estimates: Estimates
    stored: StoredSegments | None

    def __init__(
        self,
        config: VeriCacheConfig,
        hello: Hello,
        transport: VerifierTransport[ToVerifier],
        counters: Counters,
    ) -> None:
        self._hello = hello
        self.transport = transport
        self._guests = Guests(
            *(hello, config.max_guests, config.lease_s, counters),
            start=self._start,
            stop=self._stop,
        )
        self._most_drafts = config.most_drafts
        self._guest_kv = config.guest_kv
        self._waiting: dict[str, Guest] = {}
        self._scheduler: Any = None
        # On the way to the waiting queue; None: stopped while its grammar is compiled.
        self._committed: dict[str, Sequence[int] | None] = {}
        self._requests: dict[str, Req] = {}
        self._stateless: dict[str, Req] = {}
        self._return_s = Ewma(0.0, least=0.0, most=LONGEST_RETURN_S)
        self._rings = NetworkRings(0)
        # Part of a guest's prompt that came from the store.
        self._stored_part = Ewma(0.0, least=0.0, most=1.0)
        self._counters = counters
        self._numbered = 0
        self._beat_at = 0.0

    @property
    def in_flight(self) -> Iterable[Req]:
        """See ``Role``: guests without KV that wait for drafts."""
        return self._stateless.values()

    def take(self, scheduler: Any, req: Req, is_retracted: bool) -> bool:
        """Note a guest on its way to the waiting queue.

        Returns:
            False: it goes there. True: it has lost its row and waits for drafts.
        """
        if is_retracted:
            return self._hold(req)
        if req.rid not in self._committed:
            return False
        committed = self._committed.pop(req.rid)
        req.vericache_guest = True
        if committed is None:
            return False
        self._requests[req.rid] = req
        if committed:
            req.output_ids.extend(committed[:-1])
            know_next(req, committed[-1])
            self._advance_grammar(req)
        return False

    def _hold(self, req: Req) -> bool:
        """Hold a guest that has lost its row until drafts come, if its drafter drafts.

        The last of its tokens will take the place of the one that its prefill samples,
        so that drafts are verified behind it.
        """
        guest = self._waiting.get(req.rid)
        if guest is None or not req.output_ids or req.rid in self._stateless:
            return False
        known = len(req.output_ids)
        take_back(req)
        if guest.drafts(known) is not None:
            return False
        self._stateless[req.rid] = req
        self._counters.remote_stateless += 1
        return True

    def _readmit(self) -> None:
        """Have guests prefilled again that have or expect drafts, or are to end."""
        for name, req in list(self._stateless.items()):
            guest, tokens = self._waiting.get(name), len(req.output_ids) + 1
            if guest and not req.to_finish and guest.drafts(tokens) is None:
                if not self._may_return(guest, req):
                    continue
                self._counters.remote_prepared += 1
            if guest:
                guest.queued_at = self.transport.now()
            self._enqueue(name)

    def _may_return(self, guest: Guest, req: Req) -> bool:
        """Return whether a guest's KV is to be brought back now for its next drafts.

        It is reserved to be here when they are expected. Without room for it, or while
        requests wait for memory, it is brought back when they have come.
        """
        rings, tokens = self._rings, len(req.output_ids) + 1
        now = self.transport.now()
        eta_s = guest.eta_s(tokens, now)
        if eta_s is None:
            rings.release(guest.name)
            return False
        starts_s = rings.starts_s(guest.name)
        if starts_s is None:
            slots = len(req.origin_input_ids) + tokens + self._most_drafts
            times_s = self._return_s.value, max(0.0, eta_s)
            starts_s, _ = rings.reserve(guest.name, *times_s, slots) or (inf, inf)
        return starts_s <= now and not self._short

    @property
    def _short(self) -> bool:
        """Whether requests wait for memory or rows."""
        scheduler = self._scheduler
        return bool(scheduler.waiting_queue and scheduler.running_batch.batch_is_full)

    def _enqueue(self, name: str) -> None:
        self._scheduler._add_request_to_queue(self._stateless[name], is_retracted=True)
        del self._stateless[name]

    @staticmethod
    def _advance_grammar(req: Req) -> None:
        if req.grammar is None:
            return
        try:
            for token in req.output_ids:
                req.grammar.accept_token(token)
        except ValueError:
            req.set_finish_with_abort("tokens that its grammar does not allow")

    def exchange(self, scheduler: Any) -> None:
        """Send and receive. Called once per scheduler iteration."""
        self._scheduler = scheduler
        self.transport.hand_over(self._guests.receive)
        now = self.transport.now()
        beats = now - self._beat_at >= BEAT_S
        queued = self._queued() if beats else None
        for guest in self._guests.running():
            self._advance(guest, queued)
        self._guests.tick(now)
        running = self._guests.running()
        self._waiting = {guest.name: guest for guest in running if guest.waits}
        self._reserve(now)
        self._readmit()
        for peer, said in self._guests.outbox:
            self.transport.send(peer, said)
        self._guests.outbox.clear()
        if beats:
            self._beat_at = now
            self.transport.repeat(self._guests.beats(self._measured()))

    def _reserve(self, now: float) -> None:
        """Advance the rings; those have a reservation that have no row yet."""
        self._rings.advance(now)
        self._rings.resize(room(self._scheduler.tree_cache))
        self._rings.retain(
            [
                name
                for name, guest in self._waiting.items()
                if guest.queued_at or name in self._stateless
            ]
        )

    def _measured(self) -> Measured:
        """Return what drafters choose paths by."""
        token_s = self.stored.token_s if self.stored is not None else inf
        load_s = self._stored_part.value * token_s if isfinite(token_s) else 0.0
        model = self.estimates.iteration.coefficients
        return Measured(
            drafters=self._guests.drafters,
            slots=self._scheduler.max_total_num_tokens,
            base_s=model.base_s,
            per_token_s=model.per_token_s,
            per_read_s=model.per_read_s,
            per_product_s=model.per_product_s,
            prompt_s=self.estimates.prompt_s.value,
            load_s=min(load_s, LONGEST_S),
        )

    def _advance(self, guest: Guest, queued: set[str] | None) -> None:
        """Report a guest's new tokens, or that it is gone.

        Args:
            queued: Ids of all requests of the scheduler; None: not looked up now.
        """
        req = self._requests.get(guest.name)
        finished = req is not None and req.finished()
        lost = queued is not None and guest.name not in queued and not finished
        if req is not None and not lost:
            lost = isinstance(req.finished_reason, FINISH_ABORT)
            if not lost:
                tokens = req.output_ids_through_stop
                if guest.logprobs is not None:
                    have = len(guest.logprobs)
                    new = logprobs_from(req, have + bool(guest.opened))
                    guest.logprobs += new[: len(tokens) - guest.opened - have]
                if tokens and not guest.sent:
                    prompt = len(req.origin_input_ids)
                    self._stored_part.observe(req.cached_tokens_storage / prompt)
                self._guests.advance(guest, tokens, finished)
        if lost:
            self._guests.lose(guest)
        if lost or finished:
            self._requests.pop(guest.name, None)

    @property
    def busy(self) -> bool:
        """See ``RemoteRows``."""
        return bool(self._waiting)

    def actions(
        self, requests: Mapping[int, RequestState], verifies: int
    ) -> dict[int, RowAction]:
        """See ``RemoteRows``: guests whose drafter drafts wait, or verify its drafts.

        Those that are drafted for here go on by themselves.
        """
        rows = {
            state.rid: i
            for i, state in requests.items()
            if state.rid in self._waiting
            and state.remaining
            and not (state.lost or state.stats.enabled or state.stats.proposals)
        }
        found: dict[int, RowAction] = {}
        left = max(1, verifies)
        for name, guest in self._waiting.items():
            if name in rows:
                at = rows[name]
                if guest.queued_at:
                    self._return_s.observe(self.transport.now() - guest.queued_at)
                    guest.queued_at = 0.0
                found[at] = self._action(guest, requests[at], may=left > 0)
                left -= isinstance(found[at], Verify)
        self._release([requests[at] for at in found])
        return found

    def _release(self, waiting: Sequence[RequestState]) -> None:
        """Have guests that are idle leave their rows, and their KV to the prefix cache.

        Args:
            waiting: The guests of the batch that wait or verify.
        """
        chosen = self._guest_kv
        if chosen == "cached" or (chosen == "auto" and not self._short):
            return
        idle = [each for each in waiting if self._is_idle(each)]
        if chosen == "auto":
            # One at a time until the requests that wait are admitted.
            idle = sorted(idle, key=lambda each: each.row_length)[-1:]
        for state in idle:
            state.leave_row()
            state.req.vericache_kept = True

    def _is_idle(self, state: RequestState) -> bool:
        """Return whether a guest has nothing to verify soon, and nothing in flight."""
        req, tokens = state.req, len(state.outputs)
        reported = len(req.output_ids) == tokens and req.to_finish is None
        busy = state.committed_in_flight or state.pending_max or state.drafts
        guest = self._waiting[state.rid]
        eta_s = guest.eta_s(tokens, self.transport.now())
        soon = eta_s is not None and eta_s <= self._return_s.value and not self._short
        return reported and not (busy or soon or guest.drafts(tokens) is not None)

    def _action(self, guest: Guest, state: RequestState, *, may: bool) -> RowAction:
        """Return the action of a guest's row.

        Args:
            may: It may verify now.
        """
        drafts = guest.drafts(len(state.outputs))
        in_flight = state.committed_in_flight or state.pending_max
        req, most = state.req, self._most_drafts
        room = req.kv.kv_allocated_len - state.row_length - 1
        if drafts is None or in_flight or room < most or not may:
            # SGLang's next allocation, as for a request that drafts here.
            req.vericache_room = 2 * (most + 1)
            return Wait(state.rid)
        most = min(most, state.remaining - 1)
        if state.cursor is not None:
            most = min(most, MOST_DRAFTS)
        if state.profile.rule is SamplingRule.REJECTION:
            most = 0  # unknown here: from which distributions drafts were drawn
        state.drafts = list(drafts[: max(0, most)])
        if not state.drafts:
            return Plain(state.rid)
        self.draft_tokens.put([state])
        return Verify(state.rid)

    def wait(self) -> None:
        """See ``RemoteRows``."""
        self.transport.wait()

    def _queued(self) -> set[str]:
        """Return the ids of all requests that the scheduler has."""
        scheduler = self._scheduler
        found = [*scheduler.waiting_queue, *scheduler.collect_inflight_reqs()]
        found += scheduler.grammar_manager.grammar_queue
        if scheduler.chunked_req is not None:
            found.append(scheduler.chunked_req)
        return {req.rid for req in found}

    def _start(self, drafter: bytes, message: Open) -> tuple[str, Sequence[int]]:
        """Give a guest to the scheduler.

        Raises:
            MessageError: It is not what a drafter of this model would send.
        """
        prompt, committed = unpack(message.prompt), unpack(message.committed)
        known = self._hello.vocabulary
        if max(max(prompt, default=known), max(committed, default=0)) >= known:
            raise MessageError("no prompt, or a token that is not in the vocabulary")
        params = self._params(message.params)
        wanted = message.wanted or WantedLogprobs(0, None)
        chosen = None if wanted.chosen is None else list(wanted.chosen)
        if max(chosen or (0,)) >= known:
            raise MessageError("log-probabilities of a token not in the vocabulary")
        # An aborted guest may still be in a batch when the next one begins, also one of
        # the same attempt. No client can guess the drafter's number.
        self._numbered += 1
        name = f"vericache-guest-{drafter.hex()}-{self._numbered}"
        self._committed[name] = committed
        self._scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=name,
                input_text=None,
                input_ids=prompt,
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=params,
                return_logprob=message.wanted is not None,
                logprob_start_len=-1,
                top_logprobs_num=min(wanted.top, known),
                token_ids_logprob=chosen,
                stream=False,
            )
        )
        return name, committed

    def _params(self, data: bytes) -> SamplingParams:
        """Decode sampling parameters, and check them as SGLang's HTTP server does.

        Raises:
            MessageError: They are malformed.
        """
        try:
            params = msgspec.msgpack.decode(data, type=SamplingParams)
            params.verify(self._hello.vocabulary)
        except (ValueError, TypeError, msgspec.MsgspecError) as error:
            raise MessageError(f"sampling parameters: {error}") from error
        usual = params.is_normalized and params.beam_width in (None, 1)
        if not usual:
            raise MessageError("sampling parameters that do not travel")
        return params

    def _stop(self, guest: Guest) -> None:
        """Abort a guest's request."""
        if guest.name in self._stateless:
            self._enqueue(guest.name)  # where SGLang's abort finds it
        if self._requests.pop(guest.name, None) is None:
            self._committed[guest.name] = None
        self._scheduler.abort_request(AbortReq(rid=guest.name))

    def change(self) -> None:
        """See ``Role``: guests end, and drafters are refused from now on."""
        self._hello = replace(self._hello, fingerprint=CHANGED)
        self._guests.change(self._hello)

    def figures(self) -> dict[str, float]:
        """See ``Role``."""
        return {
            "remote_malformed": self.transport.malformed,
            "remote_guests": len(self._guests),
            **{RESERVED[ring]: part for ring, part in self._rings.reserved.items()},
        }

    def close(self) -> None:
        """Close the socket; at exit."""
        self.transport.close()
