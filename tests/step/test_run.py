"""What comes after a run: a step whose peak of device memory is above its plan's."""

from __future__ import annotations

import pytest

from harmony_ds.device import CpuDevice, DeviceGroup
from tests.engine.drive import config_of, engine_for, family, groups_of, sgd, train_groups

pytestmark = pytest.mark.fixed_times

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 3, 2)
OF_PROGRAM = 1_000_000


class Device(CpuDevice):
    """A device whose peak is so many bytes higher than it was."""

    more_bytes = 0

    def peak_bytes(self) -> int:
        return super().peak_bytes() + self.more_bytes


@pytest.mark.parametrize("number", [0, 1])
def test_what_one_device_takes_beyond_the_plan_is_not_hidden_by_the_programs_tensors_on_another(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    members = [Device(2**30), Device(2**30)]
    config = config_of(2, None, {"pack_layers": 1, "devices": 2, "residency": "off"})
    with engine_for(LLAMA.build(0.0), sgd, config, device=DeviceGroup(members)) as engine:
        train_groups(engine, GROUPS[:1])
        members[0].charge(OF_PROGRAM, "a tensor of the program")
        train_groups(engine, GROUPS[1:2])
        assert "more than planned" not in caplog.text
        members[number].more_bytes = OF_PROGRAM // 2
        train_groups(engine, GROUPS[2:])
        members[0].discharge(OF_PROGRAM)
    assert "more than planned" in caplog.text
