"""``GET /metrics`` of a live server: ours, and SGLang's with their usual meaning."""

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vericache_sglang.former_names import FORMER_NAMES
from vericache_sglang.observability.table import METRICS, PUBLISHED, TABLE

pytestmark = pytest.mark.server

LONGEST = 8
"""``--vericache-draft-length`` of the server."""


def scrape(server):
    """Return {(sample, own label's value): value}, and the text."""
    text = server.get("/metrics").decode()
    own = {metric.label for metric in PUBLISHED if metric.label}
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            label = "".join(sample.labels.get(name, "") for name in own)
            values[sample.name, label] = sample.value
    return values, text


def agree(server, keys):
    """Return counters and scraped values once both say the same of ``keys``."""
    deadline = time.monotonic() + 120
    while True:
        counters, (values, _) = server.settle(), scrape(server)
        told = {key: values[sample] for key, sample in keys.items()}
        if told == {key: counters[key] for key in keys}:
            return counters, values
        assert time.monotonic() < deadline, (told, counters)
        time.sleep(0.2)


def test_every_metric_is_served_and_agrees_with_the_counters(servers, prompts):
    ours, _ = servers
    before, _ = scrape(ours)
    ours.generate(prompts, max_new_tokens=60, ignore_eos=True)
    settled = {
        key: (metric.name, value)
        for metric in METRICS
        if metric.kind == "counter"
        for value, key in metric.samples.items()
        if key
        in {"drafted", "accepted", "cycles", "draft_rows", "compressions", "reprefills"}
    }
    counters, after = agree(ours, settled)
    _, text = scrape(ours)
    figures = {
        key for row in TABLE for key in (*row.samples.values(), *row.told.values())
    }
    (page,) = ours.get("/vericache/state")
    former = FORMER_NAMES["report"].keys()
    named = page["report"].keys() - {"lanes", "rings", "eager_reasons", "role"}
    assert figures | former == named
    for metric in PUBLISHED:
        assert f"# HELP {metric.name} {metric.documentation}\n" in text
        assert f"# TYPE {metric.name} {metric.kind}\n" in text
        for value, key in metric.samples.items():
            assert (metric.name, value) in after
            if metric.source == "check":
                continue  # counted in the process that serves HTTP
            assert key in counters
            if metric.kind == "counter":
                assert after[metric.name, value] >= before[metric.name, value]
                assert after[metric.name, value] <= ours.counters()[key]
    for old, new in FORMER_NAMES["report"].items():
        assert page["report"][old] == page["report"][new], old
    former_moves = "vericache_moves_total"
    assert after[former_moves, "split"] == after["vericache_kv_moves_total", "compress"]
    assert counters["cycles"] > 0
    assert counters["accepted"] <= counters["drafted"]
    # The histograms saw the same verifications.
    verified = "vericache_verification_accepted_tokens"
    assert after[f"{verified}_count", ""] == counters["cycles"]
    assert after[f"{verified}_sum", ""] == counters["accepted"]
    width = "vericache_verification_width_tokens_sum"
    assert after[width, ""] == counters["drafted"] + counters["cycles"]
    # Nothing runs: what is held now says so.
    for name in (
        "running_requests",
        "drafting_requests",
        "staging_bytes",
        "kept_slots",
    ):
        assert after[f"vericache_{name}", ""] == 0


def test_sglangs_figures_keep_their_meaning(servers, prompts):
    ours, _ = servers
    ours.settle()
    calls = ("sglang:spec_verify_calls_total", "")
    before, _ = scrape(ours)
    # Long enough for several of SGLang's reports, one every 40 iterations.
    info = ours.generate(prompts[3], max_new_tokens=200, ignore_eos=True)["meta_info"]
    ours.settle()
    deadline = time.monotonic() + 120
    while scrape(ours)[0][calls] - before.get(calls, 0) < info["spec_verify_ct"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    after, _ = scrape(ours)
    assert after[calls] - before.get(calls, 0) == info["spec_verify_ct"]
    length = after["sglang:spec_accept_length", ""]
    # Tokens of a verification, its own included: never below one, which tokens of an
    # iteration would be; and the rate follows from it, as in meta_info.
    assert 1 <= length <= LONGEST + 1
    rate = after["sglang:spec_accept_rate", ""]
    assert rate == pytest.approx((length - 1) / LONGEST)
    assert info["spec_accept_rate"] == pytest.approx(
        info["spec_num_correct_drafts"] / (info["spec_verify_ct"] * LONGEST)
    )
    assert 1 <= info["spec_accept_length"] <= LONGEST + 1
    internal = ours.get("/get_server_info")["internal_states"][0]
    assert 1 <= internal["avg_spec_accept_length"] <= LONGEST + 1


def test_plain_sglang_has_none_of_ours(servers):
    _, plain = servers
    _, text = scrape(plain)
    assert "sglang:" in text
    assert "vericache_" not in text
