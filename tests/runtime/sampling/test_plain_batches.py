"""When SGLang's batch-wide sampling is right for every request of a batch."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from vericache_sglang.runtime.forward.autoregressive import samples_as_sglang
from vericache_sglang.sampling.profile import GREEDY_FAST, Profile, SamplingRule

SEEDED = Profile(SamplingRule.SEEDED, seed=1)
CUT = Profile(SamplingRule.SEEDED, filtered=True, seed=1)
COUPLED = Profile(SamplingRule.COUPLED, seed=1)

pytestmark = pytest.mark.sglang


PROMPT = [3, 4, 5]


def states(*profiles, penalties=None, processor=None, room=None, **since):
    stats = SimpleNamespace(inner_proposed=since.get("proposed", 0))
    own = {"parts": None, "prompt": len(PROMPT), **since, "penalties": penalties}
    req = SimpleNamespace(
        bootstrap_room=room, origin_input_ids=PROMPT, custom_logit_processor=processor
    )
    return [
        SimpleNamespace(profile=profile, req=req, stats=stats, **own)
        for profile in profiles
    ]


def info(**flags):
    names = ("need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling")
    return SimpleNamespace(**{**dict.fromkeys(names, False), **flags})


@pytest.mark.parametrize(
    "flag", ["need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling"]
)
def test_seeded_requests_need_the_batchs_flags_to_be_theirs(flag):
    """SGLang's flags outlive the request that set them."""
    assert samples_as_sglang(states(SEEDED, SEEDED), info())
    assert not samples_as_sglang(states(SEEDED), info(**{flag: True}))
    assert samples_as_sglang(states(CUT, CUT), info(**{flag: True}))
    assert not samples_as_sglang(states(CUT), info())


def test_a_seeded_request_is_not_sampled_among_others():
    for other in (GREEDY_FAST, CUT, Profile(SamplingRule.GREEDY)):
        assert not samples_as_sglang(
            states(SEEDED, other), info(need_top_p_sampling=True)
        )


@pytest.mark.parametrize("flags", [{}, {"need_top_k_sampling": True}])
def test_without_a_seed_any_way_to_draw_is_right(flags):
    assert samples_as_sglang(states(GREEDY_FAST, COUPLED), info(**flags))
    assert samples_as_sglang(states(GREEDY_FAST), info(**flags))


@pytest.mark.parametrize("own", [{"penalties": object()}, {"processor": "a class"}])
@pytest.mark.parametrize(
    "since", [{"parts": object()}, {"proposed": 1}, {"prompt": 5}, {"room": 7}]
)
def test_what_looks_back_is_ours_unless_every_step_emitted_one_token(own, since):
    """Compressed once, with proposals, retracted, or prefilled elsewhere."""
    assert samples_as_sglang(states(GREEDY_FAST, **own), info())
    assert not samples_as_sglang(states(GREEDY_FAST, **own, **since), info())
    assert samples_as_sglang(states(GREEDY_FAST, **since), info())
