"""The settings under which answers must be identical: one row per system."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vericache_sglang.evaluation.altered import GUESSES
from vericache_sglang.evaluation.benchmark import DEMO, DEMO_DRAFT, DEMO_HEAD
from vericache_sglang.evaluation.systems import described

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vericache_sglang.evaluation.systems import System

TABLES = DEMO / "calibration"
"""Calibration files of the demo model."""

SMALL: dict[str, Any] = {
    "compressor": "keynorm",
    "min_prompt": 64,
    "staging_tokens": 20480,
    "residency": "host",
}
"""Settings a row may override: every prompt is compressed, although the throughput
model would not for requests this small; two 8K residuals fit the staging buffer."""

TIGHT: dict[str, Any] = {"max_total_tokens": 11000}
"""A pool little larger than the longest prompt: forces queueing and eviction."""


def system(
    name: str,
    *,
    engine: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    **settings: object,
) -> System:
    """Describe one VeriCache row.

    Args:
        name: As it appears in results.
        engine: See ``described``.
        environment: See ``System``.
        settings: VeriCache's, beyond ``SMALL``.
    """
    settings = {**SMALL, **settings}
    return described(name, settings, engine, environment=environment or {})


RETRACTED = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "48"}
"""Variables under which SGLang retracts every request that runs for long."""

PLAIN = described("plain SGLang")

COVERING = (
    system("draft 16, keep 0.25", draft_length=16, keep=0.25),
    system(
        "page 16, chunks of 256, draft 4, keep 0.1, recency",
        draft_length=4,
        keep=0.1,
        compressor="recency",
        engine={"page_size": 16, "chunked_prefill_size": 256},
    ),
    system(
        "no overlap, draft 1, keep 0.5",
        draft_length=1,
        keep=0.5,
        engine={"disable_overlap_schedule": True},
    ),
    system(
        "no radix cache, page 16, draft 32, keep 0.9",
        draft_length=32,
        keep=0.9,
        engine={"disable_radix_cache": True, "page_size": 16},
    ),
    system(
        "forced retraction, tight pool, chunks of 512, draft 8",
        draft_length=8,
        keep=0.25,
        engine={**TIGHT, "chunked_prefill_size": 512},
        environment=RETRACTED,
    ),
    system(
        "snapkv, keep 0.125, draft 32, page 16, chunks of 256",
        compressor="snapkv",
        draft_length=32,
        keep=0.125,
        engine={"page_size": 16, "chunked_prefill_size": 256},
    ),
    system(
        "random tokens kept, draft 8, a link so slow that prefetches are late",
        compressor="random",
        draft_length=8,
        link_gbps=0.05,
    ),
    system(
        "residual KV stays on the device, page 16, draft 8",
        residency="device",
        draft_length=8,
        engine={"page_size": 16},
    ),
    system(
        "on the device, no radix cache, no overlap, draft 16",
        residency="device",
        draft_length=16,
        engine={"disable_radix_cache": True, "disable_overlap_schedule": True},
    ),
    system(
        "lock-step, draft 8",
        pacing="lockstep",
        draft_length=8,
        max_verifies=16,
        staging_tokens=65536,
    ),
    system("sequential, draft 4", pacing="sequential", draft_length=4),
)
"""Rows of the test suite: every feature and every value of each setting once."""

TWO_RANKS = system(
    "two tensor-parallel ranks, the model decides, page 16, draft 16",
    residency="auto",
    draft_length=16,
    engine={"tp_size": 2, "page_size": 16},
)
"""The row with two ranks, tested in tests/lossless/test_tensor_parallel.py."""


METHODS = (
    "snapkv",
    "keynorm",
    "recency",
    "random",
    "expected-attention",
    "observed",
    "kvzip",
    "kvzip:plus=true",
    f"kvzap:weights={DEMO}/kvzap-linear",
    f"kvzap:weights={DEMO}/kvzap-mlp",
    f"kvzap:weights={DEMO}/kvzap-mlp,threshold=-6",
    "kivi:bits=2",
    "kivi:bits=4",
    f"kvquant:tables={TABLES}/kvquant-2bit.safetensors",
    f"kvquant:tables={TABLES}/kvquant-4bit.safetensors",
    f"rotatekv:tables={TABLES}/rotatekv.safetensors,bits=2",
    f"rotatekv:tables={TABLES}/rotatekv.safetensors,bits=3",
    f"rotatekv:tables={TABLES}/rotatekv.safetensors,bits=4,clip=1.0",
    "turboquant:bits=2",
    "turboquant:bits=4",
    "split-planes:exponent_bits=4,mantissa_bits=3",
    "split-planes:exponent_bits=3,mantissa_bits=2",
    "split-planes:exponent_bits=3,mantissa_bits=1",
    "split-planes:exponent_bits=3,mantissa_bits=0",
    "snapkv+split-planes:exponent_bits=3,mantissa_bits=1",
    "kvzip+kivi:bits=4",
    "expected-attention+turboquant:bits=3",
)
"""Every compressor, and pairs of them."""

PLACES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("on the host", {"residency": "host", "keep": 0.25, "draft_length": 16}, {}),
    (
        "over a slow link",
        {"residency": "host", "keep": 0.125, "draft_length": 8, "link_gbps": 0.2},
        {"chunked_prefill_size": 512},
    ),
    (
        "on the device",
        {"residency": "device", "keep": 0.5, "draft_length": 4},
        {"page_size": 16, "chunked_prefill_size": 512},
    ),
)
"""Placements of the residual KV, each with a kept share and a draft length. The host is
the long-context scenario; a slow link emulates a remote prefix."""


def methods(
    place: int | None = None, compressors: Sequence[str] = METHODS
) -> list[System]:
    """Return every method with every placement.

    Args:
        place: Index into ``PLACES``; None: all placements.
        compressors: As ``--vericache-compressor`` takes them.
    """
    places = PLACES if place is None else PLACES[place : place + 1]
    return [
        system(
            f"{line.replace(f'{DEMO}/', '')}, {where}",
            compressor=line,
            engine=engine,
            **settings,
        )
        for line in compressors
        for where, settings, engine in places
    ]


def _small_model(folder: Path) -> dict[str, Any]:
    return {"speculative_draft_model_path": str(folder)}


DRAFTERS: Mapping[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "prompt lookup": ({"inner": "ngram"}, {}, ""),
    "random tokens": ({"inner": "ngram"}, {}, GUESSES),
    "a small model": (
        {"inner": "model"},
        _small_model(DEMO_DRAFT),
        "",
    ),
    "an EAGLE3 head": ({"inner": "eagle3"}, _small_model(DEMO_HEAD), ""),
    "the model itself": (
        {"inner": "model", "inner_window": 4096},
        _small_model(DEMO),
        "",
    ),
}
"""Inner drafters: settings, arguments of the engine, and the alteration of the server.
The model itself foresees what it will say, but for texts beyond its window."""

DRAFTED: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("on the host", {"draft_length": 16, "keep": 0.5}, {}),
    (
        "on the device, page 16, chunks of 256",
        {"residency": "device", "draft_length": 8},
        {"page_size": 16, "chunked_prefill_size": 256},
    ),
    (
        "forced retraction, tight pool, no overlap",
        {"draft_length": 8, "keep": 0.25},
        {**TIGHT, "disable_overlap_schedule": True},
    ),
    ("never compressed", {"min_prompt": 1 << 20}, {}),
    (
        "packed, on the host",
        {
            "compressor": "snapkv+split-planes:exponent_bits=3,mantissa_bits=1",
            "draft_length": 16,
            "keep": 0.5,
        },
        {},
    ),
    (
        "packed, on the device, page 16, no overlap",
        {"compressor": "kivi:bits=4", "residency": "device", "draft_length": 8},
        {"page_size": 16, "disable_overlap_schedule": True},
    ),
)
"""Where every inner drafter proposes."""


def drafters() -> list[System]:
    """Return every inner drafter at every place, and one on two ranks."""
    rows = []
    for name, (settings, engine, alteration) in DRAFTERS.items():
        for where, more, arguments in DRAFTED:
            row = system(
                f"{name}, {where}",
                engine={**engine, **arguments},
                environment=RETRACTED if arguments.keys() >= TIGHT.keys() else None,
                inner_length=4,
                **{**settings, **more},
            )
            rows.append(replace(row, alteration=alteration))
    two = system("prompt lookup, two ranks", engine={"tp_size": 2}, inner="ngram")
    return [*rows, two]


def full() -> list[System]:
    """Return the whole matrix: COVERING, two ranks, and draft length x kept share.

    Page size, overlap, chunking, compressor and residency vary from cell to cell, so
    that each of their values is combined with every draft length and kept share.
    """
    rows = [*COVERING, TWO_RANKS]
    for d, draft in enumerate((1, 4, 16, 32)):
        for k, keep in enumerate((0.1, 0.25, 0.5, 0.9)):
            engine: dict[str, Any] = {"page_size": (1, 16)[(d + k) % 2]}
            if (d + k // 2) % 2:
                engine["disable_overlap_schedule"] = True
            if (d + k) % 3 == 0:
                engine["chunked_prefill_size"] = 512
            compressor = ("keynorm", "recency", "random", "snapkv")[(d - k) % 4]
            rows.append(
                system(
                    f"{compressor}, draft {draft}, keep {keep}, {engine}",
                    compressor=compressor,
                    draft_length=draft,
                    keep=keep,
                    residency=("host", "device")[(d + 2 * k) % 3 == 0],
                    engine=engine,
                )
            )
    return rows
