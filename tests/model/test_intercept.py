"""Layer calls go to the thread's active handler; copies of an intercepted layer are independent layers."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.decomposer import find_layers
from harmony_ds.device import CpuDevice
from harmony_ds.model.intercept import InterceptedForward, Interception, Request, handled_by
from tests.families import WIDTH, Block, build_seeded

DEVICE = CpuDevice()


class DoublingHandler:
    """Runs each layer and doubles its output."""

    device = DEVICE

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def call(self, request: Request) -> Any:
        self.requests.append(request)
        return 2 * request.forward(*request.args, **request.kwargs)


def intercepted() -> tuple[nn.Module, Interception]:
    model = build_seeded(lambda: nn.Sequential(Block(0.0), Block(0.0)))
    return model, Interception(find_layers(model, ("0", "1")).layers, model, DEVICE)


def inputs() -> Tensor:
    return torch.ones(1, 2, WIDTH)


def plain(block: nn.Module) -> Tensor:
    result: Tensor = type(block).forward(block, inputs())
    return result


def test_a_handler_decides_what_a_layer_call_gives() -> None:
    model, _ = intercepted()
    handler = DoublingHandler()
    with handled_by(handler):
        outputs = model[1](inputs())
        model[0](hidden=inputs())
    request, named = handler.requests

    assert torch.equal(outputs, 2 * plain(model[1]))
    assert (request.layer, request.kwargs, request.grad) == (1, {}, True)
    assert (named.layer, named.args, named.kwargs.keys()) == (0, (), {"hidden"})
    assert type(model[0]) is Block
    assert list(inspect.signature(model[0].forward).parameters) == ["hidden"]
    assert request.autocast is not None and not request.autocast.enabled


def test_handlers_nest_and_none_disables_them() -> None:
    model, _ = intercepted()
    outer, inner = DoublingHandler(), DoublingHandler()
    with handled_by(outer):
        with handled_by(inner):
            model[0](inputs())
        with pytest.raises(RuntimeError, match="no luck"), handled_by(inner):
            raise RuntimeError("no luck")
        with handled_by(None):
            assert torch.equal(model[0](inputs()), plain(model[0]))
        model[0](inputs())
    assert torch.equal(model[0](inputs()), plain(model[0]))

    assert (len(outer.requests), len(inner.requests)) == (1, 1)


def test_another_thread_has_a_handler_of_its_own() -> None:
    model, _ = intercepted()
    handler = DoublingHandler()
    with handled_by(handler):
        thread = threading.Thread(target=model[0], args=(inputs(),))
        thread.start()
        thread.join(30)

    assert not handler.requests


def test_hooks_of_a_layer_run_around_the_handler() -> None:
    model, _ = intercepted()
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    with handled_by(DoublingHandler()):
        outputs = model[0](inputs())

    assert seen[0] is outputs


class Other:
    def forward(self, x: Tensor) -> Tensor:
        return x + 40


@pytest.mark.parametrize("own", [None, lambda x: x + 40, Other().forward], ids=["none", "function", "method"])
def test_removing_gives_a_layer_its_own_forward_back(own: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    if own is not None:
        model[0].forward = own
    before, x = dict(vars(model[0])), torch.zeros(2)
    expected = model(x)
    interception = Interception(find_layers(model).layers, model, DEVICE)
    assert isinstance(model[0].forward, InterceptedForward)
    assert torch.equal(model(x), expected)
    interception.remove()

    assert vars(model[0]) == before
    assert torch.equal(model(x), expected)
