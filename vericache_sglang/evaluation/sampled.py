"""Requests of every sampling kind, for the comparison with plain SGLang.

A wave holds one kind: SGLang's sampler goes one way for a whole batch, so among other
kinds plain SGLang itself gives a seeded request other tokens than alone. Where text
before a position counts, the requests of a wave come one at a time: under overlap plain
SGLang's penalties miss a token whenever a prefill comes between two decode steps. And
requests that are cut (top-k, top-p, min-p; greedy ones have top-k 1) come last: plain
SGLang's batch remembers that it held one, so the next one may be sampled like it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from vericache_sglang.evaluation.workload import code_prompts, record_prompts, spread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

ENGINE: dict[str, Any] = {
    "enable_deterministic_inference": True,
    "enable_custom_logit_processor": True,
    "max_total_tokens": 40000,
}
"""Arguments of both engines; without the first one SGLang drops seeds."""

SETTINGS: dict[str, Any] = {"min_prompt": 64, "draft_length": 8, "keep": 0.25}
"""VeriCache's settings; the residency is to be added."""

REGEX = r"\{\"name\":\"[a-z_]{3,12}\",\"city\":\"[A-Z][a-z]{2,9}\"\}"
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "id": {"type": "integer", "minimum": 0, "maximum": 9999},
        },
        "required": ["name", "id"],
        "additionalProperties": False,
    }
)
EBNF = 'root ::= pair ("," pair)*\npair ::= [a-z]+ "=" [0-9] [0-9] [0-9]? ";"'

LOGPROBS = {
    "return_logprob": True,
    "top_logprobs_num": 3,
    "token_ids_logprob": [20, 30],
}
CUTS = {"top_p", "top_k", "min_p"}
TOP, CHOSEN = "output_top_logprobs", "output_token_ids_logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to choose tokens.

    Attributes:
        name: As it appears in results.
        params: Sampling parameters.
        alone: Its requests come one at a time.
        more: Further fields of the requests.
        processed: They carry the custom logit processor.
        seeded: They have seeds; else SGLang gives them all the same one.
    """

    name: str
    params: dict[str, Any]
    alone: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    processed: bool = False
    seeded: bool = True


def _sampled(temperature: float, **more: object) -> dict[str, Any]:
    return {"temperature": temperature, "ignore_eos": True, **more}


_CUT = {"top_p": 0.95, "top_k": 40, "min_p": 0.02}
_PENALTIES = {
    "frequency_penalty": 0.4,
    "presence_penalty": 0.2,
    "repetition_penalty": 1.1,
}

KINDS = (
    Kind(name="temperature", params=_sampled(0.8)),
    Kind(name="no seed", params=_sampled(0.8), seeded=False),
    Kind(name="top-p", params=_sampled(1.2, top_p=0.9)),
    Kind(name="top-k", params=_sampled(0.8, top_k=20)),
    Kind(name="min-p", params=_sampled(1.0, min_p=0.05)),
    Kind(name="top-p, top-k, min-p", params=_sampled(0.9, **_CUT)),
    Kind(
        name="frequency and presence penalty",
        params=_sampled(0.8, frequency_penalty=0.5, presence_penalty=0.2),
        alone=True,
    ),
    Kind(
        name="repetition penalty, top-k",
        params=_sampled(0.9, repetition_penalty=1.3, top_k=30),
        alone=True,
    ),
    Kind(name="all penalties, greedy", params=_sampled(0.0, **_PENALTIES), alone=True),
    Kind(
        name="every parameter",
        params=_sampled(0.9, **_CUT, **_PENALTIES, logit_bias={"20": -5.0, "30": 2.0}),
        alone=True,
    ),
    Kind(
        name="logit bias",
        params=_sampled(0.8, logit_bias={"20": -50.0, "30": 3.0, "40": 1.5}),
    ),
    Kind(
        name="minimum of new tokens",
        params={"temperature": 0.8, "min_new_tokens": 14},
        alone=True,
    ),
    Kind(name="regex", params={"temperature": 0.9, "regex": REGEX}),
    Kind(name="regex, greedy", params={"temperature": 0.0, "regex": REGEX}),
    Kind(
        name="JSON schema",
        params={"temperature": 0.9, "top_p": 0.9, "json_schema": SCHEMA},
    ),
    Kind(name="EBNF", params={"temperature": 0.9, "ebnf": EBNF}),
    Kind(
        name="custom processor",
        params=_sampled(0.8, custom_params={"by": 2.0, "window": 4}),
        alone=True,
        processed=True,
    ),
    Kind(name="log-probabilities, greedy", params=_sampled(0.0), more=LOGPROBS),
    Kind(name="log-probabilities", params=_sampled(0.8), more=LOGPROBS),
    Kind(
        name="log-probabilities, top-p, top-k, min-p",
        params=_sampled(0.9, **_CUT),
        more=LOGPROBS,
    ),
    # Plain SGLang emits one token behind the end of the grammar.
    Kind(name="regex, end token ignored", params=_sampled(0.9, regex="[a-z ]{30,60}")),
)


def sampled_waves(
    tokenizer: PreTrainedTokenizerBase, each: int, longest: int, tokens: int, seed: int
) -> list[dict[str, Any]]:
    """Draw a wave for every kind, and one of all kinds, one request at a time.

    Args:
        tokenizer: The demo model's.
        each: Requests of each kind; seeds and prompts differ.
        longest: Tokens of the longest prompt; the shortest has 200.
        tokens: Output tokens of a request, at most.
        seed: Other seeds give other prompts and other noise.

    Returns:
        Waves as ``lossless.answer`` takes them, with the ``kind``'s name.
    """
    code = each - each // 3
    # The demo model's distributions are peaked on its documents, flat on source code.
    texts = code_prompts(tokenizer, spread(code, 200, longest), seed)
    texts += record_prompts(tokenizer, spread(each // 3, 200, longest), seed)
    kinds = sorted(KINDS, key=_is_cut)
    waves = [
        {
            "kind": kind.name,
            "prompts": texts,
            "params": [
                _params(kind, tokens, 1000 * seed + 50 * k + i) for i in range(each)
            ],
            "at_once": 1 if kind.alone else 8,
            "more": _more(kind),
        }
        for k, kind in enumerate(kinds)
    ]
    waves[-1]["flush"] = True  # idle: the batch forgets
    simple = [kind for kind in kinds if not kind.more and not kind.processed]
    mixed = {
        "kind": "all kinds, one at a time",
        "prompts": [texts[i % each] for i in range(len(simple))],
        "params": [
            _params(kind, tokens, 2**40 + seed + k) for k, kind in enumerate(simple)
        ],
        "at_once": 1,
    }
    return [*waves, mixed]


def reproducible(waves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what plain SGLang without overlap answers by chance.

    It applies penalties in the order of a set of classes, another one in every process;
    a repetition penalty multiplies, so before or after the others it differs.
    """
    kept = []
    for wave in waves:
        pairs = list(zip(wave["prompts"], wave["params"], strict=True))
        pairs = [pair for pair in pairs if not _is_mixed(pair[1])]
        if pairs:
            prompts, params = map(list, zip(*pairs, strict=True))
            kept.append({**wave, "prompts": prompts, "params": params})
    return kept


