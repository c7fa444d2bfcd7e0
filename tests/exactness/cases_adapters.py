"""Settings that the code of a micro-batch makes on modules, as PEFT and diffusers make them on adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tests.exactness.case import ALL, Found, case
from tests.exactness.models import weights
from tests.exactness.sides import Side

WIDTH, STEPS = 8, 3


def inputs(index: int) -> Tensor:
    """A batch whose first element is positive for some of every five."""
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(index)).abs()
    x[0, 0] *= 1 if index % 5 in (1, 4) else -1
    return x


class Adapted(nn.Module):
    """A frozen linear with two trained adapters, one of which is used, by PEFT's names."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapters = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.scaling = {"a": 1.0, "b": 1.0}
        self.active, self.disabled = ["a"], False

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if not self.disabled:
            for name in self.active:
                y = y + self.adapters[name](x) * self.scaling[name]
        return torch.tanh(y)


class Stack(nn.Module):
    """Layers whose adapters start at `start`."""

    def __init__(self, start: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(4))
        for layer in self.layers:
            for adapter in layer.adapters.values():
                nn.init.normal_(adapter.weight, std=start)
                nn.init.constant_(adapter.bias, start)
        self.seen: list[int] = []

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def set_adapter(self, name: str, flags: bool = True) -> str:
        """As PEFT does: the one that is used is trained, the other one is not. Return the one before."""
        before = self.layers[0].active[0]
        for layer in self.layers:
            layer.active = [name]
            for key, adapter in layer.adapters.items():
                if flags:
                    adapter.requires_grad_(key == name)
        return before


class PolicyFirst(Stack):
    """A policy, and the other adapter as its reference."""

    def forward(self, x: Tensor) -> Tensor:
        policy = self.body(x)
        with torch.no_grad():
            before = self.set_adapter("b")
            reference = self.body(x)
            self.set_adapter(before)
        return (policy - reference).square().mean() + policy.mean()


