"""Several devices as one."""

from __future__ import annotations

import torch
from torch import Tensor

from harmony_ds.device import CpuDevice
from harmony_ds.device.group import DeviceGroup
from harmony_ds.model.random_streams import RandomStreams


class DeviceWithGenerator(CpuDevice):
    """A device that torch tells from others, with a random generator of its own, as GPUs have one."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.torch_device = torch.device("cpu", number)
        self.generator = torch.Generator().manual_seed(number)

    def random_state(self) -> tuple[Tensor, ...]:
        return *super().random_state(), self.generator.get_state()

    def set_random_state(self, state: tuple[Tensor, ...]) -> None:
        super().set_random_state(state[:1])
        self.generator.set_state(state[1])

    def seed(self, seed: int) -> None:
        super().seed(seed)
        self.generator.manual_seed(seed)


def test_a_stream_goes_on_from_device_to_device_and_the_program_finds_its_generators_again() -> None:
    with torch.random.fork_rng(devices=[]):
        members = [DeviceWithGenerator(number) for number in range(2)]
        group = DeviceGroup(members)
        before = [member.generator.get_state() for member in members]
        streams = RandomStreams(group)
        streams.open()
        streams.start("a micro-batch", 7)
        drawn = [torch.rand((), generator=members[0].generator).item()]
        group.enter(1)
        drawn.append(torch.rand((), generator=members[1].generator).item())
        group.enter(0)
        streams.close()
        assert drawn == torch.rand(2, generator=torch.Generator().manual_seed(7)).tolist()
        assert all(torch.equal(member.generator.get_state(), own) for member, own in zip(members, before, strict=True))
