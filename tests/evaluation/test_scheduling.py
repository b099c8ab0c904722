"""The load of the scheduling benchmark drives a runtime through whole requests."""

import pytest

from vericache_sglang.evaluation.benchmarks.scheduling import SchedulingLoad, measure


@pytest.mark.parametrize("residency", ["host", "auto"])
@pytest.mark.parametrize("contended", [False, True])
def test_requests_are_drafted_for_finish_and_are_replaced(residency, contended):
    load = SchedulingLoad(16, residency, contended=contended, seed=1)
    row = measure(load, iterations=300, warm=50)
    assert 0 < row["median_ms"] <= row["p99_ms"]
    tracks = load.runtime.tracks
    assert len(tracks) in (15, 16)
    assert int(max(tracks, key=lambda rid: int(rid[1:]))[1:]) > 16
    drafted = [track for track in tracks.values() if track.split]
    assert len(drafted) >= 10
    assert load.runtime.estimates.prior.p > 0.9