def _is_mixed(params: dict[str, Any]) -> bool:
    additive = ("frequency_penalty", "presence_penalty", "min_new_tokens")
    return "repetition_penalty" in params and any(name in params for name in additive)


def logprob_gap(wanted: dict[str, Any], got: dict[str, Any]) -> float:
    """Return the largest difference of two runs' log-probabilities.

    Where two of the most probable tokens are as probable as each other but for
    rounding, the runs may list them in another order, or one of them alone.

    Args:
        wanted: Report of one run; answers without log-probabilities are skipped.
        got: Report of the other.

    Returns:
        0 or more; infinite where one has an entry, or a token, the other has not.
    """
    gap = 0.0
    for plain, ours in zip(wanted["waves"], got["waves"], strict=True):
        for a, b in zip(plain, ours, strict=True):
            pairs = [*zip_longest(_entries(a), _entries(b))]
            for one, other in zip_longest(a.get(TOP) or (), b.get(TOP) or ()):
                pairs += _ranked(one or (), other or ())
            gap = max(gap, max((_distance(*pair) for pair in pairs), default=0.0))
    return gap


def logprob_entries(report: dict[str, Any]) -> int:
    """Count the log-probabilities in a run's answers."""
    return sum(
        len(_entries(answer))
        + sum(len(each or (None,)) for each in answer.get(TOP) or ())
        for wave in report["waves"]
        for answer in wave
    )


def _is_cut(kind: Kind) -> bool:
    return kind.params["temperature"] == 0 or not CUTS.isdisjoint(kind.params)


def _params(kind: Kind, tokens: int, seed: int) -> dict[str, Any]:
    seeds = {"sampling_seed": seed} if kind.seeded else {}
    return {**kind.params, **seeds, "max_new_tokens": tokens}


def _more(kind: Kind) -> dict[str, Any]:
    if not kind.processed:
        return kind.more
    from vericache_sglang.evaluation.processor import Avoid

    return {**kind.more, "custom_logit_processor": Avoid.to_str()}


def _entries(answer: dict[str, Any]) -> list[Any]:
    """List (log-probability, token) of an answer; None where a position has none.

    Those of the most probable tokens are not among them.
    """
    found = [entry[:2] for entry in answer.get("output_token_logprobs") or ()]
    for position in answer.get(CHOSEN) or ():
        found += [None] if position is None else [e[:2] for e in position]
    return found


def _ranked(one: Sequence[Any], other: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Pair a position's most probable tokens by rank and by token.

    A token that only one list has is paired with the last one of the other list.
    """
    for a, b in zip_longest(one, other):
        yield a and (a[0], None), b and (b[0], None)
    for these, those in ((one, other), (other, one)):
        listed = {token: logprob for logprob, token, *_ in those}
        for logprob, token, *_ in these if those else ():
            yield (logprob, None), (listed.get(token, those[-1][0]), None)


def _distance(a: Any, b: Any) -> float:
    if a is None and b is None:
        return 0.0
    if a is None or b is None or a[1] != b[1]:
        return math.inf
    if a[0] == b[0]:
        return 0.0
    # JSON has no infinity: the log-probability of an impossible token is null.
    return math.inf if a[0] is None or b[0] is None else float(abs(a[0] - b[0]))
