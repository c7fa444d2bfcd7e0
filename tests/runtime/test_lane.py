"""A forward pass that is suspended at layer calls, resumed, failed and unwound."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.decomposer import find_layers
from harmony_ds.device import CpuDevice
from harmony_ds.device.base import Device
from harmony_ds.model.intercept import Autocast, Interception, Request
from harmony_ds.model.own_settings import ModuleSettings
from harmony_ds.runtime.lane import Lane
from harmony_ds.runtime.thread_state import ThreadState

FLAVOUR: contextvars.ContextVar[str] = contextvars.ContextVar("flavour", default="none")


@contextmanager
def model_and_lane(
    forward: Callable[[nn.Module], Any],
    grad: bool = True,
    autocast: Autocast | None = None,
    device: Device | None = None,
) -> Iterator[Lane]:
    """A lane over `forward` of a model with three intercepted layers."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    device = device or CpuDevice()
    layers = find_layers(model).layers
    interception = Interception(layers, model, device)
    thread, settings = ThreadState(device, vars(model)), ModuleSettings(list(model.modules()), layers)
    lane = Lane(lambda: forward(model), grad, autocast, thread, contextvars.copy_context(), settings)
    try:
        yield lane
    finally:
        lane.close()
        interception.remove()


def layer_of(request: Request) -> int:
    """The place of a call in a model whose layers are called in their order."""
    return request.layer


