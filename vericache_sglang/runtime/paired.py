"""A drafter's requests that draft here and are verified at a verifier.

A request is opened at a verifier, which computes its first tokens, while the draft KV
of its stored prefix is read. Once it is here the request is paired: it begins as an
early start does, with the tokens that are known. From then on its verifier computes the
tokens behind its drafts and no others. One draft more than is sent is run, so that
every token before the next one has draft KV in whatever way the verifier decides. An
inner drafter proposes in these rows as in others.

On path P1 the residual KV is never read. On P2 it follows; when all of it is here the
request leaves its verifier and goes on as an early start does. With ``auto`` a request
takes the path on which it is predicted to end first, or beside others an alike one, so
that the paths have the shares of the linear program (``PathMix``); one that drafts
returns to its verifier where that was slower.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.prefix_cache.store.manifest import Recent
from vericache_sglang.prefix_cache.store.stored_segments import MOST_FETCHES
from vericache_sglang.runtime.early_starts import EarlyStarts, longest_suffix
from vericache_sglang.runtime.eligibility import travels
from vericache_sglang.scheduling.ewma import Ewma
from vericache_sglang.scheduling.iteration_model import Coefficients
from vericache_sglang.scheduling.path_mix import PathMix, Speeds
from vericache_sglang.scheduling.path_paces import PathPaces
from vericache_sglang.scheduling.paths import Path
from vericache_sglang.scheduling.plan import Deliver, Wait

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sglang.srt.managers.schedule_batch import Req

    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.prefix_cache.store.found import Found
    from vericache_sglang.prefix_cache.store.stored_segments import StoredSegments
    from vericache_sglang.runtime.forward.draft_tokens import DraftTokenBuffer
    from vericache_sglang.runtime.placement import KVPlacement
    from vericache_sglang.runtime.relay import PairedRequest, Relay
    from vericache_sglang.scheduling.plan import RowAction
    from vericache_sglang.scheduling.runtime import Runtime

SHARES = {
    Path.B1: "remote_share_b1",
    Path.P1_CACHED: "remote_share_p1",
    Path.B2: "remote_share_local",
}
"""Path -> its share in the linear program, as a figure; P1 with P2."""

LONGEST_S = 60.0
"""Longest time between drafts and their verdict that is believed, in seconds."""


class PairedStarts(EarlyStarts):
    """See ``EarlyStarts``, ``Starts``, ``RemoteRows``; ``attach`` is called first."""

    def attach(
        self, relay: Relay, runtime: Runtime, states: Mapping[str, RequestState]
    ) -> None:
        """Set what requests are taken from, and what plans them.

        Args:
            relay: Has the requests at verifiers.
            runtime: Schedules those that draft here.
            states: rid -> running request.
        """
        self._relay, self._runtime, self._states = relay, runtime, states
        self._round_s = Ewma(0.0, least=0.0, most=LONGEST_S)
        self._drafting_s = Ewma(0.0, least=0.0, most=LONGEST_S)
        prior, keep = runtime.estimates.prior.p, self._config.keep
        self._mix = PathMix(self._config.draft_length, prior, keep)
        # Of those that are not read whole: the paths that were chosen.
        self._chosen: Recent[Path] = Recent(MOST_FETCHES)
        # Of a request that is alone, and of one beside others.
        self._paces = [
            PathPaces(relay.token_s[others], relay.first_s[others], others=others)
            for others in (False, True)
        ]
        # Those read whole: the paces that were seen, when they came, and how long the
        # read was predicted to take.
        self._whole: Recent[tuple[PathPaces, float, float]] = Recent(MOST_FETCHES)
        # Draft KV of those that have no use for the residual KV, so far.
        self._unread: dict[str, Sequence[Found]] = {}
        self._delivers = False
        relay.starts = self

    @property
    def _completes(self) -> bool:
        """Whether residual KV may be read too."""
        return self._config.remote_path != "p1"

    @property
    def _chooses(self) -> bool:
        """Whether paths are chosen by what they cost."""
        return self._config.remote_path == "auto"

    def figures(self) -> dict[str, float]:
        """See ``Starts``."""
        if not self._chooses:
            return {}
        return {name: self._mix.shares.get(path, 0.0) for path, name in SHARES.items()}

    def _seen(self, own: int) -> PathPaces:
        """Return the paces as they are beside what is there but ``own`` requests."""
        return self._paces[self._relay.count > own]

    # -- before a request is paired ------------------------------------------------

    def expect(self, req: Req) -> None:
        """See ``EarlyStarts``: requests of this server alone are read whole."""

    def suit(self, req: Req) -> bool:
        """See ``Starts``."""
        active = self._segments.stored is not None and bool(self._segments.kept)
        fits = active and travels(req)
        fits = fits and self._drafts(req, len(req.origin_input_ids))
        return fits and self._chosen.get(req.rid) is not Path.B1

    def here(self, scheduler: Any, req: Req) -> bool:
        """See ``Starts``: P2 and B2 bring whole prefixes here."""
        if not self._completes:
            return False
        req.init_next_round_input(scheduler.tree_cache, cow_mamba=False)
        tokens = len(req.origin_input_ids)
        missing: int = tokens - len(req.prefix_indices) - req.host_hit_length
        return missing <= longest_suffix(tokens) or self._reads_whole(
            scheduler, req, missing
        )

    def _reads_whole(self, scheduler: Any, req: Req, missing: int) -> bool:
        """Choose a path; return whether ``missing`` tokens of full KV are read (B2)."""
        stored = self._segments.stored
        if stored is None or not self._chooses:
            return False
        paces, now = self._seen(0), self._relay.now()
        load_s = stored.whole_s(missing // SEGMENT)
        draft_s = inf
        if self.suit(req):
            segments = len(req.origin_input_ids) // SEGMENT
            draft_s = stored.draft_s(max(1, segments), self._mix.compressed)
            draft_s = draft_s if isfinite(draft_s) else 0.0  # not measured
        tokens = self._mix.answer(req.sampling_params.max_new_tokens)
        ends = paces.ends_s(tokens, draft_s, load_s, stored.whole_s(0))
        if self._mix.due():
            self._review(scheduler, stored)
        path = paces.choose(self._mix.choice, ends, load_s, self._mix.load(now))
        if path is not Path.B2:
            self._chosen[req.rid] = path
            return False
        stored.await_whole(req.rid, load_s)
        self._whole[req.rid] = paces, now, load_s
        return True

    def _review(self, scheduler: Any, stored: StoredSegments) -> None:
        """Solve the program of the paths' shares again."""
        estimates = self._runtime.estimates
        near = [
            Speeds(
                instances=1 / max(1, each.drafters),
                slots=each.slots,
                iteration=Coefficients(
                    *(each.base_s, each.per_token_s),
                    *(each.per_read_s, each.per_product_s),
                ),
                prompt_s=each.prompt_s,
                load_s=each.load_s,
            )
            for each in self._relay.measured
        ]
        far = Speeds(
            instances=1,
            slots=scheduler.max_total_num_tokens,
            iteration=estimates.iteration.coefficients,
            prompt_s=estimates.prompt_s.value,
            load_s=stored.token_s,
        )
        self._mix.review(near, far)

    def read(self, scheduler: Any, req: Req) -> None:
        """See ``Starts``."""
        stored = self._segments.stored
        if stored is None:
            return
        stored.draft_first = req.rid
        # From the first token on: also where a part of it is cached here.
        handle, tokens = req.cache_request_handle, req.origin_input_ids
        scheduler.tree_cache.prefetch_from_storage(handle, None, tokens)

    def ended(self, req: Req) -> None:
        """See ``Starts``."""
        prompt, output = len(req.origin_input_ids), len(req.output_ids)
        self._mix.note_request(prompt, output, self._relay.now())

    def forget(self, rid: str) -> None:
        """See ``Starts``, and ``EarlyStarts``."""
        state = self._states.get(rid)
        if state is not None and rid in self._whole:
            paces, came, load_s = self._whole.pop(rid)
            seconds = self._relay.now() - came
            paces.observe_whole(seconds, load_s, len(state.outputs))
            self.ended(state.req)
        self._chosen.pop(rid, None)
        self._unread.pop(rid, None)
        self._rests.pop(rid, None)
        if self._segments.stored is not None:
            self._segments.stored.pop(rid)

    def _find(self, scheduler: Any, rid: str) -> Req | None:
        return self._relay.open_request(rid)

    def _comes_whole(self, names: Sequence[str]) -> bool:
        return False  # it is open at a verifier, whatever is here

    def _decline(self, rid: str) -> None:
        self.forget(rid)

    def _fits(self, req: Req, budget: Budget) -> bool:
        left: int = req.sampling_params.max_new_tokens - len(req.output_ids)
        return left > 1

    def _begun(
        self, scheduler: Any, state: RequestState, found: Sequence[Found]
    ) -> None:
        if not self._reads_rest(state, found):
            self.forget(state.rid)
            if self._completes:
                self._unread[state.rid] = [
                    each if each.manifest.coded else replace(each, parts={})
                    for each in found
                ]
        state.stats.path = "p1"
        nbytes = sum(each.manifest.objects["draft"].nbytes for each in found)
        whole = len(found) * SEGMENT * self._placement.geometry.token_bytes
        self._mix.note_drafting(len(state.req.output_ids), nbytes / whole)
        self._relay.pair(state.req)

    def _reads_rest(self, state: RequestState, found: Sequence[Found]) -> bool:
        """Read the residual KV of a request that drafts, if it comes in time.

        Args:
            found: Its draft KV.
        """
        stored = self._segments.stored
        if not self._completes or stored is None:
            return False
        if self._chooses and not self._seen(1).completes(
            stored.rest_s(found), state.remaining
        ):
            return False
        if not super()._fits(state.req, state.split.budget):
            return False
        self._read_rest(state, found)
        return True

    def progress(
        self, states: Mapping[str, RequestState]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See ``EarlyStarts``; one whose residual KV is lost stays on P1."""
        complete, lost = super().progress(states)
        paired = self._relay.paired
        for rid in lost:
            if rid in paired:
                self.forget(rid)
        return complete, tuple(rid for rid in lost if rid not in paired)

    def completed(self, state: RequestState) -> None:
        """See ``EarlyStarts``: from now on it is verified here."""
        super().completed(state)
        self._relay.unpair(state.rid)
        self._runtime.return_drafts(state.rid, state.drafted)
        self._placement.counters.remote_p2 += 1
        state.stats.path = "p2"

    def lose(self, rid: str) -> None:
        """See ``Starts``."""
        state = self._states.get(rid)
        if rid in self._rests:
            self._relay.unpair(rid)
        elif state is not None and not state.lost:
            state.leave_row()
            self._runtime.leave(rid)

    @property
    def busy(self) -> bool:
        """See ``RemoteRows``."""
        return bool(self._relay.paired)

    # -- afterwards ----------------------------------------------------------------

    def actions(
        self, requests: Mapping[int, RequestState], verifies: int
    ) -> dict[int, RowAction]:
        """See ``RemoteRows``: rows that emit what a verifier has decided."""
        found: dict[int, RowAction] = {}
        paired = self._relay.paired
        for i, state in requests.items() if paired else ():
            pair = paired.get(state.rid)
            if pair is None or state.lost or not (state.planned and state.remaining):
                continue
            fresh = pair.tokens[len(state.outputs) :]
            if not fresh:
                self._ask(pair, state)
            elif state.drafted_max > len(state.drafts):  # a draft is in flight
                found[i] = Wait(state.rid)
            else:
                found[i] = self._deliver(pair, state, fresh)
        self._delivers = any(isinstance(each, Deliver) for each in found.values())
        return found

    def wait(self) -> None:
        """See ``RemoteRows``."""
        if not self._delivers:
            self._relay.wait()

    def _ask(self, pair: PairedRequest, state: RequestState) -> None:
        """Send the drafts of a row that has enough of them."""
        track = self._runtime.tracks.get(state.rid)
        if pair.asked or track is None:
            return
        made = len(state.drafts)
        if track.closed:
            count, enough = made, state.drafted_max == made  # none is in flight
        else:
            count, enough = max(track.most, made) - 1, made >= track.most - 1
        if enough:
            count = min(count, self._config.draft_length)
            self._drafting_s.observe(self._relay.now() - pair.drafts_since)
            self._relay.verify(pair, state.drafts[:count])

    def _deliver(
        self, pair: PairedRequest, state: RequestState, fresh: Sequence[int]
    ) -> RowAction:
        """Emit a verifier's tokens, as many as one row may emit."""
        tokens, drafts = fresh[: self._draft_tokens.most], state.drafts
        if state.cursor is not None:
            state.cursor.settle()
            tokens = tokens[: state.cursor.until_end(tokens)]
        pairs = zip(drafts, tokens, strict=False)
        agreed = next(
            (i for i, (one, other) in enumerate(pairs) if one != other),
            min(len(drafts), len(tokens)),
        )
        at = len(state.outputs) - pair.first
        # The last token and all drafts but the last one have KV.
        known = min(len(tokens), agreed + 1, len(drafts))
        state.behind += len(tokens) - known
        state.inexact += len(tokens)
        state.accept(list(tokens))
        self._draft_tokens.put([state])
        sent = pair.sent
        accepted = min(agreed, sent, len(tokens) - 1)
        if sent:
            self._placement.counters.note_cycle(sent, accepted)
            state.stats.note_cycle(sent, accepted)
            # One more than was sent is drafted.
            self._mix.note_cycle(sent + 1, accepted + 1)
        seconds = self._relay.now() - pair.asked_at if pair.asked else 0.0
        self._observe(pair, len(tokens), seconds)
        self._runtime.record_verdict(
            state.rid, len(tokens), sent, accepted, self._round_s.value
        )
        pair.sent = 0
        if len(tokens) == len(fresh):
            # Tokens that were not asked for: the verifier has to be told to wait.
            pair.asked = not pair.asked
            if pair.asked:
                self._relay.verify(pair, ())
            else:
                pair.drafts_since = self._relay.now()
                self._relay.prepare(pair, self._drafting_s.value)
        unread = self._unread.get(state.rid)
        if unread is not None and self._reads_rest(state, unread):
            del self._unread[state.rid]
        told = tuple(pair.logprobs[at : at + len(tokens)])
        return Deliver(state.rid, tuple(tokens), sent, seconds, told)

    def _observe(self, pair: PairedRequest, tokens: int, seconds: float) -> None:
        """Measure the pace of a request to which a verdict gives ``tokens``.

        Args:
            seconds: Since it was asked for; 0.0: it was not.
        """
        now = self._relay.now()
        if seconds:
            self._round_s.observe(seconds)
        if pair.began_at:
            pair.since += tokens
            paces = self._seen(1)
            paces.observe(now - pair.emitted_at, tokens)
            pace = (now - pair.began_at, pair.since)
            unpaid = paces.returns(*pace, self._mix.load(now))
            pair.unpaid = unpaid and self._chooses and pair.req.rid not in self._rests
        else:
            pair.began_at = now
        pair.emitted_at = now


def open_starts(
    config: VeriCacheConfig,
    placement: KVPlacement,
    draft_tokens: DraftTokenBuffer,
    drafts: Callable[[Req, int], bool],
    arrive: Callable[[Req, int], RequestState],
) -> EarlyStarts | None:
    """Return what starts requests on stored draft KV; None if that is off.

    Args:
        config: Frozen settings; for the others see ``EarlyStarts``.
    """
    kind: type[EarlyStarts]
    if config.drafts_for_verifiers:
        kind = PairedStarts
    elif config.draft_first == "on":
        kind = EarlyStarts
    else:
        return None
    return kind(config, placement, draft_tokens, drafts, arrive)
