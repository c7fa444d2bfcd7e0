"""Forward passes without gradients: what comes to the device when, and what is left there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.decomposer.graph import slab_bytes
from harmony_ds.model.intercept import Request, handled_by
from harmony_ds.offload.device_copies import DeviceCopy
from harmony_ds.runtime.streaming import LayerCallObserver, Streamer
from harmony_ds.step.engine_state import EngineState
from tests.runtime.scripted import ScriptedDevice, assembled

WIDTHS = (3, 20, 40, 60)  # no two layers have buffers of one size


class Logged(nn.Linear):
    """Notes in the device's log when it runs."""

    def __init__(self, device: ScriptedDevice, inputs: int, outputs: int, number: int) -> None:
        super().__init__(inputs, outputs)
        self.scripted, self.number = device, number

    def forward(self, x: Tensor) -> Tensor:
        self.scripted.log.append(f"run {self.number}")
        return super().forward(x)


class Net(nn.Module):
    """Three layers, called in the order that `order` says, as often as it says."""

    def __init__(self, device: ScriptedDevice) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Logged(device, WIDTHS[0], WIDTHS[i + 1], number=i) for i in range(3))
        self.order = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layers[number](x) for number in self.order], dim=1)


class Bench:
    """A model, its device and its streamer."""

    def __init__(self, assembly: EngineState, model: Net, device: ScriptedDevice) -> None:
        parts = assembly.runtime
        self.runtime, self.layers, self.model, self.device = parts, assembly.layers, model, device
        self.streamer = Streamer(parts, assembly.layers)
        self.sizes = {
            sum(slab_bytes(p.numel(), 4) for p in layer.parameters()) // 4: number
            for number, layer in enumerate(model.layers)
        }

    def log(self) -> str:
        """What came (in), ran and went (out), by layer."""
        said = [entry.split() for entry in self.device.log]
        return " ".join(f"{what}{number if what == 'run' else self.sizes[int(number)]}" for what, number in said)

    def stream(self, order: tuple[int, ...], resident: tuple[str, ...] = ()) -> Tensor:
        self.device.log.clear()
        with self.streamer.streaming(resident, order):
            made: Tensor = self.model(torch.ones(1, WIDTHS[0]))
        return made


@pytest.fixture
def bench() -> Iterator[Bench]:
    device = ScriptedDevice()
    model = Net(device)
    with assembled(model, device) as assembly:
        yield Bench(assembly, model, device)


class LoggingObserver(LayerCallObserver):
    """Notes in the device's log what it is told, and runs calls as `Streamer` does for evaluation."""

    def __init__(self, bench: Bench) -> None:
        self.runtime, self.log = bench.runtime, bench.device.log

    def call_reached(self, request: Request) -> None:
        self.log.append(f"reached {request.layer}")

    def weights_arrived(self, copy: DeviceCopy) -> None:
        self.log.append(f"arrived {len(copy.leaves)}")

    def run_call(self, request: Request, copy: DeviceCopy) -> Any:
        self.log.append("called")
        return self.runtime.layer_calls.run_attached(request, copy.leaves)

    def call_finished(self) -> None:
        self.log.append("finished")


def test_an_observer_is_told_of_a_call_before_its_weights_come_and_when_they_have_gone(bench: Bench) -> None:
    layers = [layer.index for layer in bench.layers]
    observer = LoggingObserver(bench)
    bench.model.order = (0,)
    size = next(size for size, number in bench.sizes.items() if number == 0)
    bench.device.log.clear()
    with bench.streamer.opened((), observer.run_call, [observer]), handled_by(bench.streamer), torch.no_grad():
        bench.model(torch.ones(1, WIDTHS[0]))
    assert bench.device.log == [
        "arrived 0",  # of what no layer owns
        f"reached {layers[0]}",
        f"in {size}",
        "arrived 2",
        "called",
        "run 0",
        f"out {size}",
        "finished",
    ]


AHEAD = "in0 in1 run0 out0 in2 run1 out1 run2 out2"
LAYER_1 = ("layers.1.weight", "layers.1.bias")


@pytest.mark.parametrize(
    ("called", "known", "resident", "log"),
    [
        ((0, 1, 2), (0, 1, 2), (), AHEAD),
        ((0, 1, 2), (), (), "in0 run0 out0 in1 run1 out1 in2 run2 out2"),
        ((0, 2, 1), (0, 1, 2), (), "in0 in1 run0 out0 out1 in2 run2 out2 in1 in2 run1 out1 out2"),
        # Behind 0 comes 0 or 1, as the last of both says: 1, in vain the first time.
        ((0, 0, 1), (0, 0, 1), (), "in0 in1 run0 out0 out1 in0 in1 run0 out0 run1 out1"),
        ((0, 0), (0, 0), (), "in0 run0 out0 in0 run0 out0"),
        ((0, 1, 2), (0, 1, 2), LAYER_1, "in1 in0 run0 out0 in2 run1 run2 out2 out1"),
    ],
    ids=["ahead", "not known", "in vain", "twice", "twice alone", "resident"],
)
def test_the_next_layer_comes_before_the_one_that_is_called_runs(
    bench: Bench, called: tuple[int, ...], known: tuple[int, ...], resident: tuple[str, ...], log: str
) -> None:
    bench.model.order = called
    bench.stream(known, resident)
    assert bench.log() == log


def test_results_are_the_models_own_and_nothing_stays(bench: Bench) -> None:
    made = bench.stream((0, 1, 2))
    x = torch.ones(1, WIDTHS[0])
    plain = [nn.functional.linear(x, layer.weight, layer.bias) for layer in bench.model.layers]
    assert torch.equal(made, torch.cat(plain, dim=1))
    assert not made.requires_grad
    assert bench.device.allocated_bytes() == 0


@pytest.mark.parametrize("fails", ["layer", "resident set"])
def test_nothing_stays_and_nothing_is_open_where_something_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    with monkeypatch.context() as patched:
        owner, name = (
            (bench.model.layers[1], "forward") if fails == "layer" else (bench.runtime.device_copies, "swap_in")
        )
        patched.setattr(owner, name, _fail)
        with pytest.raises(ZeroDivisionError):
            bench.stream((0, 1, 2))
    assert bench.device.allocated_bytes() == 0
    bench.stream((0, 1, 2))
    assert bench.log() == AHEAD


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def test_within_a_pass_that_streams_nothing_is_opened_again(bench: Bench) -> None:
    with bench.streamer.streaming((), (0, 1, 2)):
        bench.stream((2, 1, 0))
        assert bench.log() == AHEAD


class Between(Net):
    """Uses a layer's weight outside its call."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.layers[0].bias.sum()


def test_a_parameter_that_is_used_between_layers_comes_once_and_stays_to_the_end() -> None:
    device = ScriptedDevice()
    model = Between(device)
    with assembled(model, device) as assembly:
        bench = Bench(assembly, model, device)
        bench.sizes[slab_bytes(WIDTHS[1], 4) // 4] = 9  # the bias alone
        made = bench.stream((0, 1, 2))
        assert bench.log() == f"{AHEAD} in9 out9"
        assert torch.isfinite(made).all()
