"""What benchmarks make of a server's timers."""

import json

import pytest

from vericache_sglang.evaluation.timers import medians, read_sums


def event(what, cpu, **about):
    return {"what": what, "cpu": cpu, "wall": 10 * cpu, **about}


def prefill(start, tokens, cpu, watch):
    """Return one chunk of a prefill of two layers."""
    return [
        event("update", watch / 4),
        event("observer", watch / 2, layer=0),
        event("observer", watch / 2, layer=1),
        event("prefill", cpu, start=start, tokens=tokens),
    ]


def written(path, *groups):
    lines = [json.dumps(one) for group in groups for one in group]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_request_begins_with_the_first_chunk_of_its_prefill(tmp_path):
    probe = [event("observe", 1.5), event("observe", 0.5), event("probe", 5.0)]
    counts = {"offered": 12, "kept": 3, "coded": 0, "slots": 3}
    split = [event("scores", 0.25), event("split", 1.0, **counts)]
    file = written(
        tmp_path / "events",
        prefill(0, 7, 3.0, 1.0),
        prefill(7, 5, 4.0, 2.0),
        [event("probes", 0.5)],
        probe,
        probe,
        split,
        prefill(0, 3, 9.0, 0.0),
    )
    first, second = read_sums(file)
    assert (first.prompt, second.prompt) == (12, 3)
    assert first.calls["observe"] == 4
    assert first.prefill("cpu") == 7.0 - 3.0, "without its observer"
    assert first.outside("cpu") == 0.5 + 2 * 5.0 + 1.0, "parts of a probe count once"
    assert first.outside("wall") == 115.0
    assert first.compressing("cpu") == 11.5 + 3.0
    assert first.split == counts
    assert second.outside("cpu") == 0


def test_ratios_are_of_a_request_and_medians_over_requests(tmp_path):
    groups = []
    for cpu, probe in ((2.0, 4.0), (10.0, 10.0), (4.0, 12.0)):
        groups += [prefill(0, 3, cpu + 1.0, 1.0), [event("probe", probe)]]
    figures = medians(read_sums(written(tmp_path / "events", *groups)))
    assert figures["prefill_cpu"] == 4.0
    assert figures["probe_cpu"] == 10.0
    assert figures["probe_share"] == 2.0, "not 10 / 4"
    assert figures["compress_ratio"] == pytest.approx((4 + 1) / 2)
    assert figures["compress_ratio_least"] == pytest.approx((10 + 1) / 10)
    assert figures["compress_ratio_most"] == pytest.approx((12 + 1) / 4)


def test_a_file_that_begins_in_the_middle_is_refused(tmp_path):
    file = written(tmp_path / "events", [event("probe", 1.0)])
    with pytest.raises(ValueError, match="probe before a prefill"):
        read_sums(file)
