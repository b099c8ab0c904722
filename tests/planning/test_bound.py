"""The bound by hand, and against the model it bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.acceptance import Geometric
from vericache_sglang.planning.bound import roofline, speedup_bound
from vericache_sglang.planning.hardware import Machine, gpu_named, machine_of
from vericache_sglang.planning.intra import ServerModel, search


def test_bound_by_hand():
    machine = machine_of(gpu_named("h200"), datasheet=True)
    # 20 tokens a reload of 3/4 of the KV, link / HBM = 64 / 4800.
    assert speedup_bound(20, machine, 0.75) == pytest.approx(20 / 75 / 0.75)
    assert speedup_bound(20, machine, 0) == float("inf")
    with pytest.raises(ConfigError):
        speedup_bound(20, machine, -0.1)


@given(
    link=st.integers(1, 100),
    memory=st.integers(100, 5000),
    survival=st.floats(0, 1),
    keep=st.sampled_from([0.1, 0.25, 0.5]),
    x=st.integers(1, 40),
)
def test_no_plan_that_offloads_all_passes_the_roofline(link, memory, survival, keep, x):
    machine = Machine(
        name="any",
        memory_bytes=memory,
        hbm_bytes_per_s=1000,
        link_bytes_per_s=link,
        flops_per_s=1,
    )
    server = ServerModel(
        machine=machine,
        weight_bytes=50,
        kv_bytes=8,
        acceptance=Geometric(survival),
    )
    found = search(server, [keep], [x], resident=[0])
    ceiling = roofline(machine, 8, keep, (x, found.accepted), 1 - keep)
    assert found.tokens_per_s <= ceiling.tokens_per_s * (1 + 1e-9)
    ratio = ceiling.link_tokens_per_s / ceiling.full_kv_tokens_per_s
    assert ratio == pytest.approx(speedup_bound(found.accepted + 1, machine, 1 - keep))
