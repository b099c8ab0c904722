"""Creates the state of a request when its prefill is launched, or its KV arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vericache_sglang.kv.request import RequestState
from vericache_sglang.observability.request_stats import KEY, RequestStats
from vericache_sglang.prefix_cache.tiered_cache import ends_early
from vericache_sglang.runtime.eligibility import draftable, end_tokens, stop_tokens
from vericache_sglang.runtime.request_options import RequestOptions, read_options
from vericache_sglang.sampling.grammar import MOST_DRAFTS, GrammarCursor
from vericache_sglang.sampling.penalties import Penalties
from vericache_sglang.sampling.profile import (
    SamplingRule,
    looks_at_tokens,
    penalised,
    profile_of,
)

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from vericache_sglang.config.schema import VeriCacheConfig


class RequestStateFactory:
    """Creates request states as prefills are launched.

    Args:
        config: Frozen settings.
        vocab_size: Width of the logits.
        device: Where the logits are.
        overlap: SGLang runs its overlap schedule.
        deterministic: SGLang runs with ``--enable-deterministic-inference``.
    """

    def __init__(
        self,
        config: VeriCacheConfig,
        vocab_size: int,
        device: Any,
        *,
        overlap: bool,
        deterministic: bool,
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._device = device
        self._overlap = overlap
        self._deterministic = deterministic

    def state_of(
        self, req: Req, length: int, fits: bool, unreported: int
    ) -> RequestState:
        """Return the state of a request.

        Args:
            req: SGLang's request; its ``customized_info`` receives the statistics.
            length: Tokens prefilled.
            fits: The prompt is long enough to be compressed.
            unreported: 1 if the prefill was launched, and the host does not know its
                token yet; 0 if it ran elsewhere, and its token is the last output.
        """
        options = read_options(req.sampling_params.custom_params, self._config)
        profile = profile_of(
            req,
            deterministic=self._deterministic,
            rejection=self._config.acceptance == "rejection",
        )
        coupled = profile.rule is not SamplingRule.REJECTION
        enabled = fits and self.drafts(req, options)
        inner = options.inner and draftable(req) and coupled
        proposals = min(self._config.proposals, options.inner_length) if inner else 0
        longest = options.draft_length
        if req.grammar is not None:  # proposals exceed it, and follow the last draft
            longest = min(longest, MOST_DRAFTS - 2 * proposals)
        path = "local" if self._config.role == "drafter" else ""
        stats = RequestStats(enabled, longest, options.report, proposals, path=path)
        req.customized_info = {**(req.customized_info or {}), KEY: stats}
        outputs = list(req.output_ids)
        return RequestState(
            req=req,
            prompt=length,
            verified=length,
            outputs=outputs,
            profile=profile,
            stops=stop_tokens(req),
            stats=stats,
            penalties=self._penalties(req, outputs),
            cursor=GrammarCursor(req.grammar) if req.grammar is not None else None,
            asynchronous=coupled and not looks_at_tokens(req),
            committed_in_flight=unreported,
        )

    def drafts(self, req: Req, options: RequestOptions | None = None) -> bool:
        """Return whether a request whose prompt is long enough may draft.

        Args:
            req: SGLang's request.
            options: Its options, if they were read.
        """
        given = options or read_options(req.sampling_params.custom_params, self._config)
        return (
            given.enabled
            and draftable(req)
            and (self._config.residency != "auto" or not ends_early(req))
            # A request that lost its KV once is not compressed again.
            and not getattr(req, "vericache_distrusted", False)
        )

    def _penalties(self, req: Req, outputs: list[int]) -> Penalties | None:
        if not penalised(req.sampling_params):
            return None
        penalties = Penalties(
            req.sampling_params,
            end_tokens(req),
            self._vocab_size,
            self._device,
            req.origin_input_ids[-1] if self._overlap else None,
        )
        penalties.note(outputs)
        return penalties
