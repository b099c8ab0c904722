"""What waits for the device is known, in every scenario: nothing more, nothing less."""

from fnmatch import fnmatch

import asking_scenarios  # noqa: F401 (enters scenarios)
import decoding_world
import method_scenarios  # noqa: F401
import pytest
from fake_cuda import open_device
from known_waits import KNOWN, expected
from scenarios import SCENARIOS, engine

from vericache_sglang.scheduling.estimates import START_LINK_BYTES_PER_S
from vericache_sglang.scheduling.link import DIRECTIONS

pytestmark = pytest.mark.sglang


def rows():
    """Yield every scenario; of those that are alike, one is usual."""
    kinds = [
        [name for name in SCENARIOS if name.startswith("codec ")],
        [name for name in SCENARIOS if name.startswith("pair ")],
        [name for name in SCENARIOS if name.endswith(", joining")],
    ]
    more = {
        name
        for names in kinds
        for name in names
        if not name.startswith(names[0].partition(":")[0])
    }
    more |= {f"asking for {each}" for each in ("outlines", "llguidance", "rejection")}
    more |= {f"asking for {each}" for each in ("logprobs", "logprobs, in graphs")}
    assert more <= SCENARIOS.keys()
    for name in SCENARIOS:
        yield pytest.param(name, marks=pytest.mark.extended if name in more else ())


@pytest.mark.parametrize("name", rows())
def test_nothing_waits_that_is_not_known(name):
    with open_device() as device:
        waits = SCENARIOS[name](device)
    new = set(waits) - expected(name)
    gone = expected(name) - set(waits)
    assert not new, f"the host waits for the device, see known_waits.py: {sorted(new)}"
    assert not gone, f"known_waits.py lists what waits no longer: {sorted(gone)}"


def test_every_known_wait_is_of_a_scenario():
    for known in KNOWN:
        for pattern in known.when:
            assert any(fnmatch(name, pattern) for name in SCENARIOS), pattern


def test_the_link_is_timed_on_the_device():
    with open_device(), engine() as made:
        link = made.placement._tp_sync.measured.link
        for way in DIRECTIONS:
            assert link.bytes_per_s(1, way) != START_LINK_BYTES_PER_S


def test_the_forward_behind_a_compression_is_not_timed():
    with (
        open_device() as device,
        decoding_world.server(device, residency="device", slots=400) as made,
    ):
        counters, observed, seen = made.engine.placement.counters, [], []
        made.loop.tp_sync.measured.iteration.observe = lambda *works: observed.append(1)
        made.admit("a", "b", "c")
        for _ in range(decoding_world.SETTLED):
            made.run(1)
            seen.append((counters.compressions, len(observed)))
    # A forward is observed by the iteration after it, if that finds it ended.
    runs = zip(seen, seen[1:], seen[2:], seen[3:], strict=False)
    kinds = {(b[0] > a[0], d[1] > c[1]) for a, b, c, d in runs}
    assert kinds == {(True, False), (False, True)}
