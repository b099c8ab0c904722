"""The waves of requests every system answers: lengths, stops, edges, concurrency."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lossless.prompts import code_prompts, record_prompts, spread

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def greedy(new_tokens: int, **more: object) -> dict[str, Any]:
    """Return sampling parameters of a greedy request."""
    return {"temperature": 0.0, "max_new_tokens": new_tokens, **more}


def waves(
    tokenizer: PreTrainedTokenizerBase, prompts: int, longest: int, seed: int
) -> list[dict[str, Any]]:
    """Draw the requests of one comparison.

    Args:
        tokenizer: The demo model's.
        prompts: Prompts in the main wave, >= 8; a third of them source code.
        longest: Tokens of the longest prompt.
        seed: Other seeds give other prompts.

    Returns:
        Five waves: all kinds of prompt at once, going on past the end marker; the same
        prompts again, ending where they end, so prefixes are reused; ends (stop
        strings, lengths around the draft length, no output but one token); two samples
        of each prompt; and one request at a time.
    """
    code = prompts // 3
    texts = record_prompts(tokenizer, spread(prompts - code, 200, longest), seed)
    texts += code_prompts(tokenizer, spread(code, 200, max(400, longest // 2)), seed)
    short = texts[: len(texts) // 2]
    return [
        {
            "prompts": texts,
            "params": [
                greedy(40 + i % 3 * 24, ignore_eos=True) for i in range(prompts)
            ],
        },
        {"prompts": texts, "params": [greedy(64) for _ in texts], "flush": True},
        _ends(short),
        {"prompts": short[-3:], "params": [greedy(24, ignore_eos=True, n=2)] * 3},
        {
            "prompts": texts[1:4],
            "params": [greedy(48, ignore_eos=True)] * 3,
            "at_once": 1,
        },
    ]


def _ends(texts: list[str]) -> dict[str, Any]:
    kinds = [
        greedy(60, stop=['"', "name", "}"]),
        greedy(60, stop=["user", "city", ':"'], ignore_eos=True),
        greedy(60, stop_regex=[r"[0-9]{3}"], ignore_eos=True),
        greedy(60, stop_token_ids=[20, 30, 40], ignore_eos=True),
        greedy(1),
        greedy(2, ignore_eos=True),
        greedy(5, ignore_eos=True),
        greedy(17, ignore_eos=True),
        greedy(33, ignore_eos=True),
    ]
    params = [kinds[i % len(kinds)] for i in range(max(len(kinds), len(texts)))]
    return {
        "prompts": [texts[i % len(texts)] for i in range(len(params))],
        "params": params,
    }
