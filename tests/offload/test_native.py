"""Without a compiler there is an error that says what to do."""

from __future__ import annotations

import pytest
import torch
from torch.utils import cpp_extension

from harmony_ds import CompilerMissingError, OptimizerError
from harmony_ds.config import Section
from harmony_ds.offload import native
from harmony_ds.offload.native import make_native
from harmony_ds.offload.optimizers import Masters, build_optimizer
from tests.offload.examples import odd_sizes


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3))]


def test_a_missing_compiler_is_an_error_that_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(CompilerMissingError) as caught:
        make_native("DeepSpeedCPUAdam", weights(), {})
    message = str(caught.value)

    assert message.startswith('DeepSpeedCPUAdam is compiled on first use, and the C++ compiler "/nowhere/g++" was not')
    for remedy in ("apt-get install g++", "dnf install gcc-c++", '"torch_adam": true'):
        assert remedy in message
    assert isinstance(caught.value, OptimizerError)


def failing(*_: object) -> object:
    raise RuntimeError("building\nadam.cpp:3: error: no such header\nmore")


@pytest.mark.parametrize(
    ("ninja", "message"),
    [
        (False, r"ninja was not found \(pip install ninja\)"),
        (True, r"compiling it failed \(adam.cpp:3: error: no such header\)"),
    ],
)
def test_what_else_a_compilation_lacks_is_told(ninja: bool, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: ninja)
    monkeypatch.setattr(native, "import_module", lambda _: type("ops", (), {"DeepSpeedCPUAdam": failing}))
    with pytest.raises(CompilerMissingError, match=message):
        make_native("DeepSpeedCPUAdam", weights(), {})


def test_the_ds_configs_torch_adam_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    model = odd_sizes()
    named = dict(model.named_parameters())
    params = {"lr": 0.1, "betas": [0.9, 0.95]}
    masters = Masters(named, named)

    optimizer = build_optimizer(Section("AdamW", {**params, "torch_adam": True}), None, model.parameters(), masters)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    with pytest.raises(CompilerMissingError):
        build_optimizer(Section("AdamW", params), None, model.parameters(), masters)
