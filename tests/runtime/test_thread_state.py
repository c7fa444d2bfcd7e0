"""What torch keeps for a thread, kept apart for the engine and for lanes that take turns on one thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from harmony_ds.device import CpuDevice
from harmony_ds.model.intercept import Autocast
from harmony_ds.runtime.thread_state import ThreadState
from tests.runtime.test_lane import model_and_lane


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def state() -> tuple[Any, ...]:
    """What code that runs now would see."""
    return ThreadState(CpuDevice(), {}).read()


Context = Callable[[], AbstractContextManager[Any]]
CONTEXTS: dict[str, Context] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without a cache": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "function mode": Functions,
    "dispatch mode": Dispatches,
    "saved tensors": lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
}
each = pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)


@each
def test_what_a_lane_opens_around_a_layer_is_the_lanes_alone(context: Context) -> None:
    seen = []

    def opening(model: nn.Module) -> None:
        before = state()
        with context():
            inside = state()
            model[0](torch.empty(1, 2))
            seen.append(state() == inside)
        seen.append(state() == before)
        seen.append(inside != before)

    def plain(model: nn.Module) -> None:
        before = state()
        model[0](torch.empty(1, 2))
        seen.append(state() == before)

    outside = state()
    with model_and_lane(opening) as first, model_and_lane(plain) as second:
        for lane in (first, second, first, second):
            lane.resume(torch.empty(1, 2))
            assert state() == outside
        assert first.finished and second.finished
    assert seen == [True] * 4


@pytest.mark.parametrize("outer", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("inner", CONTEXTS.values(), ids=CONTEXTS)
def test_several_contexts_are_put_back_in_their_order(outer: Context, inner: Context) -> None:
    seen = []

    def opening(model: nn.Module) -> None:
        with outer():
            in_outer = state()
            with inner():
                in_inner = state()
                for layer in (model[0], model[1]):
                    layer(torch.empty(1, 2))
                    seen.append(state() == in_inner)
            seen.append(state() == in_outer)

    outside = state()
    with model_and_lane(opening) as lane:
        for _ in range(3):
            lane.resume(torch.empty(1, 2))
            assert state() == outside
    assert seen == [True, True, True]


@each
def test_what_the_engine_opens_between_two_turns_stays_its_own(context: Context) -> None:
    """A lane that was begun under one task's autocast ends under another task's."""
    seen = []

    def watching(model: nn.Module) -> None:
        model[0](torch.empty(1, 2))
        seen.append(torch.is_autocast_enabled("cpu"))

    outside = state()
    with model_and_lane(watching, autocast=Autocast.current("cpu")) as lane:
        for around in (lambda: torch.autocast("cpu", torch.bfloat16), context):
            with around():
                inside = state()
                lane.resume(torch.empty(1, 2))
                assert state() == inside
            assert state() == outside
    assert seen == [False]


@each
def test_a_lane_that_is_closed_or_fails_leaves_nothing(context: Context) -> None:
    def opening(model: nn.Module) -> None:
        context().__enter__()  # and never left
        model[0](torch.empty(1, 2))
        raise ValueError("in the model")

    outside, nesting = state(), torch.autocast_increment_nesting()
    with model_and_lane(opening) as closed:
        closed.resume()
        closed.close()
        assert state() == outside
    with model_and_lane(opening) as failing:
        failing.resume()
        with pytest.raises(ValueError, match="in the model"):
            failing.resume(torch.empty(1, 2))
        assert state() == outside
    while (
        torch.autocast_decrement_nesting() >= nesting
    ):  # torch counts open autocasts; plain ones keep casts while it does
        pass


@pytest.mark.parametrize(
    ("context", "seen"),
    [
        (Functions, torch._C._len_torch_function_stack),
        (Dispatches, torch._C._len_torch_dispatch_stack),
        (lambda: sdpa_kernel(SDPBackend.MATH), torch.backends.cuda.flash_sdp_enabled),
    ],
    ids=["function mode", "dispatch mode", "attention"],
)
def test_a_layer_runs_with_its_callers_modes_and_switches_again_and_again(
    context: Context, seen: Callable[[], Any]
) -> None:
    found: list[Any] = []

    def opening(model: nn.Module) -> None:
        with context():
            found.append(seen())
            model[0](torch.empty(1, 2))

    outside = state()
    with model_and_lane(opening) as lane:
        lane.resume()
        request = lane.request
        assert request is not None
        assert not request.finds_its_modes
        for _ in range(2):  # forward, and in the backward pass
            with request.callers_modes():
                assert seen() == found[0]
            assert seen() != found[0]
            assert state() == outside


class Streams(CpuDevice):
    """A device with streams that have names."""

    def __init__(self) -> None:
        super().__init__()
        self.now = "compute"
        self.order: list[str] = []

    def current(self) -> object:
        return self.now

    def make_current(self, place: object) -> None:
        self.now = str(place)
        self.order.append(self.now)


def test_the_engine_goes_on_on_its_own_stream_and_the_lane_on_the_lanes() -> None:
    device, seen = Streams(), []

    def beside(model: nn.Module) -> None:
        device.now = "the model's"
        model[0](torch.empty(1, 2))
        seen.append(device.now)
        device.now = "compute"

    with model_and_lane(beside, device=device) as lane:
        lane.resume()
        assert device.now == "compute"
        lane.resume(torch.empty(1, 2))
        assert lane.finished
    assert seen == ["the model's"]
    assert device.order == ["compute", "the model's"]
