"""DeepSpeed's compiled optimizers: one process compiles at a time; without a compiler, the error says what to do."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from contextlib import nullcontext
from pathlib import Path

import ninja
import pytest
import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils import cpp_extension
from torch.utils._cpp_extension_versioner import ExtensionVersioner

from harmony_ds import OptimizerError
from harmony_ds.config import Section
from harmony_ds.offload import native
from harmony_ds.offload.native import compiling, make_native
from harmony_ds.optim.optimizers import Masters, build_optimizer
from tests.offload.examples import odd_sizes


def test_a_missing_compiler_is_an_error_that_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    # Else this process's next load of the same op, from another folder, would be another version, to be compiled.
    monkeypatch.setattr(cpp_extension, "JIT_EXTENSION_VERSIONER", ExtensionVersioner())
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


def test_the_compiler_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "import_module", lambda _: type("ops", (), {"DeepSpeedCPUAdam": failing}))
    with pytest.raises(OptimizerError, match=r"that failed \(adam.cpp:3: error: no such header\)"):
        make_native("DeepSpeedCPUAdam", [torch.nn.Parameter(torch.ones(3))], {})


@pytest.mark.parametrize("held", [False, True], ids=["by a killed process", "by a living one"])
def test_torchs_lock_is_removed_where_nobody_holds_it(
    held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "op" / "lock"
    lock.parent.mkdir()
    lock.touch()
    with lock.open() if held else nullcontext(), compiling("op"):
        assert lock.exists() == held
    assert (f"removing {lock}" in caplog.text) != held


def test_one_process_compiles_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with compiling("op"), (tmp_path / "op" / "harmony_ds.lock").open() as another, pytest.raises(BlockingIOError):
        fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / "op" / "harmony_ds.lock").open() as another:
        fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_it_is_logged_before_another_process_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    waits = []

    def flock_while_another_holds_it(file: object, operation: int) -> None:
        if operation & fcntl.LOCK_NB:
            raise BlockingIOError
        waits.append(caplog.messages[-1])

    with compiling("op"):
        pass
    monkeypatch.setattr(fcntl, "flock", flock_while_another_holds_it)
    with compiling("op"):
        assert waits == [f"waiting for process {os.getpid()} of {socket.gethostname()}, which loads or compiles op"]


@pytest.mark.parametrize("built_for", [None, "/another/torch", str(Path(torch.__file__).parent)])
def test_it_is_logged_before_something_is_compiled(
    built_for: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "op"
    if built_for is not None:
        folder.mkdir()
        (folder / "op.so").touch()
        (folder / "build.ninja").write_text(f"cflags = -isystem {built_for}/include")
    with compiling("op"):
        said = f"compiling op into {folder}: about a minute, once for this folder and version of torch"
        is_for_this_torch = built_for == str(Path(torch.__file__).parent)
        assert caplog.messages == ([] if is_for_this_torch else [said])


def test_the_ninja_beside_python_compiles_where_the_environment_is_not_activated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    with compiling("op"):
        assert shutil.which("ninja") == f"{ninja.BIN_DIR}/ninja"
    assert os.environ["PATH"] == "/nowhere"


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
