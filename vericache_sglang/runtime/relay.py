"""A drafter's requests that verifiers decode: SGLang's requests, without a KV row.

The request, its stop conditions and its stream stay SGLang's own; only the tokens come
from a verifier (``remote.owner``). One that no verifier decodes any more is prefilled
here with the tokens so far, as after a retraction.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome

from vericache_sglang.errors import MessageError
from vericache_sglang.observability.request_stats import KEY, RequestStats
from vericache_sglang.remote.messages import CHANGED, pack
from vericache_sglang.remote.owner import OwnedRequest, Owner
from vericache_sglang.remote.verifiers import BEAT_S, State
from vericache_sglang.runtime.eligibility import travels
from vericache_sglang.runtime.known_tokens import know_next
from vericache_sglang.runtime.request_options import read_options

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang.srt.managers.schedule_batch import Req

    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.observability.counters import Counters
    from vericache_sglang.remote.messages import Hello, ToDrafter
    from vericache_sglang.remote.transport import DrafterTransport

IDLE_WAIT_S = 0.002
"""Wait for messages while nothing runs here, in seconds; new requests wait too."""


class Relay:
    """See ``remote_role.Role``: the role of a drafter.

    Args:
        config: Frozen settings.
        hello: Introduces this drafter.
        owner: The protocol.
        transport: Its connections.
        counters: Counts requests by path.
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
        self._transport = transport
        self._counters = counters
        self._requests: dict[int, Req] = {}
        self._numbered = 0
        self._beat_at = 0.0
        self.ready = transport.ready

    @property
    def in_flight(self) -> Iterable[Req]:
        """Requests that are in none of SGLang's queues and batches."""
        return self._requests.values()

    def take(self, scheduler: Any, req: Req) -> bool:
        """Open a new request at a verifier; False: it is decoded here."""
        allowed = self._config.remote_path == "b1" and travels(req)
        if not allowed or not self._open(req):
            self._counters.remote_local += 1
            return False
        self._counters.remote_b1 += 1
        req.time_stats.set_wait_queue_entry_time()
        return True

    def _open(self, req: Req) -> bool:
        options = read_options(req.sampling_params.custom_params, self._config)
        sent = replace(
            req.sampling_params,
            custom_params={KEY: {"enabled": options.enabled}},
        )
        rid, self._numbered = self._numbered, self._numbered + 1
        request = OwnedRequest(
            rid,
            pack(req.origin_input_ids),
            msgspec.msgpack.encode(sent),
            req.output_ids,
        )
        if not self._owner.open(request, time.monotonic()):
            return False
        self._requests[rid] = req
        req.vericache_path = "b1"
        stats = RequestStats(False, 0, options.report, path="b1")
        req.customized_info = {**(req.customized_info or {}), KEY: stats}
        return True

    def exchange(self, scheduler: Any) -> None:
        """Send and receive; commit tokens. Called once per scheduler iteration."""
        if self._requests and _nothing_runs(scheduler):
            self._transport.wait(IDLE_WAIT_S)
        for verifier, message, at in self._transport.drain():
            try:
                self._owner.receive(verifier, message, at)
            except MessageError as error:
                self._transport.blame(verifier, error)
        now = time.monotonic()
        self._commit(scheduler)
        self._owner.tick(now)
        for rid in self._owner.returned:
            self._return(scheduler, self._requests.pop(rid, None))
        self._owner.returned.clear()
        for peer, said in self._owner.outbox:
            self._transport.send(peer, said)
        self._owner.outbox.clear()
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            self._transport.repeat(dict(enumerate(self._owner.beats())))

    def _commit(self, scheduler: Any) -> None:
        """Let SGLang look at new tokens, and at requests that clients have aborted."""
        told = []
        for rid, req in list(self._requests.items()):
            fresh = self._owner.committed.get(rid, 0)
            if not fresh and req.to_finish is None:
                continue
            req.time_stats.set_last_decode_finish_time()
            if req.grammar is not None and fresh:
                # Aborts the request if a token is not allowed.
                scheduler.batch_result_processor._accept_grammar_tokens(
                    req, req.output_ids[-fresh:].tolist()
                )
            req.update_finish_state(fresh)
            if req.finished():
                self._finish(scheduler, rid)
            told.append(req)
        self._owner.committed.clear()
        if told:
            logprobs = any(req.return_logprob for req in told)
            scheduler.output_streamer.stream_output(told, logprobs)

    def _finish(self, scheduler: Any, rid: int) -> None:
        """Release a request that has finished; it has no row."""
        req = self._requests.pop(rid)
        self._owner.close(rid)
        handle = req.cache_request_handle
        scheduler.tree_cache.finish(handle, CacheRequestOutcome.SUCCESS)
        req.time_stats.set_completion_time()

    def _return(self, scheduler: Any, req: Req | None) -> None:
        """Decode a request here, from its present tokens on."""
        if req is None:
            return
        self._counters.remote_returns += 1
        req.vericache_path = "local"
        if req.output_ids:
            if req.grammar is not None:
                req.grammar.rollback(1)
            know_next(req, req.output_ids.pop())
        # As a retracted one: it is not offered to verifiers again.
        scheduler._add_request_to_queue(req, is_retracted=True)

    def change(self) -> None:
        """See ``Role``: requests at verifiers return, and later ones stay here."""
        self._hello = replace(self._hello, fingerprint=CHANGED)
        self._owner.change(self._hello)

    def figures(self) -> dict[str, int]:
        """Return present figures, for the worker's report."""
        serving = sum(each.state is State.SERVING for each in self._owner.verifiers)
        return {
            "remote_malformed": self._transport.malformed,
            "remote_verifiers": serving,
            "remote_guests": 0,
        }

    def close(self) -> None:
        """Close the connections; at exit."""
        self._transport.close()


def _nothing_runs(scheduler: Any) -> bool:
    """Return whether the scheduler has no request of its own."""
    return bool(
        scheduler.running_batch.is_empty()
        and not scheduler.waiting_queue
        and scheduler.last_batch is None
    )
