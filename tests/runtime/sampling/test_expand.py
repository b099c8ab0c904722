"""SGLang's sampling state of a batch, repeated for every position of every row."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo

from vericache_sglang.kv.request import RequestState
from vericache_sglang.observability.request_stats import RequestStats
from vericache_sglang.sampling.expand import expand, pick
from vericache_sglang.sampling.penalties import Penalties
from vericache_sglang.sampling.profile import Profile, SamplingRule
from vericache_sglang.sampling.query import Query, RowQueries
from vericache_sglang.sampling.request_view import RequestView

VOCABULARY = 8

pytestmark = pytest.mark.sglang


def info_of(count, **more):
    return SamplingBatchInfo(
        temperatures=torch.arange(1.0, count + 1).view(-1, 1),
        top_ps=torch.full((count,), 0.5) + torch.arange(count) / 10,
        top_ks=torch.arange(count, dtype=torch.int32) + 2,
        min_ps=torch.arange(count) / 100,
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=True,
        need_top_k_sampling=True,
        need_min_p_sampling=True,
        vocab_size=VOCABULARY,
        device="cpu",
        **more,
    )


def state_of(seed, outputs, drafts=(), **more):
    req = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=more.pop("params", None)),
        grammar=more.pop("grammar", None),
        output_ids=[99],
    )
    return RequestState(
        req=req,
        prompt=10,
        verified=10 + len(outputs) - 1,
        outputs=list(outputs),
        profile=Profile(SamplingRule.COUPLED, seed=seed),
        stops=frozenset(),
        stats=RequestStats(True, 8),
        drafts=list(drafts),
        **more,
    )


def verification(batch_index, state):
    """Return the row that verifies all drafts of ``state``."""
    queries = tuple(
        Query(batch_index, state, at=j, drafts=j) for j in range(len(state.drafts) + 1)
    )
    return RowQueries(queries, verifies=True, emits=True)


def draft(batch_index, state):
    """Return the row that asks for the next draft of ``state``."""
    n = len(state.drafts)
    query = Query(batch_index, state, at=0, drafts=n)
    return RowQueries((query,), verifies=False, emits=False)


def test_every_position_has_its_requests_parameters_and_seed():
    rows = [verification(2, state_of(7, [4], [5, 6])), draft(0, state_of(9, [4]))]
    expanded, usable = expand(info_of(3), rows, late=False)
    assert usable == [3, 1]
    assert expanded.temperatures.flatten().tolist() == [3, 3, 3, 1]
    assert expanded.top_ks.tolist() == [4, 4, 4, 2]
    assert expanded.top_ps.tolist() == pytest.approx([0.7, 0.7, 0.7, 0.5])
    assert expanded.min_ps.tolist() == pytest.approx([0.02, 0.02, 0.02, 0.0])
    assert expanded.sampling_seed.tolist() == [7, 7, 7, 9]
    assert len(expanded) == 4


def test_what_nobody_asks_for_is_left_out():
    expanded, _ = expand(info_of(1), [draft(0, state_of(1, [4]))], late=False)
    assert expanded.logit_bias is None
    assert expanded.grammar_mask is None
    assert expanded.acc_additive_penalties is None
    assert expanded.acc_scaling_penalties is None
    assert not expanded.has_custom_logit_processor
    logits = torch.randn(1, VOCABULARY)
    same = logits.clone()
    expanded.apply_logits_bias(logits)
    assert torch.equal(logits, same)


def test_the_batchs_own_state_is_not_touched():
    info = info_of(2, logit_bias=torch.eye(2, VOCABULARY))
    before = dict(vars(info))
    expand(info, [verification(1, state_of(1, [4], [5]))], late=True)
    assert all(vars(info)[name] is value for name, value in before.items())


def test_biases_follow_their_seat():
    info = info_of(2, logit_bias=torch.eye(2, VOCABULARY))
    rows = [draft(1, state_of(1, [4])), verification(0, state_of(2, [4], [5]))]
    expanded, _ = expand(info, rows, late=False)
    assert expanded.logit_bias.argmax(dim=-1).tolist() == [1, 0, 0]


def penalties(outputs, **params):
    defaults = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }
    made = Penalties(
        SimpleNamespace(**{**defaults, **params}), [0], VOCABULARY, "cpu", None
    )
    made.note(outputs)
    return made


def with_proposals(row, *proposed):
    """Return a row that runs tokens behind its last one."""
    last = row.queries[-1]
    more = [
        replace(last, at=last.at + i, drafts=last.drafts + i)
        for i in range(1, len(proposed) + 1)
    ]
    return replace(row, queries=(*row.queries, *more), proposed=proposed)


def test_proposals_count_like_the_drafts_before_them():
    """Penalties, masks and processors are those of a row that has them as drafts."""
    entry = ProcessorEntry("processor", [0], torch.tensor([0]))
    found = []
    for drafts, proposed in (([5, 4, 3], ()), ([5], (4, 3)), ([], (5, 4, 3))):
        state = state_of(
            1,
            [4],
            drafts,
            penalties=penalties([4], frequency_penalty=1.0),
            grammar=Grammar(),
            cursor=Cursor(),
            params={"__req__": SimpleNamespace()},
        )
        row = with_proposals(verification(0, state), *proposed)
        info = info_of(
            1,
            has_custom_logit_processor=True,
            custom_logit_processor={5: entry},
            custom_params=[{}],
        )
        expanded, usable = expand(info, [row], late=False)
        texts = [params["__req__"].output_ids for params in expanded.custom_params]
        masks = expanded.grammar_mask.vocab_mask
        found.append((usable, texts, masks, expanded.acc_additive_penalties))
    for usable, texts, masks, additive in found[1:]:
        assert (usable, texts) == found[0][:2]
        assert torch.equal(masks, found[0][2])
        assert torch.equal(additive, found[0][3])


def test_penalties_count_the_drafts_before_each_position():
    counted = state_of(1, [4], [5, 4], penalties=penalties([4], frequency_penalty=1.0))
    free = state_of(2, [4, 4], [3])
    rows = [draft(0, free), verification(1, counted)]
    expanded, _ = expand(info_of(2), rows, late=False)
    wanted = torch.zeros(4, VOCABULARY)
    wanted[1, 4] = wanted[2, 4] = wanted[2, 5] = wanted[3, 5] = -1
    wanted[3, 4] = -2
    assert torch.equal(expanded.acc_additive_penalties, wanted)
    assert expanded.acc_scaling_penalties is None


def test_a_draft_row_counts_all_drafts_so_far():
    scaled = state_of(1, [4], [5], penalties=penalties([4], repetition_penalty=2.0))
    added = state_of(2, [4], penalties=penalties([4], presence_penalty=0.5))
    expanded, _ = expand(info_of(2), [draft(0, scaled), draft(1, added)], late=False)
    scaling = torch.ones(2, VOCABULARY)
    scaling[0, [4, 5]] = 2.0
    assert torch.equal(expanded.acc_scaling_penalties, scaling)
    assert expanded.acc_additive_penalties.nonzero().tolist() == [[1, 4]]


class Grammar:
    """What the expansion asks of a grammar: masks, here a truth value per token."""

    def allocate_vocab_mask(self, vocab_size, batch_size, device):
        return torch.ones(batch_size, vocab_size, dtype=torch.bool)

    def move_vocab_mask(self, mask, device):
        return mask

    def apply_vocab_mask(self, logits, vocab_mask):
        logits.masked_fill_(~vocab_mask, -torch.inf)


class Cursor:
    """Allows one token after each draft, and ends after two."""

    first = 1

    def settle(self):
        self.first = 2

    def mask_after(self, tokens, mask, rows):
        for row, token in zip(rows, [self.first, *tokens], strict=True):
            mask[row] = torch.arange(VOCABULARY) == token
        return min(2, len(rows))


def test_masks_lie_in_the_rows_of_their_requests():
    grammar = Grammar()
    bound = state_of(1, [4], [5, 6], grammar=grammar, cursor=Cursor())
    drafting = state_of(2, [4], grammar=grammar, cursor=Cursor())
    free = state_of(3, [4], [3])
    rows = [verification(0, free), verification(2, bound), draft(1, drafting)]
    expanded, usable = expand(info_of(3), rows, late=False)
    assert usable == [2, 2, 1]
    logits = torch.zeros(6, VOCABULARY)
    expanded.apply_logits_bias(logits)
    allowed = [row.isfinite().nonzero().flatten().tolist() for row in logits]
    everything = list(range(VOCABULARY))
    assert allowed == [everything, everything, [2], [5], [6], [1]]


@pytest.mark.parametrize("late", [False, True])
def test_a_processor_sees_the_text_before_each_position(late):
    state = state_of(1, [4, 7], [5, 6], params={"by": 2.0})
    state.req.sampling_params.custom_params["__req__"] = state.req
    other = state_of(2, [3])
    entry = ProcessorEntry("processor", [1], torch.tensor([1]))
    info = info_of(
        2,
        has_custom_logit_processor=True,
        custom_logit_processor={5: entry},
        custom_params=[None, {}],
    )
    rows = [draft(0, other), verification(1, state)]
    expanded, _ = expand(info, rows, late=late)
    made = expanded.custom_logit_processor[5]
    assert (made.processor, made.rows) == ("processor", [1, 2, 3])
    assert made.indices.tolist() == [1, 2, 3]
    assert expanded.custom_params[0] is None
    seen = [params["__req__"].output_ids for params in expanded.custom_params[1:]]
    texts = [[4, 7], [4, 7, 5], [4, 7, 5, 6]]
    assert seen == [text[:-1] if late else text for text in texts]
    assert [params["by"] for params in expanded.custom_params[1:]] == [2.0] * 3
    assert state.req.sampling_params.custom_params["__req__"] is state.req
    assert state.req.output_ids == [99]


def test_a_view_is_the_request_but_for_its_output():
    req = SimpleNamespace(rid="a", output_ids=[1], origin_input_ids=[5])
    view = RequestView(req, [1, 2])
    assert (view.rid, view.origin_input_ids, view.output_ids) == ("a", [5], [1, 2])
    assert not hasattr(view, "missing")


def test_pick_leaves_what_belongs_to_logits_out():
    info = info_of(
        3,
        logit_bias=torch.zeros(3, VOCABULARY),
        sampling_seed=torch.tensor([5, 6, 7]),
        acc_additive_penalties=torch.zeros(3, VOCABULARY),
    )
    picked = pick(info, torch.tensor([2, 0]))
    assert picked.sampling_seed.tolist() == [7, 5]
    assert picked.temperatures.flatten().tolist() == [3, 1]
    assert picked.logit_bias is None
    assert picked.acc_additive_penalties is None
