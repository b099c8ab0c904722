"""What a synchronous forward chooses on the host is what a device commit accepts."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang")

from vericache_kernels.token_commit import (
    DRAFT,
    EMIT,
    DraftTokenRows,
    DraftTokens,
    token_commit,
)
from vericache_sglang.sampling.profile import GREEDY_FAST
from vericache_sglang.sampling.query import Query, RowQueries
from vericache_sglang.sampling.sampler import RowSampler

pytestmark = pytest.mark.sglang

MOST, VOCABULARY = 7, 3
TOKENS = st.lists(
    st.tuples(st.integers(0, VOCABULARY - 1), st.integers(0, VOCABULARY - 1)),
    min_size=1,
    max_size=MOST,
)
"""By query: the token that the forward reads, and the model's next one."""


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(TOKENS, st.booleans()), min_size=1, max_size=4))
def test_drafts_and_proposals_are_accepted_as_on_the_device(given_rows):
    """A draft row begins with its last draft; behind it are proposals."""
    draft_tokens = torch.zeros(len(given_rows), MOST + 1, dtype=torch.int64)
    drafted, rows, read, target, first = [], [], [], [], [0]
    for i, (tokens, emits) in enumerate(given_rows):
        inputs, outputs = zip(*tokens, strict=True)
        start = 0 if emits else MOST - len(inputs)
        draft_tokens[i, start : start + len(inputs)] = torch.tensor(inputs)
        drafted.append(start)
        state = SimpleNamespace(profile=GREEDY_FAST)
        queries = tuple(
            Query(i, state, len(read) + j, start + j) for j in range(len(inputs))
        )
        rows.append(RowQueries(queries, verifies=emits, emits=emits))
        read += inputs
        target += outputs
        first.append(len(read))
    logits = torch.eye(VOCABULARY)[target]
    chosen, _ = RowSampler(SimpleNamespace(sampler=None), overlap=False).choose(
        None,
        rows,
        logits,
        torch.zeros(len(read), dtype=torch.int64),
        torch.tensor(read),
        waited=lambda: None,
    )
    emission = token_commit(
        DraftTokens(
            draft_tokens,
            torch.tensor(drafted, dtype=torch.int32),
            torch.zeros(len(rows), dtype=torch.int64),
        ),
        DraftTokenRows(
            torch.arange(len(rows)),
            torch.tensor(first),
            torch.tensor([EMIT if emits else DRAFT for _, emits in given_rows]),
        ),
        torch.tensor(target),
    )
    committed = [[t for t in row if t >= 0] for row in emission.tokens.tolist()]
    assert chosen == committed
