"""The report of ``split-planes``: a printed table and JSON."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vericache_sglang.calibrate.acceptance import Cycles, perfect
from vericache_sglang.calibrate.planes import PlaneChoice, Point, speedup
from vericache_sglang.former_names import with_former_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vericache_sglang.calibrate.acceptance import Reading
    from vericache_sglang.compression.codecs.artifact import CalibratedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Conditions of the measurement.

    Attributes:
        origin: See ``provenance``.
        model: Name of the measured model.
        device: Torch device.
        dtype: Dtype of the KV.
        ratio: Bandwidth of the host link over that of device memory.
        prompts: Number of prompts.
        prompt_tokens: Mean length of the prompts.
        answer_tokens: Mean length of the answers.
        limit: Largest possible acceptance length by draft length; below the draft
            length because answers end.
    """

    origin: dict[str, Any]
    model: CalibratedModel
    device: str
    dtype: str
    ratio: float
    prompts: int
    prompt_tokens: float
    answer_tokens: float
    limit: Mapping[int, Cycles]


def limits(readings: Sequence[Reading], lengths: Sequence[int]) -> dict[int, Cycles]:
    """Return the acceptance counts of always accepted drafts, by draft length."""
    return {
        length: sum((perfect(reading, length) for reading in readings), Cycles())
        for length in lengths
    }


def markdown(setting: Setting, points: Sequence[Point], choice: PlaneChoice) -> str:
    """Return the table with its header and footer."""
    lengths = list(setting.limit)
    drafts = "/".join(map(str, lengths))
    head = [
        "draft KV",
        "c",
        "transfer",
        "key error",
        "value error",
        f"accepted of {drafts} drafts",
        "speedup at most (drafts)",
    ]
    rows = [head, ["---"] * len(head)]
    rows.append(["all accepted", "", "", "0", "0", _accepted(setting.limit), ""])
    rows += [_row(point, setting.ratio) for point in points]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    about = (
        f"{setting.prompts} prompts of {setting.prompt_tokens:.0f} tokens and greedy "
        f"answers of {setting.answer_tokens:.1f}, on average; {setting.dtype} KV. "
        "Accepted drafts are a simulation: teacher-forced on the answer, with the "
        "whole prompt drafted from. c and transfer are measured bytes over those of "
        "the KV. The speedup is a ceiling, not a prediction: accepted drafts and one "
        "token more over the time of a round, against full-KV decoding limited by "
        "reads of KV, "
        f"with a host link of {setting.ratio:g} of the device memory's bandwidth."
    )
    chosen = (
        f"Chosen: `{choice.line}` with drafts of {choice.draft_length}, "
        f"{choice.accepted:.1f} accepted, {choice.speedup:.2f}x at most."
    )
    parts = [
        f"# Draft planes of {setting.model.name}",
        f"    {setting.origin['command']}",
        textwrap.fill(about, 88),
        table,
        textwrap.fill(chosen, 88),
    ]
    return "\n\n".join(parts) + "\n"


def as_json(
    setting: Setting, points: Sequence[Point], choice: PlaneChoice
) -> dict[str, Any]:
    """Return the report as a JSON object."""
    return {
        "provenance": setting.origin,
        "model": asdict(setting.model),
        "device": setting.device,
        "kv_dtype": setting.dtype,
        "link_over_memory": setting.ratio,
        "prompts": setting.prompts,
        "prompt_tokens": round(setting.prompt_tokens, 1),
        "answer_tokens": round(setting.answer_tokens, 1),
        "all_accepted": {x: round(r.mean, 3) for x, r in setting.limit.items()},
        "points": [_point(point, setting.ratio) for point in points],
        "choice": {
            "compressor": choice.line,
            "draft_length": choice.draft_length,
            "accepted": round(choice.accepted, 3),
            "speedup_at_most": round(choice.speedup, 3),
        },
    }


def _accepted(cycles: Mapping[int, Cycles]) -> str:
    return " / ".join(f"{found.mean:.1f}" for found in cycles.values())


def _row(point: Point, ratio: float) -> list[str]:
    most, length = max((speedup(point, x, ratio), -x) for x in point.cycles)
    return [
        f"`{point.line}`",
        f"{point.keep:.3f}",
        f"{point.transfer:.3f}",
        f"{point.key_error:.4f}",
        f"{point.value_error:.4f}",
        _accepted(point.cycles),
        f"{most:.2f} ({-length})",
    ]


def _point(point: Point, ratio: float) -> dict[str, Any]:
    counts = {
        x: with_former_names("calibration", asdict(counted))
        for x, counted in point.cycles.items()
    }
    row = {
        "compressor": point.line,
        "keep": round(point.keep, 5),
        "transfer_fraction": round(point.transfer, 5),
        "key_error": round(point.key_error, 6),
        "value_error": round(point.value_error, 6),
        "accepted": {x: round(r.mean, 3) for x, r in point.cycles.items()},
        "cycles": counts,
        "speedup_at_most": {
            x: round(speedup(point, x, ratio), 3) for x in point.cycles
        },
    }
    return with_former_names("calibration", row)
