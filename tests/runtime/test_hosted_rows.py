"""A verifier's rows of guests whose drafter drafts: they wait, or verify its drafts."""

from types import SimpleNamespace

import pytest

from vericache_sglang.kv.request import RequestState
from vericache_sglang.observability.request_stats import RequestStats
from vericache_sglang.remote.guests import Guest
from vericache_sglang.runtime.forward.draft_tokens import DraftTokenBuffer
from vericache_sglang.runtime.hosting import Hosting
from vericache_sglang.sampling.profile import GREEDY_FAST
from vericache_sglang.scheduling.plan import Plain, Verify, Wait

MOST, OWN, PROMPT = 4, 1, 10
FULL = [7, 8, 9]


def row(asked, *, allocated=40, longest=50, in_flight=0, asynchronous=True, **stats):
    """Return the action of a guest with two output tokens, and its state."""
    kv = SimpleNamespace(req_pool_idx=OWN, kv_allocated_len=allocated)
    params = SimpleNamespace(max_new_tokens=longest)
    req = SimpleNamespace(rid="g", kv=kv, sampling_params=params)
    state = RequestState(
        req=req,
        prompt=PROMPT,
        verified=PROMPT + 1,
        outputs=[5, 6],
        profile=GREEDY_FAST,
        stops=frozenset(),
        stats=RequestStats(**{"enabled": False, "draft_length": MOST, **stats}),
        asynchronous=asynchronous,
        committed_in_flight=in_flight,
    )
    guest = Guest(bytes(16), 1, 1, "g", [5, 6], 2, waits=True, asked=asked)
    hosting = Hosting.__new__(Hosting)
    hosting._most_drafts, hosting._waiting = MOST, {"g": guest}
    hosting.draft_tokens = DraftTokenBuffer(2, MOST, "cpu")
    found = hosting.actions({3: state}, 0)
    return found.get(3), state, hosting.draft_tokens


@pytest.mark.parametrize(
    ("asked", "more", "action", "drafts"),
    [
        ((2, FULL), {}, Verify, FULL),
        ((2, [*FULL, 1, 2, 3]), {}, Verify, [*FULL, 1]),
        ((2, FULL), {"longest": 4}, Verify, [7]),
        ((2, FULL), {"longest": 3}, Plain, []),
        ((2, FULL), {"longest": 2}, None, []),
        ((2, []), {}, Plain, []),
        ((2, FULL), {"asynchronous": False}, Plain, []),
        (None, {}, Wait, []),
        ((1, FULL), {}, Wait, []),
        ((2, FULL), {"in_flight": 1}, Wait, []),
        ((2, FULL), {"allocated": PROMPT + 1 + MOST}, Wait, []),
        ((2, FULL), {"enabled": True}, None, []),
    ],
    ids=[
        *(
            "verifies",
            "more than it may",
            "near the end",
            "at the end",
            "ended",
            "one token",
        ),
        *("looks at tokens", "nothing asked", "an old question", "in flight"),
        *("no slots yet", "drafted for here"),
    ],
)
def test_what_a_guest_s_row_does(asked, more, action, drafts):
    done, state, buffer = row(asked, **more)
    assert (type(done) if done else None) is action
    assert state.drafts == drafts
    if action is Verify:
        columns = buffer._draft_tokens.tokens[OWN, : len(drafts) + 1]
        assert columns.tolist() == [6, *drafts]
    if action is Wait:
        assert state.req.vericache_room == 2 * (MOST + 1)
