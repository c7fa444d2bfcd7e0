"""A call's micro-batch runs later than it was called, and sees what the call saw."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from harmony_ds import BatchError, CallChangedError, HarmonyEngine, UnsupportedError
from harmony_ds.errors import RecomputeError
from tests.cover import spread
from tests.engine.drive import config_of, engine_for, seed_of
from tests.families import build_seeded
from tests.inside import planner_of, queue_of
from tests.oracle import assert_same

WIDTH = 8
ACCUMULATION = 3
STEPS = 2
FLAVOUR: contextvars.ContextVar[float] = contextvars.ContextVar("flavour", default=1.0)
Call = Callable[..., Tensor]
Before = Callable[[nn.Module, int], Any]


class Settings:
    def __init__(self) -> None:
        self.scale = 1.0
        self.parts = [1.0, 2.0]
        self.rope = {"theta": 1.0}


class Layer(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.settings = settings
        self.k = 1.0
        self.mask = torch.ones(WIDTH)
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.k * self.settings.scale * self.settings.parts[0] * self.settings.rope["theta"]
        return x + torch.tanh(self.dropout(self.linear(x)) * scale * self.mask + self.shift) * FLAVOUR.get()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()
        self.layers = nn.ModuleList(Layer(self.settings) for _ in range(4))
        self.gain = 1

    def forward(self, x: Tensor, extra: Any = None) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.gain
        if extra is not None:
            x = x + extra["add"][0]
        return x.square().mean()


def inputs(index: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(index))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def drive(
    train: Callable[[nn.Module, Call, Callable[[Tensor], None], Callable[[], None]], list[Any]],
    build: Callable[[], nn.Module] = Model,
    bitwise: bool = True,
) -> None:
    """Runs one loop twice, over the plain model and over the engine, and compares weights and losses.

    `train` is given the model, what calls it, what propagates back from a loss, and what ends a micro-batch.
    """
    plain = build_seeded(build)
    optimizer = sgd(plain.parameters())
    count = 0

    def call(*args: Any, **kwargs: Any) -> Tensor:
        torch.manual_seed(seed_of(*divmod(count, ACCUMULATION)))
        loss: Tensor = plain(*args, **kwargs)
        return loss

    def end() -> None:
        nonlocal count
        count += 1
        if count % ACCUMULATION == 0:
            optimizer.step()
            optimizer.zero_grad()

    expected = [loss.item() for loss in train(plain, call, lambda loss: (loss / ACCUMULATION).backward(), end)]
    model = build_seeded(build)
    with (
        warnings.catch_warnings(),
        engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine,
    ):
        warnings.simplefilter("ignore", RuntimeWarning)  # losses are looked at
        losses = train(model, engine, engine.backward, engine.step)
        actual = [loss.item() for loss in losses]
    assert actual == (expected if bitwise else pytest.approx(expected, rel=1e-6))
    assert_same(model, plain, bitwise)


def each(before: Before, build: Callable[[], nn.Module] = Model) -> None:
    """The ordinary loop, with `before(model, number)` ahead of each call."""

    def train(model: nn.Module, call: Call, backward: Callable[[Tensor], Any], end: Callable[[], None]) -> list[Any]:
        losses = []
        for number in range(STEPS * ACCUMULATION):
            before(model, number)
            loss = call(inputs(number))
            backward(loss)
            end()
            losses.append(loss)
        return losses

    drive(train, build)


# ---- inputs


def test_a_buffer_that_the_loop_fills_again() -> None:
    def train(model: nn.Module, call: Call, backward: Callable[[Tensor], Any], end: Callable[[], None]) -> list[Any]:
        buffer, array = torch.empty(2, WIDTH), np.zeros(WIDTH, dtype=np.float32)
        extra: dict[str, list[Tensor]] = {"add": []}
        losses = []
        for number in range(STEPS * ACCUMULATION):
            buffer.copy_(inputs(number))
            array[:] = number
            extra["add"][:] = [torch.from_numpy(array)]
            losses.append(call(buffer, extra))
            backward(losses[-1])
            end()
            extra["add"].clear()
        return losses

    drive(train)


def test_an_iterator_that_fills_one_buffer_again() -> None:
    def batches() -> Iterator[Tensor]:
        buffer = torch.empty(2, WIDTH)
        for number in range(STEPS * ACCUMULATION):
            yield buffer.copy_(inputs(number))

    plain = build_seeded(Model).eval()
    optimizer = sgd(plain.parameters())
    for number, batch in enumerate(batches()):
        (plain(batch) / ACCUMULATION).backward()
        if number % ACCUMULATION == ACCUMULATION - 1:
            optimizer.step()
            optimizer.zero_grad()
    model = build_seeded(Model).eval()
    with engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        given = batches()
        for _ in range(STEPS):
            engine.train_batch(given)
    assert_same(model, plain, bitwise=True)


def test_one_tensor_in_two_places_stays_one() -> None:
    seen = []

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.linear(x), y)

        def generate(self, *pair: Tensor) -> tuple[Tensor, ...]:
            return pair

    with engine_for(build_seeded(Pair), sgd, config_of(1)) as engine:
        seen = queue_of(engine)
        x = inputs(0)
        loss = engine(x, x)
        given, other = engine.generate(x, x)
        assert given is other and given is not x
        (left, right), _ = seen[0].micro_batch.inputs
        assert left is right and left is not x
        engine.backward(loss)
        engine.step()


def test_a_forward_that_writes_into_what_it_is_given_is_refused() -> None:
    class Writing(Model):
        def forward(self, x: Tensor, extra: Any = None) -> Tensor:
            return super().forward(x.mul_(2.0), extra)

    with engine_for(build_seeded(Writing), sgd, config_of(1)) as engine:
        with pytest.raises(BatchError, match="forward of Writing writes into a tensor"):
            engine.train_batch(iter([inputs(0)]))
        assert engine.global_steps == 0


# ---- modes, attributes, surroundings


def set_mode(model: nn.Module, number: int) -> None:
    model.train(number % 2 == 0)


def set_one_mode(model: Any, number: int) -> None:
    model.layers[1].dropout.train(number % 3 == 0)


def set_attribute(model: Any, number: int) -> None:
    model.gain = 1 + number
    model.layers[number % 4].k = 0.5 * number


def set_setting(model: Any, number: int) -> None:
    model.settings.scale = 1.0 + number


def set_item(model: Any, number: int) -> None:
    model.settings.parts[0] = 1.0 + number
    model.settings.rope["theta"] = 2.0 - number


def set_tensor(model: Any, number: int) -> None:
    model.layers[0].mask = torch.full((WIDTH,), float(number))


def set_probability(model: Any, number: int) -> None:
    for layer in model.layers:
        layer.dropout.p = 0.1 * number


@pytest.mark.parametrize(
    "before", [set_mode, set_one_mode, set_attribute, set_setting, set_item, set_tensor, set_probability]
)
def test_what_the_loop_sets_between_calls(before: Before) -> None:
    each(before)


SCALE = 1.0
TABLE = {"gain": [1.0]}


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


class Reading(Model):
    """Reads a global, by a function, an attribute of its class, and a variable around it."""

    factor = 1.0

    def forward(self, x: Tensor, extra: Any = None) -> Tensor:
        return scaled(super().forward(x, extra)) * TABLE["gain"][0] * self.factor


def set_global(model: Any, number: int) -> None:
    global SCALE  # noqa: PLW0603 - what scripts do
    SCALE = 1.0 + number


def set_global_item(model: Any, number: int) -> None:
    TABLE["gain"][0] = 1.0 + number


def set_class_attribute(model: Any, number: int) -> None:
    Reading.factor = 1.0 + number


@pytest.mark.parametrize("before", [set_global, set_global_item, set_class_attribute])
def test_what_the_models_code_reads_elsewhere(before: Before) -> None:
    each(before, Reading)
    before(None, 0)


def test_a_variable_around_the_class() -> None:
    factor = 1.0

    class Around(Model):
        def forward(self, x: Tensor, extra: Any = None) -> Tensor:
            return super().forward(x, extra) * factor

    def before(model: nn.Module, number: int) -> None:
        nonlocal factor
        factor = 1.0 + number

    each(before, Around)


def test_what_is_set_after_the_last_call_is_not_seen_and_stays() -> None:
    def train(model: Any, call: Call, backward: Callable[[Tensor], Any], end: Callable[[], None]) -> list[Any]:
        losses = []
        for number in range(STEPS * ACCUMULATION):
            losses.append(call(inputs(number)))
            backward(losses[-1])
            model.gain, model.settings.scale = 7, float(number)
            end()
            assert (model.gain, model.settings.scale) == (7, float(number))
            model.gain = 1
        return losses

    drive(train)


def test_context_variables_are_those_of_the_call() -> None:
    each(lambda model, number: FLAVOUR.set(1.0 + number))
    FLAVOUR.set(1.0)


HERE: Any = threading.local()


class OfThread(Model):
    """Reads what its thread holds, in its layers and between them."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_hook(lambda module, args, output: output * HERE.scale)

    def forward(self, x: Tensor, extra: Any = None) -> Tensor:
        return super().forward(x * HERE.scale, extra) * getattr(HERE, "late", 1.0)


