"""Former public names: each stays an alias of its present name for one version.

Settings under a former name are accepted; answers, metrics and trace events carry both
names. Nothing else in the package knows a former name: without its entry it is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Place = Literal[
    "setting",
    "metric",
    "report",
    "ring",
    "cache",
    "meta_info",
    "move",
    "listing",
    "simulation",
    "calibration",
]

REMOVED_IN = "0.2"
"""Version in which the former names go."""

_MOVES = {
    "split": "compress",
    "unsplit": "fall_back",
    "offload": "offload",
    "pin": "load",
    "park": "swap_out",
    "resume": "swap_in",
}

FORMER_NAMES: Mapping[Place, Mapping[str, str]] = {
    "setting": {"shadow_rate": "consistency_check_rate"},
    "metric": {
        "slips": "deadline_misses",
        "unplaced_rounds": "unplaced_cycles",
        "requests{residency=device}": "speculating_requests{residency=device}",
        "requests{residency=host}": "speculating_requests{residency=host}",
        "requests{residency=parked}": "speculating_requests{residency=swapped_out}",
        **{
            f"moves{{move={old}}}": f"kv_moves{{move={new}}}"
            for old, new in _MOVES.items()
        },
        "steps_aside": "disabled_speculations",
        "joins": "restores",
        "cached_host_bytes{form=all}": "cache_host_bytes{form=all}",
        "cached_host_bytes{form=complement}": "cache_host_bytes{form=residual}",
        "draft_part_slots": "shared_draft_slots",
        "reload_seconds": "prefetch_seconds",
        "shared_reloads": "shared_prefetches",
        "failed_reloads": "failed_prefetches",
        "shadow_checks": "consistency_checks",
        "shadow_mismatches": "consistency_mismatches",
        "shadow_dropped": "consistency_dropped",
        "shadow_pending": "consistency_pending",
    },
    "report": {
        "rounds": "cycles",
        "slips": "deadline_misses",
        "unplaced_rounds": "unplaced_cycles",
        "ring_windows": "ring_iterations",
        "requests_parked": "requests_swapped_out",
        "splits": "compressions",
        "unsplits": "fallbacks",
        "pins": "loads",
        "parks": "swap_outs",
        "resumes": "swap_ins",
        "steps_aside": "disabled_speculations",
        "joins": "restores",
        "cache_complement_bytes": "cache_residual_bytes",
        "stage_seconds": "prefetch_seconds",
        "shared_reloads": "shared_prefetches",
        "failed_reloads": "failed_prefetches",
        "split_s_per_token": "compress_s_per_token",
        "shadow_checks": "consistency_checks",
        "shadow_mismatches": "consistency_mismatches",
        "shadow_dropped": "consistency_dropped",
        "shadow_pending": "consistency_pending",
    },
    "ring": {"windows": "iterations", "window": "iteration"},
    "cache": {
        "device.draft_part_slots": "device.draft_slots",
        "device.draft_part_slots_used": "device.draft_slots_used",
        "host.complement_bytes": "host.residual_bytes",
    },
    "meta_info": {
        "rounds": "cycles",
        **{
            f"residency_changes.{old}": f"kv_moves.{new}" for old, new in _MOVES.items()
        },
    },
    "move": _MOVES,
    "listing": {"extent": "shape"},
    "simulation": {"slips": "deadline_misses"},
    "calibration": {"rounds": "cycles"},
}
"""Place -> former name -> present one.

setting: flag and YAML key. metric: Prometheus name without prefix and ``_total``, for
one sample where the value of its label changed too. report: key of ``GET /server_info``
and ``GET /vericache/state``. ring: key of a ring there and in a trace. cache: key of
``GET /vericache/cache``. meta_info: key of a request's statistics. move: event of a
trace. listing: key of ``compressors --json``. simulation: key of a result of ``simulate
--json``. calibration: key of a point of calibrate's JSON report, and of its counts. A
dot separates a key from that of the dictionary it is in.
"""


def with_former_names(place: Place, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``values`` that has each value under its former names too.

    Args:
        place: Which names; see ``FORMER_NAMES``.
        values: Values by present name; names that are missing get no alias. At most one
            level of dictionaries, which are not changed.
    """
    known = dict(values)
    for old, new in FORMER_NAMES[place].items():
        folder, _, key = new.rpartition(".")
        source = known.get(folder) if folder else known
        if source is None:
            continue
        former_folder, _, former_key = old.rpartition(".")
        target = known
        if former_folder:
            target = known[former_folder] = dict(known.get(former_folder, {}))
        if key in source:
            target[former_key] = source[key]
    return known
