"""Child process: one SGLang engine answers the requests of a job file."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

KEEP = ("finish_reason", "cached_tokens", "completion_tokens", "spec_accept_length")
LOGPROBS = tuple(f"output_{name}_logprobs" for name in ("token", "top", "token_ids"))
"""Kept where they were asked for."""


def start(job: dict[str, Any]) -> Any:
    """Start an engine with the job's arguments, settings and environment."""
    os.environ.update(job["environment"])
    settings = job["settings"]
    os.environ["VERICACHE_CONFIG"] = json.dumps(settings) if settings else "off"
    from vericache_sglang.engine.torchvision_ops import define_missing_ops

    define_missing_ops()
    import sglang

    # Engines that start at once would race for the port SGLang finds free.
    arguments = {"nccl_port": 22000 + os.getpid() % 8000, **job["engine"]}
    if settings is not None:
        arguments["speculative_algorithm"] = "VERICACHE"
    return sglang.Engine(**arguments)


def answer(engine: Any, wave: dict[str, Any]) -> list[dict[str, Any]]:
    """Answer one wave: all its requests at once, a few at a time where it says so.

    A wave with ``timed`` is streamed, and its answers say when their tokens came. What
    is under ``more`` is given to every request of it.
    """
    prompts, params = wave["prompts"], wave["params"]
    if wave.get("timed"):
        return engine.loop.run_until_complete(_timed(engine, prompts, params))
    at_once = wave.get("at_once") or len(prompts)
    results: list[dict[str, Any]] = []
    for i in range(0, len(prompts), at_once):
        part = slice(i, i + at_once)
        more = wave.get("more", {})
        results += engine.generate(prompts[part], params[part], **more)
    return [_kept(result) for result in results]


async def _timed(
    engine: Any, prompts: list[str], params: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Stream all requests at once; ``times`` are (seconds, tokens so far)."""
    began = time.perf_counter()

    async def one(prompt: str, param: dict[str, Any]) -> dict[str, Any]:
        times: list[tuple[float, int]] = []
        last: dict[str, Any] = {}
        async for last in await engine.async_generate(prompt, param, stream=True):
            tokens = last["meta_info"]["completion_tokens"]
            times.append((time.perf_counter() - began, tokens))
        return {**_kept(last), "times": times}

    return list(await asyncio.gather(*map(one, prompts, params)))


def _kept(result: dict[str, Any]) -> dict[str, Any]:
    info = result["meta_info"]
    return {
        "ids": result["output_ids"],
        "text": result["text"],
        **{key: info.get(key) for key in KEEP},
        **{key: info[key] for key in LOGPROBS if key in info},
    }


def state(engine: Any) -> dict[str, Any]:
    """Return VeriCache's counters; empty where it is off."""
    info = engine.get_server_info()["internal_states"][0]
    counters: dict[str, Any] = info.get("vericache") or {}
    return counters


def main() -> None:
    """Read ``sys.argv[1]``, answer, write ``sys.argv[2]``."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    engine = start(job)
    waves, seconds = [], []
    for wave in job["waves"]:
        began = time.perf_counter()
        waves.append(answer(engine, wave))
        seconds.append(time.perf_counter() - began)
        if wave.get("flush"):
            engine.flush_cache()
    report = {"waves": waves, "seconds": seconds, "state": state(engine)}
    Path(sys.argv[2]).write_text(json.dumps(report), encoding="utf-8")
    engine.shutdown()


if __name__ == "__main__":
    main()
