"""A U-Net of which one block holds nearly all parameters, as `up_blocks.0` of SDXL holds half of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.device.cpu import CpuDevice
from tests.engine.drive import adamw, config_of, engine_for, means_of, seed_of, train_groups
from tests.inside import assembly_of
from tests.oracle import assert_same, train_plainly

pytestmark = pytest.mark.fixed_times


class Resnet(nn.Module):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.skip = nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x)) + self.skip(x)


class Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.q = nn.Linear(channels, channels)
        self.to_out = nn.ModuleList([nn.Linear(channels, channels), nn.Dropout(0.1)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(2).transpose(1, 2)
        for module in self.to_out:
            rows = module(rows) if module is not self.to_out[0] else module(self.q(rows).tanh())
        return x + rows.transpose(1, 2).view_as(x)


class Down(nn.Module):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([Resnet(channels_in, channels), *(Resnet(channels, channels) for _ in range(3))])

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        skips = []
        for resnet in self.resnets:
            x = resnet(x)
            skips.append(x)
        return nn.functional.avg_pool2d(x, 2), skips


class Up(nn.Module):
    def __init__(self, channels: list[tuple[int, int]]) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([Resnet(before, after) for before, after in channels])
        self.attentions = nn.ModuleList([Attention(after) for _, after in channels])

    def forward(self, x: Tensor, skips: tuple[Tensor, ...]) -> Tensor:
        x = nn.functional.interpolate(x, scale_factor=2.0)
        for resnet, attention, skip in zip(self.resnets, self.attentions, skips, strict=True):
            x = attention(resnet(torch.cat([x, skip], 1)))
        return x


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.down_blocks = nn.ModuleList([Down(4, 4), Down(4, 8)])
        self.up_blocks = nn.ModuleList([Up([(16, 48), *[(56, 48)] * 3]), Up([(52, 4), *[(8, 4)] * 3])])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.conv_in(x)
        skips: list[Tensor] = []
        for block in self.down_blocks:
            x, more = block(x)
            skips += more
        for block in self.up_blocks:
            taken = len(block.resnets)
            x, skips = block(x, tuple(reversed(skips[-taken:]))), skips[:-taken]
        return (self.conv_out(x) - target).square().mean()


def unet() -> nn.Module:
    torch.manual_seed(0)
    return UNet()


def groups() -> list[list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(6):
        x, target = torch.randn(2, 2, 3, 4, 4, generator=generator)
        made.append({"x": x, "target": target})
    return [made[:3], made[3:]]


def layers_under(budget_bytes: int | None, **harmony: Any) -> tuple[nn.Module, list[str], list[float], float]:
    """The trained model, the names of its layers, losses, and swapped bytes over the least possible."""
    model = unet()
    config = config_of(3, None, harmony)
    with engine_for(model, adamw, config, device=CpuDevice(budget_bytes)) as engine:
        losses = train_groups(engine, groups())
        names = [layer.name for layer in assembly_of(engine).layers]
        assert budget_bytes is None or engine.memory_report().device_peak_bytes <= budget_bytes
        ratio = engine.swap_report().ratio
    return model, names, losses, ratio


def test_a_block_too_large_for_the_device_is_cut_finer_and_trains_as_plain() -> None:
    plain = unet()
    expected = means_of(train_plainly(plain, groups(), adamw(plain.parameters()), clip=None, seed_of=seed_of))
    largest = 4 * sum(parameter.numel() for parameter in plain.up_blocks[0].parameters())  # type: ignore[index]
    model, names, losses, ratio = layers_under(int(2.2 * largest))
    assert "up_blocks.0" not in names and "up_blocks.0.resnets.1" in names and "down_blocks.1" in names
    assert losses == expected and ratio == 1.0
    assert_same(model, plain, bitwise=True)


def test_less_than_its_weights_and_gradients_is_enough() -> None:
    largest = 4 * sum(parameter.numel() for parameter in unet().up_blocks[0].parameters())  # type: ignore[index]
    _, names, _, _ = layers_under(int(1.9 * largest))
    assert "up_blocks.0.resnets.0" in names


PATTERNS = {"layers": ["down_blocks.*", "up_blocks.*"]}


@pytest.mark.parametrize(("budget_bytes", "harmony"), [(None, {}), (2**30, {}), (None, PATTERNS)], ids=str)
def test_where_there_is_room_or_a_pattern_says_so_blocks_stay_whole(budget_bytes: int | None, harmony: Any) -> None:
    _, names, _, _ = layers_under(budget_bytes, **harmony)
    assert names == ["conv_in", "conv_out", "down_blocks.0", "down_blocks.1", "up_blocks.0", "up_blocks.1"]
