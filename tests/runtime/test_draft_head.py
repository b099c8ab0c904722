"""The tokens of a head as those of the served model."""

from types import SimpleNamespace

import pytest
import torch

from vericache_sglang.errors import ConfigError
from vericache_sglang.runtime.draft_model import proposed_ids

VOCABULARY = 10


def head(words, ids):
    """Return a head with ``words`` tokens, of which the checkpoint lists ``ids``."""
    listed = None if ids is None else torch.tensor(ids)
    config = SimpleNamespace(draft_vocab_size=words)
    return SimpleNamespace(config=config, hot_token_id=listed)


def test_tokens_are_those_that_the_checkpoint_lists():
    assert proposed_ids(head(3, [1, 4, 9]), VOCABULARY, "cpu").tolist() == [1, 4, 9]
    assert proposed_ids(head(VOCABULARY, None), VOCABULARY, "cpu") is None


@pytest.mark.parametrize(
    ("words", "ids", "message"),
    [
        (3, None, "d2t lists 0 of the head's 3 tokens"),
        (3, [1, 4], "d2t lists 2 of the head's 3 tokens"),
        (2, [1, 10], "beyond the model's 10"),
        (2, [-1, 4], "beyond the model's 10"),
    ],
)
def test_a_head_with_other_tokens_is_refused_by_name(words, ids, message):
    with pytest.raises(ConfigError, match=message) as caught:
        proposed_ids(head(words, ids), VOCABULARY, "cpu")
    assert "--speculative-draft-model-path" in str(caught.value)