class Answers:
    """Answers of an engine, and the layers that it was asked about."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[int] = []

    def __call__(self, request: Request, place: int = 0) -> Any:
        self.asked.append(request.layer)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


class OfTheLayer(Answers):
    """What is raised is what the layer has raised."""

    def __call__(self, request: Request, place: int = 0) -> Any:
        request.raised.append(id(self.answers[0]))
        return super().__call__(request, place)


def whole(model: nn.Module) -> Tensor:
    result: Tensor = model(torch.ones(1, 2))
    return result


def test_it_is_suspended_at_every_layer_call_and_goes_on_with_the_reply() -> None:
    with model_and_lane(whole) as lane, model_and_lane(whole) as other:
        lane.resume()
        other.resume()
        other.resume(torch.zeros(1, 2))
        layers = []
        while lane.request is not None:
            layers.append(lane.request.layer)
            (argument,) = lane.request.args
            lane.resume(argument + 10)
        assert layers == [0, 1, 2]
        assert lane.finished
        assert lane.request is None
        assert lane.result.tolist() == [[31.0, 31.0]]
        assert other.request.layer == 1


def test_a_forward_that_it_puts_on_the_model_is_its_own() -> None:
    models = []

    def replacing(model: nn.Module) -> Tensor:
        models.append(model)
        model.forward = lambda x: nn.Sequential.forward(model, x) + 1  # type: ignore[arg-type, method-assign]
        return whole(model) + whole(model)

    with model_and_lane(replacing) as lane:
        lane.resume()
        while lane.request is not None:
            assert "forward" not in vars(models[0])
            lane.resume(torch.zeros(1, 2))
        assert lane.result.tolist() == [[2.0, 2.0]]


class NoLuckError(Exception):
    pass


def failing(model: nn.Module) -> None:
    model[0](torch.ones(2))
    raise NoLuckError("in the model")


@pytest.mark.parametrize("error", [NoLuckError("in the model"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_what_the_model_raises_surfaces_as_itself(error: BaseException) -> None:
    def raising(model: nn.Module) -> None:
        model[0](torch.ones(2))
        raise error

    with model_and_lane(raising) as lane:
        lane.resume()
        with pytest.raises(type(error)) as caught:
            lane.resume(torch.ones(2))
        assert caught.value is error
        assert lane.finished


def falling_back(model: nn.Module) -> Tensor:
    try:
        result: Tensor = model[0](torch.ones(1, 2))
    except NoLuckError:
        result = model[1](torch.ones(1, 2))
    return result


def test_what_a_layer_raises_surfaces_with_the_models_own_lines_if_nothing_deals_with_it() -> None:
    with model_and_lane(failing) as lane:
        lane.resume()
        error = ValueError("in the layer")
        with pytest.raises(ValueError, match="in the layer") as caught:
            lane.run_on(layer_of, OfTheLayer(error))
        assert caught.value is error
        assert "failing" in [entry.name for entry in caught.traceback]
        assert lane.finished


def test_a_call_that_is_to_wait_is_answered_when_its_turn_comes_and_not_before() -> None:
    with model_and_lane(whole) as lane:
        lane.resume()
        first, second = Answers(1.0), Answers(2.0, 3.0)
        lane.run_on(layer_of, first, last=0)
        assert first.asked == [0]
        assert lane.request.layer == 1 and not lane.finished
        lane.run_on(layer_of, first, last=0)
        lane.run_on(layer_of, second)
        assert [*first.asked, *second.asked] == [0, 1, 2]
        assert lane.finished
        assert lane.result == 3.0


def second_failing(model: nn.Module) -> Any:
    model[0](torch.ones(1, 2))
    try:
        return model[1](torch.ones(1, 2))
    except Exception:  # noqa: BLE001 - a model that takes everything
        return model[2](torch.ones(1, 2))


@pytest.mark.parametrize("error", [NoLuckError("the engine's own"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_what_else_comes_up_in_the_lane_surfaces_past_the_models_handlers(error: BaseException) -> None:
    with model_and_lane(second_failing) as lane:
        lane.resume()
        with pytest.raises(type(error)) as caught:
            lane.run_on(layer_of, Answers(1.0, error))
        assert caught.value is error
        assert not lane.finished
        lane.close()
        assert lane.finished and lane.result is None


@pytest.mark.parametrize("waits", [True, False])
def test_what_a_layer_raises_is_the_models_to_deal_with(waits: bool) -> None:
    with model_and_lane(falling_back if waits else second_failing) as lane:
        lane.resume()
        answers = OfTheLayer(*(() if waits else (1.0,)), NoLuckError("in the layer"), 3.0)
        lane.run_on(layer_of, answers)
        assert answers.asked == ([0, 1] if waits else [0, 1, 2])
        assert lane.result == 3.0


def test_closing_unwinds_with_blocks_past_blanket_handlers() -> None:
    left: list[str] = []

    def guarded(model: nn.Module) -> None:
        try:
            with torch.autograd.set_detect_anomaly(False):
                model(torch.ones(1, 2))
        except Exception:  # noqa: BLE001 - what users write
            left.append("swallowed")
        finally:
            left.append("finally")

    with model_and_lane(guarded):  # which never runs
        pass
    assert not left
    with model_and_lane(guarded) as lane:
        lane.resume()
        lane.resume(torch.ones(1, 2))
        lane.close()
    assert left == ["finally"]
    assert lane.finished
    assert lane.result is None


def test_context_variables_are_inherited_and_kept_apart() -> None:
    def flavoured(model: nn.Module) -> str:
        seen = FLAVOUR.get()
        FLAVOUR.set("changed in the lane")
        model[0](torch.ones(2))
        return seen

    token = FLAVOUR.set("the caller's")
    try:
        with model_and_lane(flavoured) as lane:
            lane.resume()
            assert lane.request is not None
            assert lane.request.context.run(FLAVOUR.get) == "changed in the lane"
            lane.resume()
            assert lane.result == "the caller's"
            assert FLAVOUR.get() == "the caller's"
    finally:
        FLAVOUR.reset(token)


def test_the_current_autocast_is_found_and_one_that_is_off_is_entered() -> None:
    off = Autocast.current("cpu")
    assert off is not None and not off.enabled
    assert Autocast.current("meta") is None
    with torch.autocast("cpu", torch.bfloat16):
        assert Autocast.current("cpu") == Autocast("cpu", torch.bfloat16)
        with Autocast.entered(off):
            assert not torch.is_autocast_enabled("cpu")
        with Autocast.entered(None):
            assert torch.is_autocast_enabled("cpu")
    with Autocast.entered(off):
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("grad", [True, False])
def test_the_grad_mode_is_the_one_asked_for_or_set_by_the_model(grad: bool) -> None:
    def setting(model: nn.Module) -> None:
        with torch.set_grad_enabled(not grad):
            model[0](torch.ones(2))
        model[1](torch.ones(2))

    with torch.set_grad_enabled(not grad), model_and_lane(setting, grad=grad) as lane:
        modes = []
        lane.resume()
        while lane.request is not None:
            modes.append(lane.request.grad)
            assert torch.is_grad_enabled() == (not grad)
            lane.resume()
    assert modes == [not grad, grad]
