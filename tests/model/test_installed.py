"""An installed model has phantom parameters, afterwards its own again; copies are plain."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from harmony_ds import ModelError
from harmony_ds.decomposer import Decomposition, find_layers
from harmony_ds.device import CpuDevice
from harmony_ds.model import buffers
from harmony_ds.model.installed import FixedParameters, Installation, PhantomParameter
from harmony_ds.offload.device_copies import Leaves
from harmony_ds.offload.ledger import Ledger, TrafficKind


class Net(nn.Module):
    """Tied weights, a bare parameter, and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.register_buffer("steps", torch.tensor(0), persistent=False)
        self.register_buffer("nothing", None)


class InstalledModel:
    """A model with its installation, and a count of waits."""

    def __init__(self) -> None:
        self.model = Net()
        self.decomposition: Decomposition = find_layers(self.model)
        self.ledger = Ledger()
        self.device = CpuDevice()
        self.installation = Installation(self.model, self.decomposition.canonical, self.device, self.ledger)


def watched(module: nn.Module) -> bool:
    return any(isinstance(m.__dict__["_parameters"], FixedParameters) for m in module.modules())


# ---- the host's own, and always the same ones


def assign(model: Net) -> None:
    model.first.weight = nn.Parameter(torch.ones(3, 3))


def delete(model: Net) -> None:
    del model.first.weight


def register(model: Net) -> None:
    model.first.register_parameter("more", nn.Parameter(torch.ones(3)))


def parametrize(model: Net) -> None:
    nn.utils.parametrizations.weight_norm(model.first)


@pytest.mark.parametrize(
    ("change", "installed"),
    [(assign, False), (delete, False), (register, False), (parametrize, False), (assign, True), (delete, True)],
)
def test_a_modules_parameters_cannot_be_replaced(change: Any, installed: bool) -> None:
    one = InstalledModel()
    before = one.model.first.weight
    with (
        one.installation.installed({}) if installed else nullcontext(),
        pytest.raises(ModelError, match="an engine trains this model"),
    ):
        change(one.model)
    assert one.model.first.weight is before


# ---- installed: phantoms


def test_phantoms_have_shape_dtype_and_device() -> None:
    one = InstalledModel()
    with one.installation.installed({}):
        weight, scale = one.model.first.weight, one.model.scale
        assert isinstance(weight, PhantomParameter)
        assert (weight.shape, weight.dtype, weight.device) == ((3, 3), torch.float32, torch.device("cpu"))
        assert (weight.requires_grad, scale.requires_grad) == (True, False)
        assert weight.size(0) == weight.ndim + 1 == 3
        assert next(one.model.parameters()).dtype == torch.float32
    assert not one.installation.touched


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model.first.weight + 1,
        lambda model: model.last(torch.ones(1, 3)),
        lambda model: torch.stack([torch.ones(3, 3), model.first.weight]),
        lambda model: model.first.weight.sum(),
        lambda model: model.first.weight.clone(),
    ],
)
def test_using_a_phantom_is_an_error_that_names_it(use: Any) -> None:
    one = InstalledModel()
    with one.installation.installed({}), pytest.raises(ModelError, match=r"parameter first.weight was used"):
        use(one.model)

    assert one.installation.touched == {"first.weight"}
    with pytest.raises(ModelError, match=r"Name a module .* in harmony.layers"), one.installation.installed({}):
        use(one.model)


def test_a_layer_call_sees_the_copies_it_is_given_and_only_it() -> None:
    one = InstalledModel()
    copies = Leaves({"first.weight": nn.Parameter(torch.zeros(3, 3)), "first.bias": nn.Parameter(torch.ones(3))})
    first = one.installation.parameters_of(one.model.first)
    with one.installation.installed({}):
        for _ in range(2):
            with first.installed(copies):
                assert one.model.first(torch.ones(1, 3)).tolist() == [[1.0, 1.0, 1.0]]
                assert isinstance(one.model.last.weight, PhantomParameter)
            assert isinstance(one.model.first.weight, PhantomParameter)


def test_parameters_without_a_copy_are_the_current_ones_at_each_call() -> None:
    one = InstalledModel()
    first = one.installation.parameters_of(one.model.first)
    copies = Leaves({"first.weight": nn.Parameter(torch.zeros(3, 3))})
    for bias in (1.0, 2.0):
        with one.installation.installed({"first.bias": torch.full((3,), bias)}), first.installed(copies):
            assert one.model.first(torch.ones(1, 3)).tolist() == [[bias, bias, bias]]


def test_installing_an_installed_model_changes_nothing() -> None:
    one = InstalledModel()
    with one.installation.installed({}):
        with one.installation.installed({"scale": torch.tensor(7.0)}):
            assert isinstance(one.model.scale, PhantomParameter)
        assert isinstance(one.model.scale, PhantomParameter)
    with one.installation.installed({"scale": nn.Parameter(torch.tensor(5.0))}):
        assert (one.model.scale * 2).item() == 10.0
    assert one.model.scale.item() == 2.0


# ---- buffers


def test_a_replaced_buffer_is_copied_back() -> None:
    one = InstalledModel()
    with one.installation.installed({}):
        one.model.steps = torch.tensor(8)
    assert one.model.steps.item() == 8

    with one.installation.installed({}):
        one.model.steps = torch.arange(3)
        one.model.nothing = torch.ones(2)
    assert one.model.steps.tolist() == [0, 1, 2]
    assert one.model.nothing.tolist() == [1.0, 1.0]

    allocated = []
    for turn in range(4):  # again and again, which does not fill the device
        with one.installation.installed({}):
            one.model.steps = torch.arange(8 + turn % 2)
        allocated.append(one.device.allocated_bytes())
    assert max(allocated) <= allocated[0] + 9 * 8


@pytest.mark.parametrize("ends", ["kept", "not kept", "failed"])
def test_buffer_changes_are_kept_only_on_request_and_never_after_a_failure(ends: str) -> None:
    one = InstalledModel()
    weight, host = one.model.first.weight, dict(one.model.named_buffers())
    with (
        pytest.raises(RuntimeError, match="no luck") if ends == "failed" else nullcontext(),
        one.installation.installed({}, keep_buffers=ends != "not kept"),
    ):
        one.model.steps += 3
        one.model.norm.running_mean.fill_(4.0)
        assert host["steps"].item() == 0
        if ends == "failed":
            raise RuntimeError("no luck")
    assert {name: id(buffer) for name, buffer in one.model.named_buffers()} == {n: id(b) for n, b in host.items()}
    assert one.model.steps.item() == (3 if ends == "kept" else 0)
    assert one.model.norm.running_mean.tolist() == [4.0 if ends == "kept" else 0.0] * 3
    assert one.model.first.weight is weight and watched(one.model)
    with one.installation.installed({}):
        assert one.model.steps.item() == (3 if ends == "kept" else 0)


@pytest.mark.parametrize("compared_bytes", [buffers._COMPARED_BYTES, 0])
def test_buffers_are_copied_once_until_the_user_changes_them(
    compared_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "_COMPARED_BYTES", compared_bytes)  # 0: all are too large to be compared by value
    one = InstalledModel()
    one.model.eval()
    booked = []
    for turn in range(3):
        if turn == 2:
            one.model.steps.fill_(5)
        with one.installation.installed({}):
            assert one.model.steps.item() == (5 if turn == 2 else 0)
        booked.append(one.ledger.drain().host_to_device[TrafficKind.DATA])

    assert booked == [12 + 12 + 8 + 8, 0, 8]
    assert one.device.allocated_bytes() == one.installation.buffers.nbytes == 40
