"""Two modelled pools: single requests by hand, full pools against the program."""

import json
from dataclasses import replace

import pytest

from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.hardware import Machine
from vericache_sglang.planning.inter import BASELINE_PATHS, Cluster, solve
from vericache_sglang.planning.paper import remote
from vericache_sglang.planning.paper.assumptions import RTX
from vericache_sglang.planning.pools import SWEEPS
from vericache_sglang.scheduling.paths import FORCED, MARGIN
from vericache_sglang.simulate import main
from vericache_sglang.simulation.clock import Clock
from vericache_sglang.simulation.instance import StoreLink
from vericache_sglang.simulation.pools_report import SIMULATED
from vericache_sglang.simulation.remote import (
    ALL_SIX,
    BASELINE,
    MEASURED,
    RULES,
    Pools,
    PoolsLoad,
    Rules,
)

HAND = Cluster(
    machine=Machine(
        name="round numbers",
        memory_bytes=14.5,
        hbm_bytes_per_s=4,
        link_bytes_per_s=1,
        flops_per_s=1,
    ),
    local=1,
    remote=1,
    local_bytes_per_s=0.2,
    remote_bytes_per_s=0.1,
    weight_bytes=8,
    kv_full_bytes=2,
    compressed=0.25,
    output_tokens=15,
    draft_length=4,
    acceptance_rate=1.0,
)
"""A forward of one row takes 2.5 s; KV 10 s near and 20 s far, 5 s of it drafts'."""

ALONE = {
    "b1": 10 + 15 * 2.5,
    "b2": 20 + 15 * 2.5,
    # Each cycle emits four drafts and the verifier's token; loading is as long as
    # drafting: Eq. (tp_inter) with three cycles of max(4 * 2.5, 10) + 2.5 s.
    "p1": 5 + 3 * 12.5,
    # The rest arrives after 20 s, in the second cycle; 5 tokens are left.
    "p2": 5 + 2 * 12.5 + 5 * 2.5,
}


@pytest.mark.parametrize("path", ALONE)
def test_one_request_at_a_time_by_hand(path):
    rules = Rules(name=path, forced=path, program=False)
    found = Pools(HAND, rules, PoolsLoad(4, concurrency=1)).run()
    ((taken, seconds),) = found.request_s.items()
    assert taken.lower().startswith(path)
    assert seconds == pytest.approx(ALONE[path])
    assert found.tokens_per_s == pytest.approx(15 / ALONE[path])
    assert (found.held, found.busy) == (0, 0)


def test_a_link_serves_the_most_urgent_load_and_drops_the_cancelled():
    clock, ends = Clock(), {}
    link = StoreLink(clock, 10.0)
    for name, size, rank in (("rest", 30, 2), ("whole", 20, 1), ("draft", 10, 0)):
        link.load(size, rank, lambda name=name: ends.setdefault(name, clock.now))
    dropped = link.load(50, 2, lambda: ends.setdefault("dropped", clock.now))
    dropped.cancelled = True
    assert link.backlog_s(0) == pytest.approx(1)
    assert link.backlog_s(2) == pytest.approx(6)
    clock.advance(100)
    # The rest has begun, and is overtaken after a piece of 0.1 s.
    assert ends == pytest.approx({"draft": 1.1, "whole": 3.1, "rest": 6.0})
    assert link.busy_s == pytest.approx(6)


@pytest.fixture(scope="module")
def full():
    """All rules in the paper's pools."""
    cluster = remote.cluster("mistral-small-24b", RTX, 1, 256)
    loads = {
        rules.name: PoolsLoad(40 if rules.forced == "auto" else 12) for rules in RULES
    }
    return cluster, {
        rules.name: Pools(cluster, rules, loads[rules.name]).run() for rules in RULES
    }


def test_plain_paths_reach_the_programs_throughput(full):
    cluster, found = full
    planned = solve(cluster.pools, BASELINE_PATHS)
    row = found[BASELINE.name]
    assert row.tokens_per_s == pytest.approx(planned.tokens_per_s, rel=0.05)
    for path, share in planned.shares.items():
        assert row.mix[path] == pytest.approx(share, abs=MARGIN + 0.02)


