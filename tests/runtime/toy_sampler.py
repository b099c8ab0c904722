"""A model of six tokens behind the row sampler, and a chi-square test of its output.

The full KV's distribution of the next token is a table that depends on the token
before; the draft part's is another table. So the output's distribution is known
exactly, and tens of thousands of tokens cost seconds.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from vericache_sglang.evaluation.distribution import exact_distribution
from vericache_sglang.kv.request import RequestState
from vericache_sglang.observability.request_stats import RequestStats
from vericache_sglang.platforms.cpu.murmur_hash import murmur_hash32
from vericache_sglang.sampling import profile
from vericache_sglang.sampling.query import Query, RowQueries
from vericache_sglang.sampling.sampler import RowSampler

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY = 6
DRAFTS = 3
PROMPT = 5


def logits(seed: int) -> torch.Tensor:
    """Draw [6, 6] logits: row = the token before."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCABULARY, VOCABULARY, generator=generator)


def exact(table: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return [6, 6] float64, what a sampler is to draw from, by the definitions."""
    names = ("temperature", "top_k", "top_p", "min_p")
    asked = {name: getattr(params, name) for name in names}
    rows = [exact_distribution(row, asked) for row in table.double().numpy()]
    return torch.from_numpy(np.stack(rows))


def probability(counts: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the p-value of counted pairs under the exact distribution.

    Args:
        counts: [6, 6] how often a token (column) followed another (row).
        wanted: [6, 6] exact probabilities, rows sum to 1.

    Returns:
        0 where an impossible pair was counted.

    Raises:
        ValueError: Too few pairs for a chi-square test.
    """
    from scipy import stats

    if bool((counts[wanted == 0] > 0).any()):
        return 0.0
    expected = counts.sum(dim=-1, keepdim=True) * wanted
    possible = wanted > 0
    if float(expected[possible].min()) < 5:
        raise ValueError("a pair is expected fewer than 5 times")
    statistic = ((counts - expected) ** 2 / expected)[possible].sum()
    return float(stats.chi2.sf(float(statistic), int(possible.sum()) - VOCABULARY))


@contextmanager
def fixed_noise(seed: int) -> Iterator[None]:
    """Draw the same noise in every run, on a machine without a GPU too."""
    torch.manual_seed(seed)
    with (
        patch("sglang.srt.layers.sampler.murmur_hash32", murmur_hash32),
        patch.object(profile, "_SYSTEM_RANDOM", random.Random(seed)),
        torch.compiler.set_stance("force_eager"),  # compiling takes half a minute
    ):
        yield


class Toy:
    """Requests whose full KV says ``target`` and whose draft part says ``drafter``.

    Args:
        target: [6, 6] logits of the full KV, row = the token before.
        drafter: [6, 6] logits of the draft part.
        rejection: The server's rule.
        count: Requests, each with noise of its own.
        params: Sampling parameters of all of them.
    """

    def __init__(
        self,
        target: torch.Tensor,
        drafter: torch.Tensor,
        *,
        rejection: bool,
        count: int,
        **params: Any,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.params = SamplingParams(**params)
        self.states = [
            _state(self.params, i % VOCABULARY, rejection) for i in range(count)
        ]
        self._batch: Any = SimpleNamespace(
            has_grammar=False,
            top_logprobs_nums=None,
            token_ids_logprobs=None,
            sampling_info=_info(self.params, count),
        )
        runner = SimpleNamespace(sampler=None)  # neither rule asks SGLang's sampler
        self._sampler = RowSampler(runner, overlap=False)
        self.rounds = self.accepted = self.emitted = 0

    def round(self) -> None:
        """Draft three tokens of every request, verify them."""
        for _ in range(DRAFTS):
            self.draft()
        self.verify()

    def draft(self) -> None:
        """Draft one token of every request."""
        for state, (token,) in self._choose(self.drafter, verifies=False):
            state.draft(token)

    def verify(self) -> None:
        """Verify the drafts of every request."""
        for state, run in self._choose(self.target, verifies=True):
            self.rounds += 1
            self.accepted += len(run) - 1
            self._emit(state, run)

    def trust(self) -> None:
        """Emit the drafts of every request as they are: what must be found out."""
        for state in self.states:
            self._emit(state, list(state.drafts))

    def pairs(self) -> torch.Tensor:
        """Return [6, 6] float64, how often each token followed each."""
        texts = [torch.tensor(state.outputs) for state in self.states]
        before = torch.cat([text[:-1] for text in texts])
        after = torch.cat([text[1:] for text in texts])
        counts = torch.bincount(before * VOCABULARY + after, minlength=VOCABULARY**2)
        return counts.view(VOCABULARY, VOCABULARY).double()

    def _emit(self, state: RequestState, run: list[int]) -> None:
        self.emitted += len(run)
        state.accept(run)

    def _choose(
        self, table: torch.Tensor, *, verifies: bool
    ) -> Iterator[tuple[RequestState, list[int]]]:
        rows, before, positions = [], [], []
        for batch_index, state in enumerate(self.states):
            text = [state.pending, *state.drafts]
            queries = []
            for drafts in range(0 if verifies else len(state.drafts), len(text)):
                queries.append(Query(batch_index, state, len(before), drafts))
                before.append(text[drafts])
                positions.append(state.verified + drafts)
            rows.append(RowQueries(tuple(queries), verifies=verifies, emits=verifies))
        runs, _ = self._sampler.choose(
            self._batch,
            rows,
            table[before],
            torch.tensor(positions),
            torch.tensor(before),
            waited=lambda: None,
        )
        return zip(self.states, runs, strict=True)


def _state(params: SamplingParams, first: int, rejection: bool) -> RequestState:
    req = SimpleNamespace(
        sampling_params=params,
        grammar=None,
        custom_logit_processor=None,
        return_logprob=False,
    )
    return RequestState(
        req=req,
        prompt=PROMPT,
        verified=PROMPT,
        outputs=[first],
        profile=profile.profile_of(req, deterministic=False, rejection=rejection),
        stops=frozenset(),
        stats=RequestStats(True, DRAFTS),
    )


def _info(params: SamplingParams, count: int) -> SamplingBatchInfo:
    return SamplingBatchInfo(
        temperatures=torch.full((count, 1), params.temperature),
        top_ps=torch.full((count,), params.top_p),
        top_ks=torch.full((count,), params.top_k, dtype=torch.int32),
        min_ps=torch.full((count,), params.min_p),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=True,
        need_top_k_sampling=True,
        need_min_p_sampling=True,
        vocab_size=VOCABULARY,
        device="cpu",
    )
