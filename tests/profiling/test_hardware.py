"""Machines by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harmony_ds.errors import ConfigError
from harmony_ds.profiling.hardware import UpdateCost, hardware_of, known_hardware

ADAM = UpdateCost(states=2, gradient_bytes=4, copy_bytes=2)


def test_a_gpu_comes_with_its_usual_link_and_host() -> None:
    hardware = hardware_of("rtx4090")

    assert hardware.name == "rtx4090/pcie4/desktop-ddr5"
    assert hardware.gpu.memory_gib == 24
    assert hardware.host.nominal_gb_per_s == pytest.approx(89.6)


@pytest.mark.parametrize("name", ["rtx4090/pcie3/epyc-ddr4", "rtx4090/epyc-ddr4/pcie3", "RTX4090/PCIe3/epyc-ddr4"])
def test_link_and_host_may_be_named_in_any_order(name: str) -> None:
    assert hardware_of(name).name == "rtx4090/pcie3/epyc-ddr4"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("rtx490", 'no GPU called "rtx490".*"rtx4090"'),
        ("h100/pcie6", 'link or host called "pcie6".*"pcie'),
        ("", "no GPU"),
    ],
)
def test_an_unknown_name_gives_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=nearest):
        hardware_of(name)


def test_every_machine_of_the_file_has_rates_a_source_and_a_usual_link_and_host() -> None:
    known = known_hardware()

    for name, gpu in known.gpus.items():
        machine = hardware_of(name).machine(ADAM)
        assert gpu.half_tflops > gpu.tf32_tflops >= gpu.fp32_tflops
        assert machine.swap_in_bytes_per_ms < machine.link_bytes_per_ms < 2 * machine.swap_in_bytes_per_ms
        assert machine.copies_overlap
    for entry in (*known.gpus.values(), *known.links.values(), *known.hosts.values()):
        assert entry.source
    for link in known.links.values():
        assert link.one_way_gb_per_s < link.nominal_gb_per_s


def test_adam_in_mixed_precision_moves_thirty_bytes_per_parameter_and_runs_at_the_speed_of_memory() -> None:
    machine = hardware_of("rtx4090/desktop-ddr4").machine(ADAM)

    assert UpdateCost(states=2, gradient_bytes=4, copy_bytes=0).bytes_per_element == 28
    assert UpdateCost(states=0, gradient_bytes=4, copy_bytes=0).bytes_per_element == 12
    assert ADAM.bytes_per_element == machine.update_bytes_per_element == 30
    assert machine.host_bytes_per_ms == pytest.approx(51.2e6 * 0.75)
    assert machine.update_elements_per_ms == pytest.approx(51.2e6 * 0.75 / 30)


def test_masters_and_state_on_a_disk_are_updated_at_its_pace_if_that_is_slower() -> None:
    on_disk, hardware = replace(ADAM, disk_bytes=12), hardware_of("rtx4090/desktop-ddr4")

    slow, fast = (replace(hardware, disk_gb_per_s=rate).machine(on_disk) for rate in (3.0, 300.0))
    assert slow.update_elements_per_ms == pytest.approx(3e6 / 24)  # 12 bytes read and written
    memory = hardware.machine(ADAM)
    assert memory == replace(hardware, disk_gb_per_s=3.0).machine(ADAM)
    assert replace(fast, update_disk=0.0) == memory
    assert fast.update_disk == pytest.approx(memory.update_elements_per_ms * 24 / 300e6)
    assert slow.update_disk == pytest.approx(1.0) and slow.disk_bytes_per_ms == 0.0

    weights = replace(hardware, disk_gb_per_s=3.0).machine(replace(on_disk, disk_weight_bytes=2))
    assert weights.disk_bytes_per_ms == 3e6
    assert weights.update_elements_per_ms == pytest.approx(3e6 / 26)  # a weight is only written


def test_devices_with_nvlink_send_through_it_and_others_through_their_slot() -> None:
    assert hardware_of("h100").machine(ADAM).peer_bytes_per_ms == pytest.approx(450e6 * 0.75, rel=0.2)
    four = hardware_of("h100").machine(ADAM).among(4)
    assert four.peer_bytes_per_ms == hardware_of("h100").machine(ADAM).peer_bytes_per_ms
    cards = hardware_of("rtx4090").machine(ADAM).among(4)
    assert cards.peers_share_link and cards.peer_bytes_per_ms == cards.link_bytes_per_ms / 2
