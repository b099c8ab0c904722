"""The GPU catalogue and what several of them do together."""

import pytest

from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.hardware import GPUS, gpu_named, machine_of


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_every_figure_has_a_source_and_a_sane_size(gpu):
    assert gpu.source
    assert 20e9 <= gpu.memory_bytes <= 200e9
    # What a driver reports is near the datasheet: above it, or less what ECC takes.
    assert 0.99 <= gpu.memory_mib * 2**20 / gpu.memory_bytes <= 1.08
    assert 0.5e12 <= gpu.hbm_bytes_per_s <= 10e12
    assert 30e9 <= gpu.link_bytes_per_s <= 500e9
    # Nothing measured beats its datasheet.
    assert (gpu.hbm_measured_bytes_per_s or 0) <= gpu.hbm_bytes_per_s
    assert (gpu.link_measured_bytes_per_s or 0) <= gpu.link_bytes_per_s


@pytest.mark.parametrize(
    ("name", "ratio"), [("h100-nvl", 60), ("gh200", 10)], ids=["pcie", "c2c"]
)
def test_datasheet_ratios_are_the_papers(name, ratio):
    machine = machine_of(gpu_named(name), datasheet=True)
    found = machine.hbm_bytes_per_s / machine.link_bytes_per_s
    assert found == pytest.approx(ratio, rel=0.12)  # 60.9 and 8.9


def test_measured_rates_win_unless_the_datasheet_is_asked_for():
    gpu = gpu_named("gh200")
    assert machine_of(gpu).link_bytes_per_s == 346e9
    assert machine_of(gpu, datasheet=True).link_bytes_per_s == 450e9
    assert machine_of(gpu).hbm_bytes_per_s == 4.0e12  # no measured one is known


def test_devices_multiply_everything():
    pair = machine_of(gpu_named("h100-nvl"), 2, datasheet=True, memory_share=1.0)
    assert pair.name == "2x h100-nvl"
    assert (pair.memory_bytes, pair.hbm_bytes_per_s) == (188e9, 7.8e12)
    assert (pair.link_bytes_per_s, pair.flops_per_s) == (128e9, 1670e12)


def test_bad_arguments_name_what_is_wrong():
    with pytest.raises(ConfigError, match=r"--gpu 'h300' .* h200"):
        gpu_named("h300")
    with pytest.raises(ConfigError, match="--devices"):
        machine_of(gpu_named("h200"), 0)
    with pytest.raises(ConfigError, match="memory_share"):
        machine_of(gpu_named("h200"), memory_share=1.5)
