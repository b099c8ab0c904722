"""Drafting and accepting: by plain loops, by the engine, by the kernel.

The kernel runs in a process of its own, see ``kernel_device``: this file as a script.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_device import DEVICE, moved, needs_gpu, report, run, unsynced

from vericache_kernels.token_commit import (
    DRAFT,
    EMIT,
    DraftTokenRows,
    DraftTokens,
    bytes_moved,
    token_commit,
)
from vericache_kernels.token_commit.ref import commit_rows
from vericache_sglang.sampling.accept import accepted_tokens

KINDS = st.sampled_from([DRAFT, EMIT])
FAR = 10**6
"""A row that no block table has."""


@st.composite
def forwards(draw):
    """Draw draft tokens, rows and their tokens; few token ids, so that drafts agree.

    Rows without queries name a seat of another row, or none there is.
    """
    most = draw(st.integers(0, 9))
    count = draw(st.integers(0, 6))
    pool_indices = draw(st.integers(count + 1, 9))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ids = draw(st.sampled_from([1, 2, 50]))
    draft_tokens = DraftTokens(
        torch.randint(1, ids + 1, (pool_indices, most + 2), generator=random),
        torch.randint(
            0, most + 1, (pool_indices,), generator=random, dtype=torch.int32
        ),
        torch.randint(90, 99, (pool_indices,), generator=random),
    )
    kinds = draw(st.lists(KINDS, min_size=count, max_size=count))
    queries = draw(st.lists(st.integers(0, most + 1), min_size=count, max_size=count))
    pool_idx = torch.randperm(pool_indices, generator=random)[:count]
    for row, own in enumerate(queries):
        if not own:
            pool_idx[row] = draw(st.sampled_from([FAR, int(pool_idx[0]), 0]))
    small = draw(st.sampled_from([torch.int32, torch.int64]))
    rows = DraftTokenRows(
        pool_idx.to(draw(st.sampled_from([torch.int32, torch.int64]))),
        torch.tensor([0, *queries]).cumsum(0).to(small),
        torch.tensor(kinds, dtype=small),
    )
    total = sum(queries) + draw(st.integers(0, 3))  # a graph's tokens behind the rows
    return draft_tokens, rows, torch.randint(1, ids + 1, (total,), generator=random)


def by_hand(draft_tokens, rows, target):
    """Row by row and token by token: the tensors left, tokens and counts of rows."""
    tokens, drafted, verified = (
        getattr(draft_tokens, field.name).tolist()
        for field in dataclasses.fields(draft_tokens)
    )
    first, chosen, out, counts = rows.first.tolist(), target.tolist(), [], []
    for row, (kind, pool_idx) in enumerate(
        zip(rows.kind.tolist(), rows.pool_idx.tolist(), strict=True)
    ):
        asked, run = chosen[first[row] : first[row + 1]], []
        base = 0 if kind == EMIT or not asked else drafted[pool_idx]
        for place, token in enumerate(asked):
            run.append(token)
            behind = tokens[pool_idx][base + place + 1 :]
            if place + 1 < len(asked) and behind[:1] != [token]:
                break
        if asked and kind == EMIT:
            tokens[pool_idx][0], drafted[pool_idx] = run[-1], 0
            verified[pool_idx] += len(run)
        elif asked:
            end = base + len(run)
            if end <= draft_tokens.most:
                tokens[pool_idx][end] = run[-1]
            drafted[pool_idx] = min(end, draft_tokens.most)
        out.append(run + [-1] * (draft_tokens.most - len(run)))
        counts.append(len(run) if kind == EMIT else 0)
    return (tokens, drafted, verified), out, counts


@given(forward=forwards())
def test_a_forward_leaves_what_the_oracle_does(forward):
    draft_tokens, _, target = forward
    wanted, out, counts = by_hand(*forward)
    emission = token_commit(*forward)
    assert draft_tokens.tokens.tolist() == wanted[0]
    assert draft_tokens.drafted.tolist() == wanted[1]
    assert draft_tokens.verified.tolist() == wanted[2]
    assert emission.tokens.tolist() == out
    assert emission.counts.tolist() == counts
    assert emission.counts.dtype == torch.int32
    assert emission.tokens.shape == (len(counts), draft_tokens.most)
    assert target.dtype == emission.tokens.dtype


@given(
    said=st.lists(st.integers(1, 2), min_size=16, max_size=16),
    proposed=st.lists(st.lists(st.integers(1, 2), max_size=3), min_size=1, max_size=4),
    extra=st.lists(st.integers(1, 2), min_size=20, max_size=20),
)
def test_drafts_with_proposals_are_those_without_and_are_verified(
    said, proposed, extra
):
    """The model says ``said`` whatever is proposed; then all drafts are verified."""
    draft_tokens = DraftTokens(
        torch.full((3, 20), 7),
        torch.zeros(3, dtype=torch.int32),
        torch.full((3,), 40),
    )
    pool_idx, drafts = torch.tensor([1]), 0
    for guess in proposed:
        draft_tokens.tokens[1, drafts + 1 : drafts + 1 + len(guess)] = torch.tensor(
            guess
        )
        rows = DraftTokenRows(
            pool_idx, torch.tensor([0, 1 + len(guess)]), torch.tensor([DRAFT])
        )
        target = torch.tensor(said[drafts : drafts + 1 + len(guess)])
        drafted = token_commit(draft_tokens, rows, target)
        assert drafted.counts.tolist() == [0]
        new = [token for token in drafted.tokens[0].tolist() if token >= 0]
        assert new == said[drafts : drafts + len(new)]
        drafts += len(new)
        assert int(draft_tokens.drafted[1]) == drafts
    assert draft_tokens.tokens[1, 1 : drafts + 1].tolist() == said[:drafts]
    # The host may not know how many there are, and verifies columns behind them.
    target = extra[: drafts + 3]
    ends = torch.tensor([0, len(target)])
    behind = draft_tokens.tokens[1, drafts + 1 : len(target)].tolist()
    emission = token_commit(
        draft_tokens,
        DraftTokenRows(pool_idx, ends, torch.tensor([EMIT])),
        torch.tensor(target),
    )
    expected = accepted_tokens([*said[:drafts], *behind], target)
    count = int(emission.counts)
    assert emission.tokens[0, :count].tolist() == expected
    assert emission.tokens[0, count:].eq(-1).all()
    assert int(draft_tokens.tokens[1, 0]) == expected[-1]
    assert draft_tokens.verified.tolist() == [40, 40 + count, 40]
    assert draft_tokens.drafted.tolist() == [0, 0, 0]
    assert (draft_tokens.tokens[[0, 2]] == 7).all()


def test_a_draft_behind_the_last_column_is_dropped():
    draft_tokens = DraftTokens(
        torch.zeros(2, 4).long(),
        torch.tensor([2, 3], dtype=torch.int32),
        torch.zeros(2).long(),
    )
    rows = DraftTokenRows(
        torch.tensor([0, 1]), torch.tensor([0, 1, 2]), torch.tensor([DRAFT, DRAFT])
    )
    token_commit(draft_tokens, rows, torch.tensor([5, 6]))
    assert draft_tokens.tokens.tolist() == [[0, 0, 0, 5], [0, 0, 0, 0]]
    assert draft_tokens.drafted.tolist() == [3, 3]


def test_the_reference_reads_nothing_on_the_host():
    # Tensors without contents: reading one, or meeting one of another device, raises.
    draft_tokens, rows, target = moved(sound(), "meta")
    emission = commit_rows(draft_tokens, rows, target)
    assert emission.tokens.shape == (2, 6)
    assert emission.counts.device.type == "meta"
    with pytest.raises(RuntimeError):
        int(target[0])


def test_bytes_moved_are_counted():
    # In: seats of 8 bytes, kinds of 8, 3 offsets of 4, 6 tokens, 4 drafts.
    # Out: 2 * 6 tokens, 2 cells, 2 counts. In and out: 2 counts of 4 and of 8 bytes.
    moved_bytes = 2 * 2 * 8 + 3 * 4 + 6 * 8 + 4 * 8 + 12 * 8 + 2 * 8 + 2 * 4
    moved_bytes += 2 * 2 * (4 + 8)
    assert bytes_moved(*sound()) == moved_bytes


def sound(**changes):
    draft_tokens = DraftTokens(
        torch.zeros(4, 7).long(),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(4).long(),
    )
    rows = DraftTokenRows(
        torch.tensor([2, 0]),
        torch.tensor([0, 4, 6], dtype=torch.int32),
        torch.tensor([EMIT, EMIT]),
    )
    known = {"target": torch.zeros(6).long()} | changes
    return (
        dataclasses.replace(draft_tokens, **_of(changes, draft_tokens)),
        dataclasses.replace(rows, **_of(changes, rows)),
        known["target"],
    )


def _of(changes, record):
    names = {field.name for field in dataclasses.fields(record)}
    return {name: new for name, new in changes.items() if name in names}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokens": torch.zeros(4).long()},
            r"draft_tokens.tokens must be \[R, x \+ 2\]",
        ),
        (
            {"tokens": torch.zeros(4, 1).long()},
            r"draft_tokens.tokens must be \[R, x \+ 2\]",
        ),
        ({"tokens": torch.zeros(4, 7).int()}, "draft_tokens.tokens must be one of"),
        (
            {"tokens": torch.zeros(7, 4).long().t()},
            r"draft_tokens.tokens must be \[4, 7\]",
        ),
        ({"drafted": torch.zeros(3).int()}, r"draft_tokens.drafted must be \[4\]"),
        ({"drafted": torch.zeros(4).long()}, "draft_tokens.drafted must be one of"),
        ({"verified": torch.zeros(4).int()}, "draft_tokens.verified must be one of"),
        ({"first": torch.zeros(2).int()}, r"rows.first must be \[3\]"),
        ({"kind": torch.zeros(2)}, "rows.kind must be one of"),
        ({"kind": torch.zeros(4).int()[::2]}, r"rows.kind must be \[2\], contig"),
        ({"target": torch.zeros(6).int()}, "target must be one of"),
        ({"target": torch.zeros(2, 3).long()}, r"target must be \[6\]"),
        ({"pool_idx": torch.zeros(2, device="meta").int()}, "rows.pool_idx is on meta"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        token_commit(*sound(**changes))


def test_the_kernel_equals_the_reference():
    seen = run(__file__)
    assert seen["accepted"] > 10
    assert seen["drafted"] > 10
    assert seen["agreed"] > 10


@needs_gpu
def test_a_captured_graph_drafts_and_then_accepts():
    draft_tokens = DraftTokens(
        torch.zeros(4, 5).long().to(DEVICE),
        torch.zeros(4).int().to(DEVICE),
        torch.zeros(4).long().to(DEVICE),
    )
    rows = moved(
        DraftTokenRows(
            torch.tensor([2, 0, 0]),
            torch.tensor([0, 1, 2, 2]),
            torch.tensor([DRAFT, DRAFT, EMIT]),
        )
    )
    target = torch.tensor([8, 9, 1]).to(DEVICE)
    token_commit(draft_tokens, rows, target)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        emission = token_commit(draft_tokens, rows, target)
    draft_tokens.drafted.zero_()
    graph.replay()
    assert draft_tokens.tokens[[0, 2], 1].tolist() == [9, 8]
    rows.first.copy_(torch.tensor([0, 2, 3, 3]))
    rows.kind.fill_(EMIT)
    target.copy_(torch.tensor([8, 5, 6]))
    graph.replay()
    assert emission.counts.tolist() == [2, 1, 0]
    assert emission.tokens.tolist() == [[8, 5, -1, -1], [6, -1, -1, -1], [-1] * 4]
    assert draft_tokens.tokens[[0, 2], 0].tolist() == [6, 5]
    assert draft_tokens.verified.tolist() == [1, 0, 2, 0]


SEEN = {"accepted": 0, "drafted": 0, "agreed": 0}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(forward=forwards())
def kernel_equals_reference(forward):
    from vericache_kernels.token_commit.triton_impl import launch

    expected = moved(forward, "cpu")
    emission = commit_rows(*expected)
    # The reference too: the engine may be given a device that Triton does not know.
    for commit in (launch, commit_rows):
        call = moved(forward)
        with unsynced():
            found = commit(*call)
        for record, wanted in ((found, emission), (call[0], expected[0])):
            for field in dataclasses.fields(record):
                name = field.name
                there = getattr(record, name).cpu()
                assert torch.equal(there, getattr(wanted, name)), name
    SEEN["accepted"] += int((emission.counts - 1).clamp(min=0).sum())
    live = forward[1].first.diff() > 0
    tokens = emission.tokens[live & (forward[1].kind == DRAFT)]
    SEEN["drafted"] += len(tokens)
    SEEN["agreed"] += int((tokens[:, 1:] >= 0).sum())


if __name__ == "__main__":
    kernel_equals_reference()
    report(SEEN)