def set_of_thread(model: Any, number: int) -> None:
    HERE.scale = 1.0 + 0.25 * number
    if number >= ACCUMULATION:
        HERE.late = 2.0


def test_what_a_thread_holds_is_that_of_the_calling_thread() -> None:
    def before(model: nn.Module, number: int) -> None:
        if number == 0:
            vars(HERE).clear()
        set_of_thread(model, number)

    each(before, OfThread)
    assert vars(HERE) == {"scale": 2.25, "late": 2.0}


def test_a_setting_of_the_thread_within_a_context() -> None:
    @contextlib.contextmanager
    def scaled_by(scale: float) -> Iterator[None]:
        before, HERE.scale = HERE.scale, scale
        try:
            yield
        finally:
            HERE.scale = before

    def train(model: nn.Module, call: Call, backward: Callable[[Tensor], Any], end: Callable[[], None]) -> list[Any]:
        vars(HERE).clear()
        HERE.scale = 1.0
        losses = []
        for number in range(STEPS * ACCUMULATION):
            with scaled_by(1.5) if number % 2 else contextlib.nullcontext():
                losses.append(call(inputs(number)))
            backward(losses[-1])
            end()
        return losses

    drive(train, OfThread)


class ChangesOfThread(OfThread):
    def forward(self, x: Tensor, extra: Any = None) -> Tensor:
        HERE.scale *= 0.5
        return super().forward(x, extra)


