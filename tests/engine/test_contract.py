"""A call's micro-batch runs later than it was called, and sees what the call saw."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.utils.import_utils import enable_tf32

from harmony_ds import ModelError
from tests.engine.drive import config_of, engine_for, random_rows, sgd, weights_of
from tests.families import build_seeded
from tests.inside import planner_of
from tests.oracle import assert_same

pytestmark = pytest.mark.fixed_times

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.mask = torch.ones(WIDTH)
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.dropout(self.linear(x)) * self.mask + self.shift)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def inputs(index: int) -> Tensor:
    return random_rows(index, 2, WIDTH)


def test_a_model_measured_in_evaluation_mode_is_measured_again_in_training_mode() -> None:
    model = build_seeded(Model).eval()
    with engine_for(model, sgd, config_of(1)) as engine:
        for mode in (False, True, False, True):
            model.train(mode)
            engine.backward(engine(inputs(0)))
            engine.step()
        assert len(planner_of(engine)._measured) == 2


def switches() -> tuple[Any, ...]:
    return (
        torch.backends.cuda.math_sdp_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.fp32_precision,
    )


class Attentive(nn.Linear):
    """Notes the switches that it saw."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(switches())
        return super().forward(x).mean()


def test_torchs_switches_are_those_of_the_call() -> None:
    model = nn.Sequential(Attentive(WIDTH, WIDTH))
    seen = model[0].seen = []
    ordinary, others = switches(), (False, torch.float64, True, "tf32")
    with engine_for(model, sgd, config_of(2)) as engine:
        for number in range(4):
            x = inputs(number)
            if number == 2:  # the model has been measured, which calls it a few times
                seen.clear()
                with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                    torch.set_default_dtype(torch.float64)
                    torch.backends.cuda.matmul.fp32_precision = "tf32"
                    torch.use_deterministic_algorithms(True)
                    try:
                        loss = engine(x)
                    finally:
                        torch.set_default_dtype(torch.float32)
                        torch.backends.cuda.matmul.fp32_precision = ordinary[-1]
                        torch.use_deterministic_algorithms(False)
            else:
                loss = engine(x)
            engine.backward(loss)
            engine.step()
    assert set(seen) == {others, ordinary}
    assert seen[0] == others
    assert switches() == ordinary


def test_transformers_tf32_does_not_stop_a_model() -> None:
    before, model = torch.backends.fp32_precision, build_seeded(Model)
    enable_tf32(True)
    try:
        with engine_for(model, sgd, config_of(2)) as engine:
            engine.train_batch(iter([inputs(number) for number in range(2)]))
            assert engine.global_steps == 1
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
    finally:
        torch.backends.fp32_precision = before


class Momentum(Model):
    """Keeps a copy of its first layer, which forward moves towards that."""

    def __init__(self, write: Callable[[nn.Parameter, Tensor], object]) -> None:
        super().__init__()
        self.write = write
        self.slow = nn.Parameter(self.layers[0].linear.weight.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.slow, self.layers[0].linear.weight)
        return super().forward(x @ self.slow)


def assign(slow: nn.Parameter, fast: Tensor) -> None:
    slow.data = 0.9 * slow.data + 0.1 * fast + 0.01


@pytest.mark.parametrize(
    "write", [assign, lambda slow, _: slow.data.mul_(0.9), lambda slow, fast: slow.lerp_(fast, 0.1)]
)
def test_a_parameter_that_forward_writes_between_layers_is_refused(
    write: Callable[[nn.Parameter, Tensor], object],
) -> None:
    with (
        engine_for(build_seeded(lambda: Momentum(write)), sgd, config_of(1)) as engine,
        pytest.raises(ModelError, match=r"forward writes into the parameter (\S+ or )?slow,"),
    ):
        engine.train_batch(iter([inputs(0)]))


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
    batches = [inputs(number) for number in range(3)]
    losses = [plain(batch).item() for batch in batches]
    model = build_seeded(Repeated)
    config = config_of(3, None, {"pack_layers": 1, "layers": ["layers.0"]})
    with engine_for(model, sgd, config) as engine:
        assert engine.train_batch(iter(batches)).item() == torch.tensor(losses).mean().item()
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()), bitwise=True)
    assert len([record for record in caplog.records if "one by one" in record.message]) == 1


# ---- what is refused


class Recurrent(nn.Linear):
    """A layer that adds the state that its last call has left, and leaves its own."""

    state = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.state = super().forward(x + 0 * self.state).mean()
        return self.state


