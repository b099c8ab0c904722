"""A former name has the value of the present one wherever users meet it."""

import json
from types import SimpleNamespace

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


@pytest.fixture
def read(tmp_path, monkeypatch, capsys):
    """Return by place what reads the value of a name there."""
    monkeypatch.delenv(ENV, raising=False)
    registry = prometheus_client.CollectorRegistry()
    Metrics({"model_name": "m"}, lambda: REPORT, registry=registry)

    def setting(name):
        return load_config(None, {name: 0.5})

    def metric(name):
        family, _, labels = name.removesuffix("}").partition("{")
        own = dict([labels.split("=")]) if labels else {}
        own["model_name"] = "m"
        if family.endswith(("draft_part_slots", "shared_draft_slots")):
            own["state"] = "used"
        counted = registry.get_sample_value(f"vericache_{family}_total", own)
        plain = registry.get_sample_value(f"vericache_{family}", own)
        assert (counted is None) != (plain is None), name
        return plain if counted is None else counted

    def meta_info(name):
        stats = RequestStats(True, 4)
        stats.note_cycle(4, 2)
        stats.moves.update({move: i for i, move in enumerate(MOVES.values(), 1)})
        return at(stats.report(), name)

    def events():
        moves = tuple(
            kind("r", SimpleNamespace(value="host"))
            if kind.__name__ == "Compress"
            else kind("r")
            for kind in MOVES
        )
        trace = Trace(tmp_path / "trace", "test")
        trace.iteration(IterationRecord(1, 0.0, 1.0, (), moves, (), {"link": (3, 4)}))
        trace.close()
        return json.loads((tmp_path / "trace").read_text())

    def ring(name):
        (levels,) = (each["args"] for each in events() if each["name"] == "ring link")
        return with_former_names("ring", {"iterations": 7} | levels)[name]

    def move(name):
        (args,) = (
            (each["name"], each["args"]["former_name"])
            for each in events()
            if name in (each["name"], each["args"].get("former_name"))
        )
        return args

    def listing(name):
        compressors.main(["--json"])
        return json.loads(capsys.readouterr().out)[name]

    def simulation(name):
        fields = dict.fromkeys(Result.__dataclass_fields__, 1) | {"held": {}}
        policy = policies(0.25)["staggered"]
        row = Result(**fields | {"deadline_misses": 9})
        (shown,) = as_json([row], [policy], {})["policies"]
        return shown["result"][name]

    def calibration(name):
        point = Point("kivi", 0.25, 0.5, 0.0, 0.0, {4: Cycles(7, 28, 20)})
        setting = Setting(
            **dict.fromkeys(("device", "dtype"), ""),
            **dict.fromkeys(("prompts", "prompt_tokens", "answer_tokens"), 1),
            origin={},
            model=CalibratedModel("m", "f", 2, 1, 8),
            ratio=0.1,
            limit={},
        )
        (shown,) = calibrated(setting, [point], PlaneChoice("", 4, 5.0, 1.0))["points"]
        return shown[name], shown["cycles"][4][name]

    return {
        "calibration": calibration,
        "setting": setting,
        "metric": metric,
        "report": lambda name: with_former_names("report", REPORT)[name],
        "ring": ring,
        "cache": lambda name: at(cache_tiers(REPORT), name),
        "meta_info": meta_info,
        "move": move,
        "listing": listing,
        "simulation": simulation,
    }


@pytest.mark.parametrize(
    ("place", "old", "new"),
    [
        pytest.param(place, old, new, id=f"{place}-{old}")
        for place, names in FORMER_NAMES.items()
        for old, new in names.items()
    ],
)
def test_a_former_name_has_the_value_of_the_present_one(read, place, old, new):
    assert read[place](old) == read[place](new)


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