def test_six_paths_are_between_the_baseline_and_the_program(full):
    cluster, found = full
    ours, plain = found[ALL_SIX.name].tokens_per_s, found[BASELINE.name].tokens_per_s
    assert 1.15 * plain < ours < 1.02 * solve(cluster.pools).tokens_per_s
    # By arrival alone every pool is filled with what arrives first.
    assert found["all six, by arrival"].tokens_per_s < ours


def test_forced_paths_are_taken_and_slots_come_back(full):
    _, found = full
    for name, paths in FORCED.items():
        row = found.get(name.upper())
        if row is not None:
            assert set(row.mix) <= {str(path) for path in paths}
            assert any(path.lower().startswith(name) for path in row.mix)
    for row in found.values():
        assert row.held == 0
        assert row.near_link <= 1.001
        assert row.far_link <= 1.001


@pytest.mark.parametrize(
    ("cycles", "least"), [(0.25, 0.8), (5, 1.25)], ids=["fast link", "slow link"]
)
def test_drafters_learn_their_paths(cycles, least):
    """Where speculation gains most, and where it gains nothing and trials cost."""
    change, _ = SWEEPS["T_init_remote / T_decode"]
    cluster = change(remote.cluster("mistral-small-24b", RTX, 1, 256), cycles)
    load = PoolsLoad(60)
    ours, plain = (Pools(cluster, rules, load).run() for rules in (MEASURED, BASELINE))
    assert ours.held == 0
    assert ours.tokens_per_s > least * plain.tokens_per_s


FAST = [("T_init_remote / T_decode", 0.25), ("T_init_remote / T_decode", 1)]
"""A far link so fast that most of what speculation promises is lost to its slots."""

POINTS = {
    *FAST,
    *((label, at) for label, (_, values) in SWEEPS.items() for at in values[::8]),
}


@pytest.mark.parametrize(
    ("label", "at"),
    [
        pytest.param(*point, marks=() if point in FAST else pytest.mark.extended)
        for point in sorted(POINTS)
    ],
)
def test_the_choice_loses_at_most_a_percent_to_any_fixed_paths(label, at):
    change, _ = SWEEPS[label]
    cluster = change(remote.cluster("mistral-small-24b", RTX, 1, 256), at)
    loads = {
        rules: PoolsLoad(60 if rules.program else 12)
        for rules in RULES
        if rules.program or rules.forced != "auto"
    }
    found = {
        rules: Pools(cluster, rules, load).run().tokens_per_s
        for rules, load in loads.items()
    }
    assert found.pop(ALL_SIX) >= 0.99 * max(found.values())


def test_pools_without_a_drafter_are_refused():
    with pytest.raises(ConfigError, match="R >= 1"):
        Pools(replace(HAND, remote=0), BASELINE, PoolsLoad(4))


QUICK = ["--remote", "1:2", "--requests", "4", "--output", "8", "--context", "20000"]


def test_the_command_labels_its_table_and_files(tmp_path, capsys):
    files = [tmp_path / name for name in ("s.json", "s.md")]
    assert main([*QUICK, "--json", str(files[0]), "--markdown", str(files[1])]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("SIMULATED")
    found = json.loads(files[0].read_text())
    assert found["label"].startswith("SIMULATED")
    assert found["pools"]["assumptions"]["remote"] == 2
    assert [row["rules"] for row in found["pools"]["rules"]] == [r.name for r in RULES]
    for text in (printed, files[1].read_text()):
        assert all(f"| {rules.name} |" in text for rules in RULES)
        assert "all six paths, planned" in text


@pytest.mark.extended
def test_sweeps_are_tables_and_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="only --plot needs it")
    page, picture = tmp_path / "s.json", tmp_path / "s.png"
    assert main([*QUICK, "--json", str(page), "--plot", str(picture)]) == 0
    assert capsys.readouterr().out.count(f"| planned | {' | '.join(SIMULATED)} |") == 2
    found = json.loads(page.read_text())["pools"]["sweeps"]
    assert set(found) == {"planned", *SIMULATED}
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--requests", "3"], "--requests"),
        (["--far-gb", "0"], "--far-gb"),
        (["--remote", "1:0"], "--remote"),
        (["--accept", "2"], "--accept"),
        (["--context", "9000000"], "room for one full KV"),
        (["--preset", "tpu"], "--preset"),
    ],
)
def test_a_wrong_value_names_its_flag(flags, named, capsys):
    assert main([*QUICK, *flags]) == 2
    assert named in capsys.readouterr().err
