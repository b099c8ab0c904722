"""What a client asks in these tests, and the proof that the answer was drafted."""

import contextlib
import random

from live_server import MODEL

from vericache_sglang.demo_records import prompt_of_length
from vericache_sglang.evaluation.workload import count_tokens, load_tokenizer


def draw_prompts(count, tokens=400, calls=1, seed=5):
    """Return ``count`` demo prompts of about ``tokens`` tokens, all different."""
    rng = random.Random(seed)
    tokenizer = load_tokenizer(MODEL)
    return [
        prompt_of_length(
            rng, tokens, lambda text: count_tokens(tokenizer, text), calls=calls
        )
        for _ in range(count)
    ]


def messages(prompt):
    """Return a demo prompt as the messages of a chat."""
    return [
        {"role": "system", "content": prompt.document},
        {"role": "user", "content": prompt.question},
    ]


@contextlib.contextmanager
def expect_drafting(server):
    """Require that ``server`` drafts and verifies while the block runs."""
    before = server.counters()
    yield
    after = server.counters()
    for name in ("drafted", "cycles"):
        assert after[name] > before[name], f"{name} stayed at {before[name]}"
