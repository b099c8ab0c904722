"""Answers of a system to waves of requests, compared token by token with another's.

A wave is a mapping: ``prompts``, their sampling ``params``, and optionally ``at_once``
(requests sent together; all of them by default), ``more`` (further fields of every
request) and ``flush`` (empty the prefix cache afterwards).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vericache_sglang.evaluation.fleet import served
from vericache_sglang.evaluation.workload import code_prompts, record_prompts, spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from vericache_sglang.evaluation.server import Server, Starter
    from vericache_sglang.evaluation.systems import System

KEPT = ("finish_reason", "cached_tokens", "prompt_tokens", "vericache")
LOGPROBS = tuple(f"output_{name}_logprobs" for name in ("token", "top", "token_ids"))
"""Entries of ``meta_info`` stored with an answer; log-probabilities if requested."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first difference between two answers to one request.

    Attributes:
        wave: Index of the wave.
        request: Index of the request in its wave.
        position: First differing token, in output tokens; -1 for a finish reason.
        wanted: What the reference emitted from there on, up to eight tokens.
        got: What the other system emitted there.
    """

    wave: int
    request: int
    position: int
    wanted: str
    got: str


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
    lengths = [40 + i % 3 * 24 for i in range(prompts)]
    return [
        {"prompts": texts, "params": [greedy(n, ignore_eos=True) for n in lengths]},
        {"prompts": texts, "params": [greedy(64) for _ in texts], "flush": True},
        _ends(short),
        {"prompts": short[-3:], "params": [greedy(24, ignore_eos=True, n=2)] * 3},
        {
            "prompts": texts[1:4],
            "params": [greedy(24, ignore_eos=True)] * 3,
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
        *(greedy(tokens, ignore_eos=True) for tokens in (2, 5, 17, 33)),
    ]
    count = max(len(kinds), len(texts))
    return {
        "prompts": [texts[i % len(texts)] for i in range(count)],
        "params": [kinds[i % len(kinds)] for i in range(count)],
    }


def answer(server: Server, wave: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Answer one wave.

    Returns:
        For each request ``ids`` (output tokens), ``text`` and what ``KEPT`` names.

    Raises:
        ServerError: The server does not answer, or refuses.
    """
    prompts, params = wave["prompts"], wave["params"]
    at_once = wave.get("at_once") or len(prompts)
    results: list[dict[str, Any]] = []
    for i in range(0, len(prompts), at_once):
        part = slice(i, i + at_once)
        body = {"text": prompts[part], "sampling_params": params[part]}
        results += server.generate({**body, **wave.get("more", {})})
    return [_kept(result) for result in results]


def bodies(wave: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a wave as bodies of ``POST /generate``, one for each request."""
    return [
        {"text": text, "sampling_params": params, **wave.get("more", {})}
        for text, params in zip(wave["prompts"], wave["params"], strict=True)
    ]


def _kept(result: Mapping[str, Any]) -> dict[str, Any]:
    info = result["meta_info"]
    return {
        "ids": result["output_ids"],
        "text": result["text"],
        **{key: info.get(key) for key in KEPT},
        **{key: info[key] for key in LOGPROBS if key in info},
    }


def run(
    system: System,
    model: Path,
    waves: Sequence[Mapping[str, Any]],
    start: Starter | None = None,
) -> dict[str, Any]:
    """Answer waves with a server of its own, under SGLang's strict memory checks.

    Args:
        system: How to serve.
        model: Folder of the model.
        waves: See the module.
        start: See ``served``.

    Returns:
        ``waves`` (answers), ``seconds`` per wave and ``state`` (VeriCache's counters).

    Raises:
        ServerError: The server failed; the message ends with the end of its log.
    """
    answers, seconds = [], []
    with served(system, model, checked=True, start=start) as server:
        for wave in waves:
            began = time.perf_counter()
            answers.append(answer(server, wave))
            seconds.append(time.perf_counter() - began)
            if wave.get("flush"):
                server.flush()
        return {"waves": answers, "seconds": seconds, "state": server.counters()}


def compare(wanted: Mapping[str, Any], got: Mapping[str, Any]) -> list[Mismatch]:
    """List every request whose tokens or finish reason differ.

    Args:
        wanted: What ``run`` returned for the reference; only ``waves`` is read.
        got: The same of the other system.
    """
    return [
        found
        for w, pair in enumerate(zip(wanted["waves"], got["waves"], strict=True))
        for r, (a, b) in enumerate(zip(*pair, strict=True))
        if (found := _mismatch(w, r, a, b)) is not None
    ]


def _mismatch(wave: int, request: int, a: Any, b: Any) -> Mismatch | None:
    ids, others = a["ids"], b["ids"]
    if ids != others:
        shared = min(len(ids), len(others))
        at = next((i for i in range(shared) if ids[i] != others[i]), shared)
        parts = str(ids[at : at + 8]), str(others[at : at + 8])
        return Mismatch(wave, request, at, *parts)
    if a["finish_reason"] != b["finish_reason"]:
        reasons = str(a["finish_reason"]), str(b["finish_reason"])
        return Mismatch(wave, request, -1, *reasons)
    return None


def differing(wanted: Sequence[Any], got: Sequence[Any]) -> int:
    """Count the requests of one wave whose tokens or finish reason differ."""
    return len(compare({"waves": [wanted]}, {"waves": [got]}))


def tokens(report: Mapping[str, Any]) -> int:
    """Count the output tokens of a run."""
    return sum(len(answer["ids"]) for wave in report["waves"] for answer in wave)
