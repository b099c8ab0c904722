"""The settings under which answers must be identical: one row a system."""

from __future__ import annotations

from itertools import product
from typing import Any

from lossless.runs import System

SMALL: dict[str, Any] = {"min_prompt": 64, "staging_tokens": 20480}
"""Settings of every row: even short prompts are split; two 8K complements fit."""

TIGHT: dict[str, Any] = {"max_total_tokens": 11000}
"""A pool that holds the longest prompt and little else: waiting and eviction."""


def system(
    name: str,
    *,
    engine: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    **settings: object,
) -> System:
    """Describe one VeriCache row."""
    return System(
        name=name,
        settings={**SMALL, **settings},
        engine=engine or {},
        environment=environment or {},
    )


PLAIN = System(name="plain SGLang", settings=None)

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
        environment={
            "SGLANG_TEST_RETRACT": "1",
            "SGLANG_TEST_RETRACT_INTERVAL": "12",
        },
    ),
    system(
        "random tokens kept, draft 8, a link so slow that reloads are late",
        compressor="test-random",
        draft_length=8,
        link_gbps=0.05,
    ),
    system(
        "scores all NaN, page 16, draft 4",
        compressor="test-nan",
        draft_length=4,
        keep=0.1,
        engine={"page_size": 16},
    ),
)
"""What the test suite runs: every feature and every value of each knob once."""


def full() -> list[System]:
    """Return the whole matrix: COVERING, and the product of the main knobs."""
    rows = list(COVERING)
    for draft, keep, page in product((1, 4, 16, 32), (0.1, 0.25, 0.5, 0.9), (1, 16)):
        # Every second cell without overlap, every third with small chunks.
        cell = len(rows)
        engine: dict[str, Any] = {"page_size": page}
        if cell % 2:
            engine["disable_overlap_schedule"] = True
        if cell % 3 == 0:
            engine["chunked_prefill_size"] = 512
        compressor = ("keynorm", "recency", "test-random")[cell % 3]
        name = f"{compressor}, draft {draft}, keep {keep}, {engine}"
        rows.append(
            system(
                name,
                compressor=compressor,
                draft_length=draft,
                keep=keep,
                engine=engine,
            )
        )
    return rows