class ReferenceFirst(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            before = self.set_adapter("b")
            reference = self.body(x)
            self.set_adapter(before)
        policy = self.body(x)
        return (policy - reference).square().mean() + policy.mean()


class Disabled(Stack):
    """The reference is the model without adapters, which start at zero."""

    def __init__(self) -> None:
        super().__init__(0.0)

    def forward(self, x: Tensor) -> Tensor:
        policy = self.body(x)
        for layer in self.layers:
            layer.disabled = True
        with torch.no_grad():
            reference = self.body(x)
        for layer in self.layers:
            layer.disabled = False
        return (policy - reference).square().mean() + policy.mean()


class OneEach(Stack):
    """An adapter for each task, which is not taken back."""

    def forward(self, x: Tensor) -> Tensor:
        self.set_adapter("a" if x[0, 0] > 0 else "b")
        return self.body(x).mean()


class IfAnother(Stack):
    """The same, where it is not the one already."""

    def forward(self, x: Tensor) -> Tensor:
        name = "a" if x[0, 0] > 0 else "b"
        if self.layers[0].active != [name]:
            self.set_adapter(name)
        return self.body(x).mean()


class TakenBack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        before = self.set_adapter("a" if x[0, 0] > 0 else "b")
        loss = self.body(x).mean()
        self.set_adapter(before)
        return loss


class BothTrained(Stack):
    """Two tasks in one loss: of what is trained at the end alone, gradients come."""

    def forward(self, x: Tensor) -> Tensor:
        self.set_adapter("a")
        one = self.body(x).mean()
        self.set_adapter("b")
        return one + self.body(x).mean()


class Scaled(Stack):
    """Contents of dictionaries, changed for the time of a forward pass, as diffusers does; adapters start at zero."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__(start)

    @contextmanager
    def scaled(self, factor: float) -> Iterator[None]:
        for layer in self.layers:
            layer.scaling["a"] *= factor
        try:
            yield
        finally:
            for layer in self.layers:
                layer.scaling["a"] /= factor

    def forward(self, x: Tensor) -> Tensor:
        with self.scaled(0.3 + 0.4 * float(x[0, 0] > 0)):
            y = self.body(x)
            return y.square().mean() + y.mean()


class ScaledFromTenth(Scaled):
    def __init__(self) -> None:
        super().__init__(0.1)


class OneLayerAtATime(Stack):
    """A mode that is set for each call."""

    def forward(self, x: Tensor) -> Tensor:
        slope = float(x[0, 0])
        for number, layer in enumerate(self.layers):
            layer.scaling["a"] = 1.0 + number * slope
            x = layer(x)
            layer.scaling["a"] = 1.0
        return x.mean()


class Counting(Stack):
    """Counts its micro-batches, and a layer its calls: numbers that are left otherwise than they were."""

    def __init__(self) -> None:
        super().__init__()
        self.micro_batches, self.rows = 0, {"all": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.micro_batches += 1
        self.rows["all"] += len(x)
        self.mode = "used"
        return self.body(x).mean()


class Evaluating(Stack):
    """Its reference runs in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        for layer in self.layers:
            layer.adapters["a"] = nn.Sequential(layer.adapters["a"], nn.Dropout(0.3))
        self.eval()  # so that the model is measured in the mode that forward leaves

    def forward(self, x: Tensor) -> Tensor:
        self.eval()
        with torch.no_grad():
            reference = self.body(x)
        self.train()
        return (self.dropout(self.body(x)) - reference).square().mean()


class LeftDisabled(Stack):
    """Leaves its layers in a mode that every forward pass begins by taking back."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.disabled = False
        y = self.body(x)
        for layer in self.layers:
            layer.disabled = True
        return y.mean()


class LeftDisabledBySome(Stack):
    """The same, of which data decide."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.disabled = False
        y = self.body(x)
        for layer in self.layers:
            layer.disabled = bool(x[0, 0] > 0)
        return y.mean()


class ReferenceNotTrained(PolicyFirst):
    """A policy whose reference is not trained."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.adapters["b"].requires_grad_(False)


# ---- what forward does first in a later step than the one that was measured


def late_inputs(index: int) -> Tensor:
    """Inputs that begin with a large number in the middle of a step of four, and at the end of the next one."""
    x = inputs(index)
    if index in (5, 11):
        x[0, 0] = 91.0 + index
    return x


class Later(Stack):
    """Uses the other adapter for large numbers."""

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] < 90:
            return self.body(x).mean()
        before = self.set_adapter("b", flags=False)
        loss = self.body(x).mean()
        self.set_adapter(before, flags=False)
        return loss


class LeftLater(Stack):
    """The same, which the next micro-batch takes back."""

    def forward(self, x: Tensor) -> Tensor:
        self.set_adapter("b" if x[0, 0] > 90 else "a", flags=False)
        loss = self.body(x).mean()
        self.is_late = bool(x[0, 0] > 90)
        return loss


class LeftAtTheEndLater(Stack):
    """Leaves its layers, after their last calls, in a mode that the next forward pass takes back."""

    above, left = 90, slice(None)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.disabled = False
        loss = self.body(x).mean()
        for layer in self.layers[self.left]:
            layer.disabled = bool(x[0, 0] > self.above)
        return loss


class LeftByTheLast(LeftAtTheEndLater):
    """The same of the first layer, in the last of the large micro-batches alone."""

    above, left = 97, slice(1)


class LeftAtTheEndOfTwo(LeftAtTheEndLater):
    """The same with an adapter for each micro-batch."""

    def forward(self, x: Tensor) -> Tensor:
        self.set_adapter("a" if x[0, 1] > 0.5 else "b", flags=False)
        return super().forward(x)


class CountingLater(Stack):
    """The first layer counts the rows of its calls with large numbers."""

    class CountingLayer(Adapted):
        def __init__(self) -> None:
            super().__init__()
            self.rows = 0

        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0] > 90:
                self.rows += len(x)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = self.CountingLayer()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean()


def left_by(model: Stack) -> Tensor:
    """What a program may see of its settings, as numbers."""
    flags = [parameter.requires_grad for parameter in model.parameters()]
    of_layers = [
        (layer.active == ["a"], layer.disabled, layer.training, *layer.scaling.values()) for layer in model.layers
    ]
    own = model.training, getattr(model, "micro_batches", 0), getattr(model, "rows", {"all": 0})["all"]
    return torch.tensor([*flags, *(value for row in of_layers for value in row), *own, hasattr(model, "mode")]).float()


def trained_by_train_batch(
    side: Side, *builds: Callable[[], Stack], make: Callable[[int], Tensor] = inputs, steps: int = STEPS
) -> Found:
    """Train one model after the other; return what they leave."""
    found: Found = {}
    for number, build in enumerate(builds):
        model = build().train()
        engine = side.initialize(model, torch.optim.SGD(model.parameters(), lr=0.5))
        data = iter([(make(i),) for i in range(steps * side.accumulation)])
        losses = torch.stack([engine.train_batch(data) for _ in range(steps)])
        found = {**found, **weights(model, f"{number} "), f"{number} losses": losses, f"{number} left": left_by(model)}
    return found


def trained_by_loop(
    side: Side,
    *builds: Callable[[], Stack],
    make: Callable[[int], Tensor] = inputs,
    steps: int = STEPS,
    reads: bool = False,
) -> Found:
    """The same by the familiar loop, which may read each loss at once."""
    found: Found = {}
    for number, build in enumerate(builds):
        model = build().train()
        engine = side.initialize(model, torch.optim.SGD(model.parameters(), lr=0.5))
        losses = []
        for i in range(steps * side.accumulation):
            loss = engine(make(i))
            if reads:
                loss.item()
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        found = {**found, **weights(model, f"{number} "), f"{number} losses": torch.stack(losses)}
        found[f"{number} left"] = left_by(model)
    return found


@case(*ALL)
def adapter_of_a_reference_in_forward(side: Side) -> Found:
    """Forward switches to another adapter, or to none, for a reference under no_grad, after the policy or before it."""
    return trained_by_train_batch(side, PolicyFirst, ReferenceFirst, ReferenceNotTrained, Disabled)


@case(*ALL, pack_layers=2)
def adapter_of_each_task_in_forward(side: Side) -> Found:
    """Forward switches to the adapter of its data's task: as they come, if another is set, and back; both in one loss."""
    return trained_by_train_batch(side, OneEach, IfAnother, TakenBack, BothTrained)


@case(*ALL)
def scale_of_adapters_in_forward(side: Side) -> Found:
    """Forward changes numbers in dictionaries of its layers, for its own time or for one call."""
    return trained_by_train_batch(side, Scaled, ScaledFromTenth, OneLayerAtATime)


@case(*ALL, pack_layers=2)
def modes_left_by_forward(side: Side) -> Found:
    """Forward leaves modes that its next call takes back, counts calls and rows, and runs a reference in eval mode."""
    return trained_by_train_batch(side, LeftDisabled, LeftDisabledBySome, Counting, Evaluating)


@case(*ALL)
def modes_left_by_forward_and_losses_read(side: Side) -> Found:
    """Forward leaves a mode, always or for some data, that its next call takes back; each loss is read at once."""
    return trained_by_loop(side, LeftDisabled, LeftDisabledBySome, reads=True)


LATE = (Later, LeftLater, LeftAtTheEndLater, LeftByTheLast, LeftAtTheEndOfTwo, CountingLater)


@case()
def modes_first_set_in_a_later_step(side: Side) -> Found:
    """Forward sets adapters, modes and counts for data that come after the first step; by train_batch."""
    return trained_by_train_batch(side, *LATE, make=late_inputs, steps=4)


@case(pack_layers=2)
def modes_first_set_in_a_later_step_by_the_loop(side: Side) -> Found:
    """The same by the familiar loop."""
    return trained_by_loop(side, *LATE, make=late_inputs, steps=4)