class LayerChangesOfThread(OfThread):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_pre_hook(lambda module, args: setattr(HERE, "scale", 3.0))


@pytest.mark.parametrize("build", [ChangesOfThread, LayerChangesOfThread])
def test_a_forward_that_changes_what_its_thread_holds_is_refused_by_name(build: type[Model]) -> None:
    vars(HERE).clear()
    HERE.scale = 2.0
    model = build_seeded(build)
    with (
        pytest.raises(RecomputeError, match=r"changes what .*HERE, a threading\.local, holds"),
        engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine,
    ):
        engine(inputs(0)).item()


class Careful(nn.Module):
    """Computes one layer in fp32, whatever is around the call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        with torch.autocast("cpu", enabled=False):
            x = self.layers[1](x.float()) @ torch.ones(WIDTH, WIDTH)
        return self.layers[2](x).float().square().mean()


def test_autocast_switched_off_inside_a_model() -> None:
    plain = build_seeded(Careful)
    optimizer = sgd(plain.parameters())
    for step in range(STEPS):
        for number in range(ACCUMULATION):
            with torch.autocast("cpu", torch.bfloat16):
                (plain(inputs(step * ACCUMULATION + number)) / ACCUMULATION).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = build_seeded(Careful)
    with engine_for(model, sgd, config_of(ACCUMULATION, None, {"pack_layers": 1})) as engine:
        for step in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16):
                engine.train_batch(iter([inputs(step * ACCUMULATION + number) for number in range(ACCUMULATION)]))
    assert_same(model, plain, bitwise=True)


@pytest.mark.parametrize("around", ["call", "step"])
def test_autocast_around_some_calls_and_around_others_not(around: str) -> None:
    def train(model: nn.Module, call: Call, backward: Callable[[Tensor], Any], end: Callable[[], None]) -> list[Any]:
        losses = []
        for number in range(STEPS * ACCUMULATION):
            with torch.autocast("cpu", torch.bfloat16, enabled=around == "call" and number % 2 == 0):
                losses.append(call(inputs(number)))
            backward(losses[-1])
            with torch.autocast("cpu", torch.bfloat16, enabled=around == "step"):
                end()
        return losses

    drive(train)


class Attentive(nn.Module):
    """Says which kernels and which default dtype it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[tuple[bool, torch.dtype, bool, str]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(
            (
                torch.backends.cuda.math_sdp_enabled(),
                torch.get_default_dtype(),
                torch.are_deterministic_algorithms_enabled(),
                torch.get_float32_matmul_precision(),
            )
        )
        return self.linear(x).mean()


def test_torchs_switches_are_those_of_the_call() -> None:
    model = nn.Sequential(Attentive())
    ordinary = (True, torch.float32, False, "highest")
    with engine_for(model, sgd, config_of(2)) as engine:
        engine.backward(engine(inputs(0)))  # measured, which calls it a few times
        engine.step()
        engine.backward(engine(inputs(0)))
        engine.step()
        seen, x = model[0].seen, inputs(0)
        seen.clear()
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            torch.set_default_dtype(torch.float64)
            torch.set_float32_matmul_precision("high")
            torch.use_deterministic_algorithms(True)
            try:
                loss = engine(x)
            finally:
                torch.set_default_dtype(torch.float32)
                torch.set_float32_matmul_precision("highest")
                torch.use_deterministic_algorithms(False)
        engine.backward(loss)
        engine.step()
        engine.backward(engine(inputs(1)))
        engine.step()
    assert set(seen) == {(False, torch.float64, True, "high"), ordinary}
    assert seen[0] == (False, torch.float64, True, "high") and seen[-1] in set(seen)
    assert torch.backends.cuda.math_sdp_enabled() and torch.get_default_dtype() is torch.float32
    assert not torch.are_deterministic_algorithms_enabled()


# ---- forward passes whose order matters


class Normed(nn.Module):
    """Statistics inside layers and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3))
        self.between = nn.ModuleList(nn.BatchNorm1d(WIDTH, affine=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer, between in zip(self.layers, self.between, strict=True):
            x = between(torch.tanh(layer(x)))
        return (x + 1).square().mean()


def look_at_the_last(model: Any, call: Call, loss: Tensor) -> Any:
    return loss.item()


def evaluate(model: Any, call: Call, loss: Tensor) -> Any:
    model.eval()
    with torch.no_grad():
        value = call(inputs(99)).item()
    model.train()
    return value


def read_statistics(model: Any, call: Call, loss: Tensor) -> Any:
    return model.layers[1][1].running_mean.sum().item()


def save(model: Any, call: Call, loss: Tensor) -> Any:
    return {name: t.clone() for name, t in model.state_dict().items()}["between.1.running_var"].sum().item()


def call_and_forget(model: Any, call: Call, loss: Tensor) -> Any:
    call(inputs(98))


def reset_statistics(model: Any, call: Call, loss: Tensor) -> Any:
    model.between[0].reset_running_stats()


@pytest.mark.parametrize(
    ("middle", "at"),
    spread([look_at_the_last, evaluate, read_statistics, save, call_and_forget, reset_statistics], [1, 2, 4]),
)
def test_statistics_are_those_of_the_order_of_the_calls(middle: Callable[..., Any], at: int) -> None:
    noted: list[Any] = []

    def train(model: nn.Module, call: Call, backward: Callable[[Tensor], Any], end: Callable[[], None]) -> list[Any]:
        losses, notes = [], []
        for number in range(STEPS * ACCUMULATION):
            losses.append(call(inputs(number)))
            backward(losses[-1])
            if number == at:
                notes.append(middle(model, call, losses[-1]))
            end()
        noted.append(notes)
        return losses

    drive(train, Normed)
    assert noted[0] == noted[1]


def test_a_mode_of_statistics_that_changes_between_calls() -> None:
    def train(model: Any, call: Call, backward: Callable[[Tensor], Any], end: Callable[[], None]) -> list[Any]:
        losses = []
        for number in range(STEPS * ACCUMULATION):
            model.train(number % 3 == 0)
            losses.append(call(inputs(number)))
            backward(losses[-1])
            end()
        return losses

    drive(train, Normed)


class Repeated(nn.Module):
    """Calls one layer with statistics three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = x + torch.tanh(self.layers[0](x))
        return (x + 1).square().mean()


def test_a_layer_that_changes_its_buffers_several_times_in_each_forward_pass(caplog: pytest.LogCaptureFixture) -> None:
    plain = build_seeded(Repeated)
    batches = [inputs(number) for number in range(ACCUMULATION)]
    losses = [plain(batch).item() for batch in batches]
    model = build_seeded(Repeated)
    config = config_of(ACCUMULATION, None, {"pack_layers": 1, "layers": ["layers.0"]})
    with engine_for(model, sgd, config) as engine:
        assert engine.train_batch(iter(batches)).item() == torch.tensor(losses).mean().item()
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()), bitwise=True)
    assert len([record for record in caplog.records if "one by one" in record.message]) == 1


