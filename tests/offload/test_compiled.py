"""A library is whole or not there, whatever happens to the process that compiles it. The extension here is a tiny one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils import cpp_extension

from harmony_ds import CompilerMissingError
from harmony_ds.offload import compiled, native

ROOT = Path(__file__).parents[2]
SOURCE = """
#include <Python.h>
#define JOINED(a, b) a##b
#define INIT(name) JOINED(PyInit_, name)
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tiny", "", -1, methods};
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)(void) { return PyModule_Create(&definition); }
"""
SLOW_COMPILER = """#!/bin/sh
touch {folder}/started
while [ ! -e {folder}/go ]; do sleep 0.05; done
exec c++ "$@"
"""
LOAD = """
import logging, sys
logging.basicConfig(format="%(message)s")
from harmony_ds.offload import compiled
print("answer", compiled.load("tiny", [sys.argv[1]], extra_cflags=["-DANSWER=42"]).answer(), flush=True)
"""


class Place:
    """A folder of extensions, a source, and a compiler that waits for `go`."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "tiny.cpp"
        self.source.write_text(SOURCE)
        self.folder = folder
        self.extensions = folder / "extensions"
        self.compiler = folder / "slow"
        self.compiler.write_text(SLOW_COMPILER.format(folder=folder))
        self.compiler.chmod(0o755)
        self._started: list[subprocess.Popen[str]] = []

    def begin(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", LOAD, str(self.source)],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TORCH_EXTENSIONS_DIR": str(self.extensions),
                "CXX": str(self.compiler),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def go(self) -> None:
        (self.folder / "go").touch()

    def wait_until_compiling(self) -> None:
        end = time.monotonic() + 200
        while not (self.folder / "started").exists():
            assert time.monotonic() < end, [process.poll() for process in self._started]
            time.sleep(0.02)

    def names(self) -> list[str]:
        """What the folder of extensions holds, by suffix."""
        return sorted(child.suffix for child in (self.extensions / "harmony_ds").iterdir())

    def end(self) -> None:
        self.go()  # a compiler that nobody waits for ends too
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    one = Place(tmp_path)
    yield one
    one.end()


def finished(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, error = process.communicate(timeout=200)
    assert process.returncode == 0, error
    return out, error


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Loads the tiny extension in this process, and returns what it answers."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    source = tmp_path / "tiny.cpp"
    source.write_text(SOURCE)

    def load() -> int:
        return compiled.load("tiny", [str(source)], extra_cflags=["-DANSWER=42"]).answer()

    return load


def no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing is compiled, no lock taken, and no ninja is there."""
    monkeypatch.setattr(compiled, "_load_of_torch", None)
    monkeypatch.setattr(compiled, "_alone", None)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(cpp_extension, "verify_ninja_availability", None)


def test_what_was_compiled_once_is_only_imported(
    tiny: Callable[..., int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert tiny() == 42
    (record,) = caplog.records
    assert record.getMessage().startswith("compiling tiny_")
    assert '"torch_adam": true' in caplog.text
    no_more(monkeypatch)

    assert tiny() == 42


def test_of_two_processes_one_compiles_and_the_other_says_that_it_waits(place: Place) -> None:
    first = place.begin()
    place.wait_until_compiling()
    second = place.begin()
    assert second.stderr is not None
    while "waiting for another process that compiles" not in (line := second.stderr.readline()):
        assert line, "it ended"
    assert ".so" not in place.names()
    place.go()

    assert finished(first)[0] == "answer 42\n"
    out, error = finished(second)
    assert out == "answer 42\n"
    assert "compiling tiny" not in error
    assert place.names() == [".lock", ".so"]


def test_a_killed_build_leaves_nothing_that_the_next_one_waits_for(place: Place) -> None:
    first = place.begin()
    place.wait_until_compiling()
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert ".so" not in place.names()
    place.go()
    out, error = finished(place.begin())

    assert out == "answer 42\n"
    assert "waiting" not in error
    assert place.names() == [".lock", ".so"]


def test_a_folder_that_cannot_be_written_is_told_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})  # DeepSpeed keeps what another test has loaded
    with pytest.raises(
        CompilerMissingError, match=r"its folder cannot be written \(.*file/harmony_ds.*TORCH_EXTENSIONS_DIR"
    ):
        native.make_native("DeepSpeedCPUAdam", [torch.nn.Parameter(torch.ones(3))], {})