def test_a_state_with_a_graph_on_an_attribute_is_refused_as_one() -> None:
    model, said = nn.Sequential(nn.Linear(WIDTH, WIDTH), Recurrent(WIDTH, 1)), r"argument \(an attribute of a module, "
    with (
        engine_for(model, sgd, config_of(1, None, {"pack_layers": 1})) as engine,
        pytest.raises(ModelError, match=said),
    ):
        engine.train_batch([inputs(0)])


@pytest.mark.parametrize("name", ["shift", "mask"])
@pytest.mark.parametrize("change", [lambda values: values.add_(1.0), lambda values: values + 1.0])
def test_an_attribute_that_changes_between_the_calls_of_a_step_is_refused_by_name(
    change: Callable[[Tensor], Tensor], name: str
) -> None:
    model = build_seeded(Model)
    with engine_for(model, sgd, config_of(2, None, {"pack_layers": 1})) as engine:
        for number in range(3):
            model._current_fx_name = f"training_step {number}"  # as Lightning does
            engine.backward(engine(inputs(number)))
            engine.step()
        setattr(model.layers[2], name, change(getattr(model.layers[2], name)))
        changed = weights_of(model)
        engine.backward(engine(inputs(3)))
        with pytest.raises(ModelError, match=f"layers.2.{name} was changed"):
            engine.step()
        engine.finish_updates()
        assert_same(weights_of(model), changed, bitwise=True)
        for number in range(4, 6):  # and goes on
            engine.backward(engine(inputs(number)))
            engine.step()
        assert engine.global_steps == 2


@pytest.mark.filterwarnings("ignore:a loss or an output")
def test_what_is_put_back_after_a_call_is_refused_by_name_when_that_call_runs() -> None:
    model = build_seeded(Model)
    with engine_for(model, sgd, config_of(1)) as engine:
        whole, mask = model.layers, model.layers[2].mask
        model.layers = whole[:2]
        engine.backward(engine(inputs(0)))
        model.layers = whole
        with pytest.raises(ModelError, match="layers was changed"):
            engine.step()
        model.layers[2].mask = 0 * mask
        reference = engine(inputs(1)).detach()  # only read
        model.layers[2].mask = mask
        engine.backward((engine(inputs(1)) - reference).square())
        with pytest.raises(ModelError, match=r"layers.2.mask was changed"):
            engine.step()


def test_an_attribute_that_forward_sets_is_there_after_the_step_and_costs_no_grouping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Noting(Model):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.sums = torch.zeros(()), {"rows": torch.zeros(())}

        def forward(self, x: Tensor) -> Tensor:
            self.deltas = x.mean(1).detach()
            self.rows += len(x)
            self.sums["rows"] += len(x)
            return super().forward(x)

    model = build_seeded(Noting)
    with engine_for(model, sgd, config_of(3, None, {"pack_layers": 1})) as engine:
        losses, seen = [], []
        for number in range(12):
            losses.append(engine(inputs(number)))
            engine.backward(losses[-1])
            engine.step()
            if number % 3 == 2:
                seen.append(weakref.ref(model.deltas))
        assert engine.swap_report().ratio == 1.0
        assert torch.equal(model.deltas, inputs(11).mean(1))
        assert model.rows == model.sums["rows"] == 24  # measuring and the first step's proof do not count
        gc.collect()
        assert seen[0]() is None  # kept losses do not keep it
        engine.eval()
        with torch.inference_mode():  # such tensors do not tell how often they have been written to
            engine(inputs(6))
        assert torch.equal(model.deltas, inputs(6).mean(1))
    assert len([record for record in caplog.records if "sets deltas" in record.getMessage()]) == 1


class Masked(nn.Module):
    """Its last layer reads what forward has set on the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        owner = self

        class Reading(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x * owner.mask)

        self.last = Reading(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["mask"] = (x > 0).float()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x).square().mean()


def test_micro_batches_that_read_what_others_have_set_are_refused_in_the_first_step() -> None:
    model = build_seeded(Masked)
    before = weights_of(model)
    with engine_for(model, sgd, config_of(2, None, {"pack_layers": 1})) as engine:
        with pytest.raises(ModelError, match=r"loss of micro-batch 1 .*attributes that it sets: mask"):
            engine.train_batch(iter([inputs(0), inputs(1)]))
        engine.finish_updates()
        assert_same(weights_of(model), before, bitwise=True)
