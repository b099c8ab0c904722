"""The dashboard and the alert rules use metrics that exist, and can be loaded."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from vericache_sglang.observability.table import METRICS

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "configs" / "monitoring"


def sglang_names():
    """Return the names SGLang's collectors give their metrics; imports nothing."""
    (place,) = find_spec("sglang").submodule_search_locations
    files = Path(place, "srt", "observability").glob("*.py")
    texts = (file.read_text(encoding="utf-8") for file in files)
    return {name for text in texts for name in re.findall(r'"(sglang:\w+)"', text)}


def samples(names_and_kinds):
    """Return the names of all samples a set of metrics has."""
    ends = ("_bucket", "_sum", "_count")
    return {
        name + end
        for name, kind in names_and_kinds
        for end in (ends if kind == "histogram" else ("",))
    }


def used_names(expr):
    """Return the metric names of a PromQL expression."""
    bare = re.sub(r'"[^"]*"', '""', expr)
    return set(re.findall(r"\b(?:vericache_|sglang:)\w+", bare))


def dashboard():
    return json.loads((MONITORING / "grafana.json").read_text())


def graphs():
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def rules():
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions():
    found = [
        pytest.param(target["expr"], id=f"panel-{panel['title']}-{target['refId']}")
        for panel in graphs()
        for target in panel["targets"]
    ]
    return found + [pytest.param(r["expr"], id=r["alert"]) for r in rules()]


OURS = {metric.name: metric for metric in METRICS}
OUR_SAMPLES = samples((metric.name, metric.kind) for metric in METRICS)


@pytest.mark.parametrize("expr", expressions())
def test_an_expression_uses_what_is_published(expr):
    names = used_names(expr)
    assert names
    assert {name for name in names if name[:9] == "vericache"} <= OUR_SAMPLES
    for opening, closing in ("()", "{}", "[]"):
        assert expr.count(opening) == expr.count(closing)
    # A counter or a bucket is read as a rate; a mismatch is wrong however old.
    for name in names - {"vericache_consistency_mismatches_total"}:
        if name.endswith(("_total", "_bucket")):
            assert re.search(rf"(rate|increase)\({name}\b", expr), name
    # Our own labels, where an expression groups or selects by them.
    for label in re.findall(r"\b(?:by|without) \((\w+)\)", expr):
        known = [OURS[name] for name in names if name in OURS]
        owners = {each.label for each in known} | {n for f in known for n in f.told}
        assert label in {"instance", "le", *owners}


@pytest.mark.sglang
@pytest.mark.skipif(not find_spec("sglang"), reason="SGLang is not installed")
def test_sglangs_names_exist():
    texts = [param.values[0] for param in expressions()]
    used = {name for text in texts for name in used_names(text)}
    used = {name for name in used if name.startswith("sglang:")}
    known = sglang_names()
    ends = re.compile("_(bucket|sum|count)$")
    assert len(used) > 5
    assert {name for name in used if ends.sub("", name) not in known} == set()


def test_every_metric_is_on_the_dashboard():
    shown = " ".join(target["expr"] for p in graphs() for target in p["targets"])
    known = {
        ending: name for name in OURS for ending in samples([(name, OURS[name].kind)])
    }
    seen = {known[name] for name in used_names(shown) if name in known}
    assert seen == OURS.keys()


def test_the_dashboard_can_be_imported():
    draft_tokens = dashboard()
    assert draft_tokens["schemaVersion"] >= 39
    source, instance = draft_tokens["templating"]["list"]
    assert (source["name"], source["type"]) == ("datasource", "datasource")
    assert instance["type"] == "query"
    assert "id" not in draft_tokens, (
        "an id would overwrite a dashboard of the importer's"
    )
    ids = [panel["id"] for panel in draft_tokens["panels"]]
    assert len(ids) == len(set(ids))
    titles = [p["title"] for p in draft_tokens["panels"] if p["type"] == "row"]
    assert titles == [
        *("Throughput and acceptance", "Residency and memory"),
        *("Link and rings", "Health"),
    ]
    for panel in graphs():
        assert panel["description"].endswith(".")
        for query in (panel, *panel["targets"]):
            assert query["datasource"]["uid"] == "${datasource}"
        assert all('instance=~"$instance"' in t["expr"] for t in panel["targets"])


def test_panels_do_not_overlap():
    cells = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        assert 0 <= at["x"] <= 24 - at["w"]
        mine = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & mine, panel["title"]
        cells |= mine


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_happened_and_what_to_do(rule):
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"VeriCache[A-Za-z]+", rule["alert"])
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule.get("for", "0m")[-1] == "m"
    assert rule["annotations"].keys() == {"summary", "description"}
    assert "$labels.instance" in rule["annotations"]["summary"]
    assert rule["annotations"]["description"].endswith(".")
    for flag in re.findall(r"--[\w-]+", rule["annotations"]["description"]):
        assert f"`{flag}`" in (ROOT / "docs" / "settings.md").read_text() or flag in (
            "--disable-vericache"
        )


def test_alerts_have_names_of_their_own_and_one_is_critical():
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    critical = [r["alert"] for r in rules() if r["labels"]["severity"] == "critical"]
    assert critical == ["VeriCacheConsistencyMismatch"]
