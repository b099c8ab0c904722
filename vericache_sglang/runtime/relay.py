"""A drafter's requests that verifiers decode: SGLang's requests, without a KV row.

The request, its stop conditions and its stream stay SGLang's own; only the tokens come
from a verifier (``remote.owner``). One that no verifier decodes any more is prefilled
here with the tokens so far, as after a retraction. One that drafts here has a row and
is in SGLang's batch (``paired``); it returns to the relay when it loses the row.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec.structs import replace
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome

from vericache_sglang.observability.request_stats import KEY, RequestStats
from vericache_sglang.remote.messages import CHANGED, pack
from vericache_sglang.remote.owner import OwnedRequest, Owner
from vericache_sglang.remote.verifiers import BEAT_S, State
from vericache_sglang.runtime.eligibility import travels
from vericache_sglang.runtime.known_tokens import take_back
from vericache_sglang.runtime.request_logprobs import add_logprobs, wanted_by
from vericache_sglang.runtime.request_options import read_options
from vericache_sglang.sampling.grammar import note_end

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableSequence, Sequence

    from sglang.srt.managers.schedule_batch import Req

    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.observability.counters import Counters
    from vericache_sglang.remote.messages import (
        Hello,
        Logprobs,
        Measured,
        ToDrafter,
    )
    from vericache_sglang.remote.transport import DrafterTransport
    from vericache_sglang.scheduling.ewma import Ewma


@dataclass(slots=True)
class PairedRequest:
    """A request that drafts here.

    Attributes:
        req: SGLang's request.
        number: Its number in the protocol.
        tokens: Output tokens that its verifier has decided; ``req.output_ids`` follows.
        asked: Tokens are to come from the verifier.
        asked_at: Since when, in seconds.
        sent: Drafts that they are to verify.
        drafts_since: When its present drafts were begun, in seconds.
        began_at: Time of the first verdict, in seconds; 0.0: none yet.
        emitted_at: Time of the last one.
        since: Tokens emitted after the first one.
        unpaid: It is better off at its verifier.
        first: Output tokens before it was paired.
        logprobs: Of the tokens behind these, if the request wants them.
    """

    req: Req
    number: int
    tokens: MutableSequence[int]
    asked: bool = False
    asked_at: float = 0.0
    sent: int = 0
    drafts_since: float = 0.0
    began_at: float = 0.0
    emitted_at: float = 0.0
    since: int = 0
    unpaid: bool = False
    first: int = 0
    logprobs: list[Logprobs] = field(default_factory=list)

    @property
    def fresh(self) -> int:
        """Tokens that SGLang has not processed yet."""
        return len(self.tokens) - len(self.req.output_ids)


class Starts(Protocol):
    """Has requests of the relay draft here (``paired``)."""

    def figures(self) -> dict[str, float]:
        """Return present figures, see ``Role``."""

    def suit(self, req: Req) -> bool:
        """Return whether a new request would draft here if its prefix is stored."""

    def here(self, scheduler: Any, req: Req) -> bool:
        """Return whether a request stays here: as its prompt is cached, or comes."""

    def read(self, scheduler: Any, req: Req) -> None:
        """Have the draft KV of a request read that is open at a verifier."""

    def ended(self, req: Req) -> None:
        """Note that a request has ended that was open at a verifier."""

    def forget(self, rid: str) -> None:
        """End the read of a request's draft KV; also of one that is not read."""

    def lose(self, rid: str) -> None:
        """Have a request go on that has no verifier, or should not draft.

        It leaves its row and returns to the relay, unless its residual KV is awaited.
        """


