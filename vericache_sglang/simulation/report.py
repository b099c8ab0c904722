"""The table of policies as text, Markdown and JSON; each is marked SIMULATED."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vericache_sglang.former_names import with_former_names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vericache_sglang.simulation.metrics import Result
    from vericache_sglang.simulation.policies import Policy

LABEL = "SIMULATED: no GPU ran; the runtime's decisions on modelled hardware."


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of the table.

    Attributes:
        title: With its unit.
        show: Formats a result, given the first one as the baseline.
    """

    title: str
    show: Callable[[Result, Result], str]


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"


COLUMNS = (
    Column("policy", lambda row, _: row.policy),
    Column("tokens/s", lambda row, _: f"{row.tokens_per_s:.1f}"),
    Column("ratio", lambda row, base: f"{_ratio(row, base):.2f}"),
    Column("requests", lambda row, _: f"{row.batch:.1f}"),
    Column(
        "accepted of drafted",
        lambda row, _: f"{row.accepted:.1f} of {row.drafted:.1f}",
    ),
    Column("link in %", lambda row, _: _percent(row.link_in_share)),
    Column("HBM %", lambda row, _: _percent(row.hbm_share)),
    Column("FLOPs %", lambda row, _: _percent(row.compute_share)),
    Column("waiting %", lambda row, _: _percent(row.wait_share)),
    Column("staged GB", lambda row, _: f"{row.peak_staged_bytes / 1e9:.1f}"),
    Column(
        "ms/token p50, p99",
        lambda row, _: f"{row.itl_p50_s * 1e3:.0f}, {row.itl_p99_s * 1e3:.0f}",
    ),
    Column("burst gap p99 s", lambda row, _: f"{row.burst_p99_s:.2f}"),
    Column(
        "swapped out (p99 s)",
        lambda row, _: f"{row.swapped} ({row.swapped_p99_s:.1f})",
    ),
    Column("retracted", lambda row, _: str(row.retractions)),
    Column("deadline misses", lambda row, _: str(row.deadline_misses)),
)


def _ratio(row: Result, base: Result) -> float:
    return row.tokens_per_s / base.tokens_per_s if base.tokens_per_s else 0.0


def table(results: Sequence[Result]) -> str:
    """Return the results as a Markdown table, ratios to the first row."""
    cells = [[column.title for column in COLUMNS]]
    cells += [[column.show(row, results[0]) for column in COLUMNS] for row in results]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def section(
    name: str, results: Sequence[Result], assumptions: Mapping[str, object]
) -> str:
    """Return one preset's section of a Markdown page."""
    assumed = "; ".join(f"{key} {value}" for key, value in assumptions.items())
    return f"## {name} (SIMULATED)\n\n{table(results)}\n\nAssumed: {assumed}.\n"


def as_json(
    results: Sequence[Result],
    policies: Sequence[Policy],
    assumptions: Mapping[str, object],
) -> dict[str, Any]:
    """Return one preset's figures with the assumptions behind them."""
    return {
        "simulated": True,
        "assumptions": dict(assumptions),
        "policies": [
            {
                **asdict(policy),
                "ratio_to_first": _ratio(row, results[0]),
                "result": with_former_names("simulation", asdict(row)),
            }
            for policy, row in zip(policies, results, strict=True)
        ],
    }
