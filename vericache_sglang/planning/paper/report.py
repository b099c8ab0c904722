"""The paper-vs-ours page: all claims, shared assumptions, and omissions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.planning.paper.assumptions import SHARED
from vericache_sglang.planning.paper.claim import table
from vericache_sglang.planning.paper.examples import (
    background,
    composition,
    worked_example,
)
from vericache_sglang.planning.paper.long_context import (
    budget_sweep,
    end_to_end,
    ideal_curve,
    link_sweep,
)
from vericache_sglang.planning.paper.remote import remote_prefix, sweep_peaks

if TYPE_CHECKING:
    from vericache_sglang.planning.paper.claim import Claim

COMMAND = "python -m vericache_sglang.plan --paper"

NOT_COMPUTED = (
    "up to 4.26x with EAGLE3 (Qwen-32B) and Eagle's own 1.78x: neither the drafter's "
    "acceptance nor its cost is in the text",
    "up to 3.82x at the quality figure (Llama-70B): its ratio and draft length are not "
    "given",
    "339 and 385 tok/s on LongGenBench and GSM8K-Long, 1.4x to 1.9x over four other "
    "compressors: acceptance not given",
)


def all_claims() -> tuple[Claim, ...]:
    """Return every claim, in the order of the paper."""
    return (
        *background(),
        *worked_example(),
        *ideal_curve(),
        *composition(),
        *end_to_end(),
        *budget_sweep(),
        *link_sweep(),
        *remote_prefix(),
        *sweep_peaks(),
    )


def page(claims: tuple[Claim, ...]) -> str:
    """Return the page of ``all_claims`` as Markdown."""
    parts = [
        "# The paper's figures and ours",
        f"Written by `{COMMAND}`. Ours are computed from the equations of "
        "arXiv:2605.17613 by `vericache_sglang/planning`, never fitted to a row; none "
        "is a measurement. A gap is ours over the paper's, minus 1.",
        "Assumed in every row that does not say otherwise:",
        "\n".join(f"- {line};" for line in SHARED[:-1]) + f"\n- {SHARED[-1]}.",
        table(claims),
        "Printed by the paper and not computed here:",
        "\n".join(f"- {line};" for line in NOT_COMPUTED[:-1])
        + f"\n- {NOT_COMPUTED[-1]}.",
    ]
    return "\n\n".join(parts) + "\n"
