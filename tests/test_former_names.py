"""A former name has the value of the present one wherever users meet it."""

import json

import pytest

from vericache_sglang import compressors
from vericache_sglang.calibrate.acceptance import Cycles
from vericache_sglang.calibrate.planes import PlaneChoice, Point
from vericache_sglang.calibrate.report import Setting
from vericache_sglang.calibrate.report import as_json as calibrated
from vericache_sglang.compression.codecs.artifact import CalibratedModel
from vericache_sglang.config.files import ENV, load_config
from vericache_sglang.former_names import FORMER_NAMES, with_former_names
from vericache_sglang.observability.counters import MOVES
from vericache_sglang.observability.prometheus import Metrics
from vericache_sglang.observability.record import IterationRecord
from vericache_sglang.observability.request_stats import RequestStats
from vericache_sglang.observability.table import TABLE
from vericache_sglang.observability.trace import Trace
from vericache_sglang.scheduling.plan import Compress, Residency
from vericache_sglang.serving.live_page import TIERS, cache_tiers
from vericache_sglang.simulation.metrics import Result
from vericache_sglang.simulation.policies import policies
from vericache_sglang.simulation.report import as_json

prometheus_client = pytest.importorskip("prometheus_client")

REPORT = {
    key: i
    for i, key in enumerate(
        key for row in TABLE for key in (*row.samples.values(), *row.told.values())
    )
}
"""A worker's report in which every figure has a value of its own."""


def at(values, path):
    for name in path.split("."):
        values = values[name]
    return values


class Reader:
    """Reads the value of a name; one method for each place."""

    def __init__(self, folder, capsys):
        self.folder, self.capsys = folder, capsys

    def setting(self, name):
        return load_config(None, {name: 0.5})

    def metric(self, name):
        registry = prometheus_client.CollectorRegistry()
        Metrics({"model_name": "m"}, lambda: REPORT, registry=registry)
        family, _, label = name.removesuffix("}").partition("{")
        own = {"model_name": "m", **dict([label.split("=")] if label else [])}
        if family in ("draft_part_slots", "shared_draft_slots"):
            own["state"] = "used"
        totals = registry.get_sample_value(f"vericache_{family}_total", own)
        gauge = registry.get_sample_value(f"vericache_{family}", own)
        assert (totals is None) != (gauge is None), name
        return gauge if totals is None else totals

    def report(self, name):
        return with_former_names("report", REPORT)[name]

    def cache(self, name):
        return at(cache_tiers(REPORT), name)

    def meta_info(self, name):
        stats = RequestStats(True, 4)
        stats.note_cycle(4, 2)
        stats.moves.update({move: i for i, move in enumerate(MOVES.values(), 1)})
        return at(stats.report(), name)

    def ring(self, name):
        (levels,) = (e["args"] for e in self._events() if e["name"] == "ring link")
        return with_former_names("ring", {"iterations": 7} | levels)[name]

    def move(self, name):
        (found,) = (
            (event["name"], event["args"]["former_name"])
            for event in self._events()
            if name in (event["name"], event["args"].get("former_name"))
        )
        return found

    def _events(self):
        kinds = [kind for kind in MOVES if kind is not Compress]
        moves = (Compress("r", Residency.HOST), *(kind("r") for kind in kinds))
        trace = Trace(self.folder / "trace", "test")
        trace.iteration(IterationRecord(1, 0.0, 1.0, (), moves, (), {"link": (3, 4)}))
        trace.close()
        return json.loads((self.folder / "trace").read_text())

    def listing(self, name):
        compressors.main(["--json"])
        return json.loads(self.capsys.readouterr().out)[name]

    def simulation(self, name):
        fields = dict.fromkeys(Result.__dataclass_fields__, 1)
        row = Result(**fields | {"held": {}, "deadline_misses": 9})
        (shown,) = as_json([row], [policies(0.25)["staggered"]], {})["policies"]
        return shown["result"][name]

    def calibration(self, name):
        point = Point("kivi", 0.25, 0.5, 0.0, 0.0, {4: Cycles(7, 28, 20)})
        model = CalibratedModel(
            name="m", fingerprint="f", layers=2, kv_heads=1, head_dim=8
        )
        setting = Setting(
            **dict.fromkeys(("device", "dtype"), ""),
            **dict.fromkeys(("prompts", "prompt_tokens", "answer_tokens"), 1),
            **{"origin": {}, "model": model, "ratio": 0.1, "limit": {}},
        )
        (shown,) = calibrated(setting, [point], PlaneChoice("", 4, 5.0, 1.0))["points"]
        return shown[name], shown["cycles"][4][name]


@pytest.mark.parametrize(
    ("place", "old", "new"),
    [
        pytest.param(place, old, new, id=f"{place}-{old}")
        for place, names in FORMER_NAMES.items()
        for old, new in names.items()
    ],
)
def test_a_former_name_has_the_value_of_the_present_one(
    tmp_path, monkeypatch, capsys, place, old, new
):
    monkeypatch.delenv(ENV, raising=False)
    value_of = getattr(Reader(tmp_path, capsys), place)
    assert value_of(old) == value_of(new)


def test_no_present_name_is_a_former_one():
    for names in FORMER_NAMES.values():
        changed = {old for old, new in names.items() if old != new}
        assert not changed & {*names.values()}
    keys = {key for row in TABLE for key in row.samples.values()}
    assert not keys & FORMER_NAMES["report"].keys()
    assert FORMER_NAMES["report"].keys() & {*TIERS["host"].values()} == set()


def test_statistics_without_moves_have_both_dictionaries():
    report = RequestStats(True, 4).report()
    assert report["residency_changes"] == report["kv_moves"] == {}