class Relay:
    """See ``remote_role.Role``: the role of a drafter.

    Args:
        config: Frozen settings.
        hello: Introduces this drafter.
        owner: The protocol.
        transport: Its connections.
        counters: Counts requests by path.

    Attributes:
        starts: Has requests draft here; None on the paths b1 and local.
        paired: SGLang's request id -> request that drafts here.
    """

    def __init__(
        self,
        config: VeriCacheConfig,
        hello: Hello,
        owner: Owner,
        transport: DrafterTransport[ToDrafter],
        counters: Counters,
    ) -> None:
        self._config = config
        self._hello = hello
        self._owner = owner
        self.transport = transport
        self._counters = counters
        self.starts: Starts | None = None
        self.paired: dict[str, PairedRequest] = {}
        self._requests: dict[int, Req] = {}
        self._logprobs: dict[int, list[Logprobs]] = {}
        self._numbered = 0
        self._beat_at = 0.0

    @property
    def in_flight(self) -> Iterable[Req]:
        """Requests that are in none of SGLang's queues and batches."""
        return self._requests.values()

    @property
    def count(self) -> int:
        """Requests that are relayed or draft here."""
        return len(self._requests) + len(self.paired)

    def take(self, scheduler: Any, req: Req, is_retracted: bool) -> bool:
        """Open a new request at a verifier; False: it is decoded here."""
        if is_retracted:
            return self._relay_again(req)
        starts = self.starts
        allowed = not self._config.decodes_locally and travels(req)
        if allowed and starts is not None:
            allowed = not starts.here(scheduler, req)
        drafts = allowed and starts is not None and starts.suit(req)
        if not allowed or not self._open(req, drafts):
            self._counters.remote_local += 1
            return False
        self._counters.remote_b1 += 1
        req.time_stats.set_wait_queue_entry_time()
        if drafts and starts is not None:
            starts.read(scheduler, req)
        return True

    def _open(self, req: Req, drafts: bool) -> bool:
        """Open a request; if it is to draft here, its verifier does not."""
        options = read_options(req.sampling_params.custom_params, self._config)
        here = {"enabled": False, "inner": False}
        there = {"enabled": options.enabled}
        sent = replace(
            req.sampling_params, custom_params={KEY: here if drafts else there}
        )
        # Behind a long forward verifiers would seem to be silent.
        self.transport.hand_over(self._owner.receive)
        rid, self._numbered = self._numbered, self._numbered + 1
        request = OwnedRequest(
            rid,
            pack(req.origin_input_ids),
            msgspec.msgpack.encode(sent),
            req.output_ids,
            wanted_by(req),
        )
        if not self._owner.open(request, self.now()):
            return False
        self._requests[rid] = req
        if request.wanted is not None:
            self._logprobs[rid] = request.logprobs
        req.vericache_path = "b1"
        stats = RequestStats(False, 0, options.report, path="b1")
        req.customized_info = {**(req.customized_info or {}), KEY: stats}
        return True

    # -- requests that draft here ------------------------------------------------

    def open_request(self, rid: str) -> Req | None:
        """Return a request that is relayed and goes on, by SGLang's id."""
        found = (each for each in self._requests.values() if each.rid == rid)
        return next((each for each in found if each.to_finish is None), None)

    def pair(self, req: Req) -> None:
        """Leave the output of a request to SGLang: it has a row and drafts."""
        number = next(n for n, each in self._requests.items() if each is req)
        del self._requests[number]
        self._counters.remote_p1 += 1
        pair = self.paired[req.rid] = PairedRequest(
            *(req, number, array("q", req.output_ids)),
            first=len(req.output_ids),
            logprobs=self._logprobs.pop(number, []),
        )
        self._owner.relay(number, pair.tokens, self.now())
        self.verify(pair, ())

    def unpair(self, rid: str) -> None:
        """Have a request verified here from now on; of others nothing is changed.

        Tokens of its verifier that are not emitted yet are computed again.
        """
        pair = self.paired.pop(rid, None)
        if pair is not None:
            self._owner.close(pair.number)

    def verify(self, pair: PairedRequest, drafts: Sequence[int]) -> None:
        """Send drafts at once; with none the verifier decides one token."""
        pair.asked, pair.asked_at, pair.sent = True, self.now(), len(drafts)
        if self._owner.tokens(pair.number) is not None:
            self._owner.verify(pair.number, drafts, pair.asked_at)
            self._send()

    def prepare(self, pair: PairedRequest, eta_s: float) -> None:
        """Announce drafts that are expected in ``eta_s`` seconds."""
        self._owner.prepare(pair.number, eta_s)

    @property
    def measured(self) -> list[Measured]:
        """What verifiers have told of themselves, see ``Owner``."""
        return self._owner.measured

    @property
    def token_s(self) -> list[Ewma]:
        """Seconds per token of a request that a verifier decodes, see ``Owner``."""
        return self._owner.token_s

    @property
    def first_s(self) -> list[Ewma]:
        """Seconds to the first token of a request at a verifier, see ``Owner``."""
        return self._owner.first_s

    def now(self) -> float:
        """Return the time of the connections' clock, in seconds."""
        return self.transport.now()

    def wait(self) -> None:
        """Wait for messages."""
        self.transport.wait()

    def _relay_again(self, req: Req) -> bool:
        """Relay a request again that has lost its row; False: it was not paired."""
        pair = self.paired.pop(req.rid, None)
        if pair is None:
            return False
        fresh = pair.fresh
        del pair.logprobs[: len(req.output_ids) - pair.first]
        req.output_ids.extend(pair.tokens[len(req.output_ids) :])
        self._requests[pair.number] = req
        if req.return_logprob:
            self._logprobs[pair.number] = pair.logprobs
            # SGLang may stream it before the next exchange, as it was in a batch.
            self._tell_logprobs(pair.number, req)
        if fresh:
            self._owner.committed[pair.number] = fresh
        if self._owner.tokens(pair.number) is None:
            self._owner.returned.append(pair.number)
        self._owner.relay(pair.number, req.output_ids, self.now())
        return True

    def _look_at_pairs(self) -> None:
        """Close requests that have finished; others may lose their row."""
        for rid, pair in list(self.paired.items()):
            if pair.req.finished():
                del self.paired[rid]
                self._owner.close(pair.number)
                if self.starts is not None:
                    self.starts.ended(pair.req)
                continue
            alone = self._owner.tokens(pair.number) is None
            if (alone or pair.unpaid) and self.starts is not None:
                self.starts.lose(rid)

    # ----------------------------------------------------------------------------

    def exchange(self, scheduler: Any) -> None:
        """Send and receive; commit tokens. Called once per scheduler iteration."""
        if self._requests and _nothing_runs(scheduler):
            self.transport.wait()
        self.transport.hand_over(self._owner.receive)
        now = self.now()
        self._commit(scheduler)
        self._owner.tick(now)
        for rid in self._owner.returned:
            self._logprobs.pop(rid, None)
            self._return(scheduler, self._requests.pop(rid, None))
        self._owner.returned.clear()
        self._look_at_pairs()
        self._send()
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            self.transport.repeat(dict(enumerate(self._owner.beats())))

    def _send(self) -> None:
        for peer, said in self._owner.outbox:
            self.transport.send(peer, said)
        self._owner.outbox.clear()

    def _tell_logprobs(self, rid: int, req: Req) -> None:
        """Give SGLang the log-probabilities of all tokens that have none yet."""
        if new := self._logprobs.get(rid):
            known = len(req.logprob.output_token_logprobs_val)
            add_logprobs(req, req.output_ids[known:], new)
            new.clear()

    @staticmethod
    def _look_at_tokens(scheduler: Any, req: Req, fresh: int) -> None:
        """Let SGLang look whether a request ends with its last ``fresh`` tokens."""
        if req.grammar is None or not fresh:
            req.update_finish_state(fresh)
            return
        tokens = req.output_ids[-fresh:].tolist()
        del req.output_ids[-fresh:]
        while tokens and not req.finished():
            # Up to the grammar's end; aborts the request if one is not allowed.
            processor = scheduler.batch_result_processor
            note_end(req)
            accepted = processor._accept_grammar_tokens(req, tokens)
            req.output_ids.extend(accepted)
            req.update_finish_state(len(accepted))
            del tokens[: len(accepted)]

    def _commit(self, scheduler: Any) -> None:
        """Let SGLang look at new tokens, and at requests that clients have aborted."""
        told = []
        for rid, req in list(self._requests.items()):
            fresh = self._owner.committed.get(rid, 0)
            if not fresh and req.to_finish is None:
                continue
            req.time_stats.set_last_decode_finish_time()
            self._tell_logprobs(rid, req)
            self._look_at_tokens(scheduler, req, fresh)
            if req.finished():
                self._finish(scheduler, rid)
            told.append(req)
        self._owner.committed.clear()
        for pair in self.paired.values():
            if pair.fresh > 0:
                self._owner.committed[pair.number] = pair.fresh
        if told:
            logprobs = any(req.return_logprob for req in told)
            scheduler.output_streamer.stream_output(told, logprobs)

    def _finish(self, scheduler: Any, rid: int) -> None:
        """Release a request that has finished; it has no row."""
        req = self._requests.pop(rid)
        self._logprobs.pop(rid, None)
        self._owner.close(rid)
        if self.starts is not None:
            self.starts.forget(req.rid)
            self.starts.ended(req)
        handle = req.cache_request_handle
        scheduler.tree_cache.finish(handle, CacheRequestOutcome.SUCCESS)
        req.time_stats.set_completion_time()

    def _return(self, scheduler: Any, req: Req | None) -> None:
        """Decode a request here, from its present tokens on."""
        if req is None:
            return
        self._counters.remote_returns += 1
        if self.starts is not None:
            self.starts.forget(req.rid)
        req.vericache_path = "local"
        if req.output_ids:
            take_back(req)
        # As a retracted one: it is not offered to verifiers again.
        scheduler._add_request_to_queue(req, is_retracted=True)

    def change(self) -> None:
        """See ``Role``: requests at verifiers return, and later ones stay here."""
        self._hello = replace(self._hello, fingerprint=CHANGED)
        self._owner.change(self._hello)

    def figures(self) -> dict[str, float]:
        """See ``Role``."""
        serving = sum(each.state is State.SERVING for each in self._owner.verifiers)
        return {
            "remote_malformed": self.transport.malformed,
            "remote_verifiers": serving,
            **(self.starts.figures() if self.starts is not None else {}),
        }

    def close(self) -> None:
        """Close the connections; at exit."""
        self.transport.close()


def _nothing_runs(scheduler: Any) -> bool:
    """Return whether the scheduler has no request of its own."""
    return bool(
        scheduler.running_batch.is_empty()
        and not scheduler.waiting_queue
        and scheduler.last_batch is None
    )
