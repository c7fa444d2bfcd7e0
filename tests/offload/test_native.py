"""DeepSpeed's compiled optimizers: without a compiler, the error says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed.ops.op_builder.builder import OpBuilder

from harmony_ds import OptimizerError
from harmony_ds.config import Section
from harmony_ds.offload import native
from harmony_ds.offload.native import make_native
from harmony_ds.offload.optimizers import Masters, build_optimizer
from tests.offload.examples import odd_sizes


def test_a_missing_compiler_is_an_error_that_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(OptimizerError) as caught:
        make_native("DeepSpeedCPUAdam", [torch.nn.Parameter(torch.ones(3))], {})
    message = str(caught.value)

    assert message.startswith("DeepSpeedCPUAdam is compiled on first use, and that failed (")
    for said in ("/nowhere/g++", "apt-get install g++", "dnf install gcc-c++", '"torch_adam": true'):
        assert said in message


def failing(*_: object, **__: object) -> object:
    raise RuntimeError("building\nadam.cpp:3: error: no such header\nmore")


def test_waiting_for_a_compilation_is_logged_and_the_compiler_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(native, "import_module", lambda _: type("ops", (), {"DeepSpeedCPUAdam": failing}))
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "lock").touch()
    with pytest.raises(OptimizerError, match=r"that failed \(adam.cpp:3: error: no such header\)"):
        make_native("DeepSpeedCPUAdam", [torch.nn.Parameter(torch.ones(3))], {})
    assert f"delete {tmp_path / 'cpu_adam' / 'lock'}" in caplog.text


def test_names_in_an_optimizer_go_with_the_parameters_that_are_trained() -> None:
    named = dict(odd_sizes().named_parameters())
    trained = [*named.items()][1:]
    optimizer = torch.optim.SGD(named.items())
    Masters(named, dict(trained)).adopt(optimizer)
    assert dict(zip(*(optimizer.param_groups[0][key] for key in ("param_names", "params")), strict=True)) == dict(
        trained
    )


def test_the_ds_configs_torch_adam_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "import_module", lambda _: type("ops", (), {"DeepSpeedCPUAdam": failing}))
    model = odd_sizes()
    named = dict(model.named_parameters())
    params = {"lr": 0.1, "betas": [0.9, 0.95]}
    masters = Masters(named, named)

    optimizer = build_optimizer(Section("AdamW", {**params, "torch_adam": True}), None, model.parameters(), masters)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    with pytest.raises(OptimizerError):
        build_optimizer(Section("AdamW", params), None, model.parameters(), masters)