class Residual(nn.Module):
    """Residual connections around its layers, in the code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(x) + layer(x).sigmoid()
        return x.square().mean()


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_loss_that_is_looked_at_shares_its_graph_with_the_layers(by_hand: bool) -> None:
    def train(model: nn.Module, call: Call, backward: Callable[[Tensor], Any], end: Callable[[], None]) -> list[Any]:
        losses = []
        for number in range(STEPS * ACCUMULATION):
            losses.append(call(inputs(number)))
            losses[-1].item()
            if by_hand:
                (losses[-1] if isinstance(call, HarmonyEngine) else losses[-1] / ACCUMULATION).backward()
            else:
                backward(losses[-1])
            end()
        return losses

    drive(train, Residual, bitwise=False)  # as without looking: what goes around a layer is added later


# ---- modes that were not measured


def thaw(model: Any, number: int) -> None:
    for index, layer in enumerate(model.layers):
        for parameter in layer.parameters():
            parameter.requires_grad_(number < ACCUMULATION or index >= 2)


def test_what_is_frozen_for_a_while_is_measured_anew() -> None:
    def train(model: nn.Module, call: Call, backward: Callable[[Tensor], Any], end: Callable[[], None]) -> list[Any]:
        losses = []
        for number in range(3 * ACCUMULATION):
            if number % ACCUMULATION == 0:
                thaw(model, number % (2 * ACCUMULATION))
            losses.append(call(inputs(number)))
            backward(losses[-1])
            end()
        return losses

    drive(train)


def test_a_model_measured_in_evaluation_mode_is_measured_again_in_training_mode() -> None:
    model = build_seeded(Model).eval()
    with engine_for(model, sgd, config_of(1)) as engine:
        for mode in (False, True, False, True):
            model.train(mode)
            engine.backward(engine(inputs(0)))
            engine.step()
        assert len(planner_of(engine)._measured) == 2


# ---- what is refused


def write_buffer(model: Any) -> None:
    model.layers[2].shift.fill_(1.0)


def replace_buffer(model: Any) -> None:
    model.layers[2].shift = torch.ones(WIDTH)


def write_attribute(model: Any) -> None:
    model.layers[2].mask.mul_(2.0)


def register_hook(model: Any) -> None:
    model.layers[2].register_forward_hook(lambda *_: None)


def replace_module(model: Any) -> None:
    model.layers[2].dropout = nn.Identity()


def test_hooks_that_change_what_is_saved_for_backward_are_refused() -> None:
    with engine_for(build_seeded(Model), sgd, config_of(1)) as engine:
        for keeps in (lambda t: t.clone(), lambda t: t * 0.5):
            with torch.autograd.graph.saved_tensors_hooks(keeps, lambda t: t):
                if keeps(torch.ones(())) == 1.0:
                    engine.backward(engine(inputs(0)))
                    engine.step()
                    continue
                with pytest.raises(UnsupportedError, match="saved_tensors_hooks"):
                    engine(inputs(1))
        with torch.autograd.graph.save_on_cpu():
            engine.backward(engine(inputs(2)))
        engine.step()
        assert engine.global_steps == 2


REFUSED = [
    (write_buffer, r"the buffer Model.layers.2.shift was changed in place"),
    (replace_buffer, r"a buffer of Model.layers.2 was added, removed or replaced"),
    (write_attribute, r"the tensor Model.layers.2.mask was changed in place"),
    (register_hook, r"a forward hook of Model.layers.2 was registered or removed"),
    (replace_module, r"a module of Model.layers.2 was added, removed or replaced"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
@pytest.mark.parametrize("at", ["call", "step"])
def test_what_cannot_be_put_in_place_again_is_refused_by_name(
    change: Callable[[Any], None], message: str, at: str
) -> None:
    model = build_seeded(Model)
    with engine_for(model, sgd, config_of(2, None, {"pack_layers": 1})) as engine:
        for number in range(2):
            engine.backward(engine(inputs(number)))
            engine.step()
        engine.finish_updates()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine.backward(engine(inputs(2)))
        engine.step()
        if at == "step":
            engine.backward(engine(inputs(3)))
        change(model)
        changed = {name: p.detach().clone() for name, p in model.named_parameters()}
        for _ in range(2):  # it is not forgotten
            with pytest.raises(CallChangedError, match=message):
                engine(inputs(3)) if at == "call" else engine.step()
            if at == "step":
                break
        engine.finish_updates()
        assert all(torch.equal(p, changed[name]) for name, p in model.named_parameters())
        assert weights.keys() == changed.keys()


@pytest.mark.parametrize(("change", "message"), REFUSED[:-1])
def test_between_two_groups_and_where_losses_are_known_anything_may_change(
    change: Callable[[Any], None], message: str
) -> None:
    def train(model: nn.Module, call: Call, backward: Callable[[Tensor], Any], end: Callable[[], None]) -> list[Any]:
        losses = []
        for number in range(STEPS * ACCUMULATION):
            if number == ACCUMULATION:
                change(model)
            losses.append(call(inputs(number)))
            backward(losses[-1])
            end()
        return losses

    drive(train)
