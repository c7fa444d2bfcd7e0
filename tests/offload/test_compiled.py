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
WITH_PYBIND = """
#include <pybind11/pybind11.h>
int answer() { return ANSWER; }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("answer", &answer); }
"""
SLOW_COMPILER = """#!/bin/sh
touch {folder}/started
while [ ! -e {folder}/go ]; do sleep 0.05; done
exec c++ "$@"
"""
LOAD = """
import logging, signal, sys
logging.basicConfig(format="%(message)s")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
from harmony_ds.offload import compiled
def load():
    print("answer", compiled.load("tiny", [sys.argv[1]], extra_cflags=["-DANSWER=42"]).answer(), flush=True)
"""
THEN_AGAIN = """
try:
    load()
except BaseException as error:
    print(type(error).__name__, error, flush=True)
    sys.stdin.readline()
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

    def begin(self, program: str = "load()", before: str = "") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", before + LOAD + program, str(self.source)],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TORCH_EXTENSIONS_DIR": str(self.extensions),
                "CXX": str(self.compiler),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def go(self) -> None:
        (self.folder / "go").touch()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 200
        while not condition():
            assert time.monotonic() < end, [process.poll() for process in self._started]
            time.sleep(0.02)

    def wait_until_compiling(self) -> None:
        self.wait_until((self.folder / "started").exists)

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


def finished(process: subprocess.Popen[str], text: str = "") -> tuple[str, str]:
    out, error = process.communicate(text, timeout=200)
    assert process.returncode == 0, error
    return out, error


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Loads the tiny extension in this process, and returns what it answers."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    source = tmp_path / "tiny.cpp"
    source.write_text(SOURCE)

    def load(answer: int = 42) -> int:
        return compiled.load("tiny", [str(source)], extra_cflags=[f"-DANSWER={answer}"]).answer()

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


def test_other_options_are_another_library(tiny: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "tiny.cpp").write_text(WITH_PYBIND)  # which keeps modules by their names
    assert (tiny(1), tiny(2), tiny(1)) == (1, 2, 1)
    assert len(list((tmp_path / "extensions/harmony_ds").glob("*.so"))) == 2


@pytest.mark.parametrize("kept", [0, 20, 9000, -1])
def test_half_a_library_is_compiled_again(
    tiny: Callable[..., int], kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "extensions/harmony_ds"
    assert tiny(kept) == kept
    (library,) = folder.glob("*.so")
    whole = library.read_bytes()
    library.unlink()
    library.write_bytes(whole[:kept])

    assert tiny(kept) == kept
    assert compiled._is_whole(library)
    no_more(monkeypatch)
    assert tiny(kept) == kept


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


def test_an_interrupted_build_ends_at_once_and_can_be_tried_again(place: Place) -> None:
    process = place.begin(THEN_AGAIN + "load()")
    place.wait_until_compiling()
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("KeyboardInterrupt")
    assert place.names() == [".lock"]
    place.go()

    assert finished(process, "\n")[0] == "answer 42\n"
    assert place.names() == [".lock", ".so"]


def test_a_full_disk_is_told_and_leaves_nothing(place: Place) -> None:
    full = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    full += (
        "old = resource.getrlimit(resource.RLIMIT_FSIZE); resource.setrlimit(resource.RLIMIT_FSIZE, (2000, old[1]))\n"
    )
    freed = "resource.setrlimit(resource.RLIMIT_FSIZE, old)\nload()"
    process = place.begin(THEN_AGAIN + freed, before=full)
    place.go()
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("RuntimeError Error building extension 'tiny")
    assert place.names() == [".lock"]

    assert finished(process, "\n")[0].splitlines()[-1] == "answer 42"
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


def test_torchs_own_load_is_there_again_afterwards() -> None:
    with compiled.instead_of_torch():
        assert cpp_extension.load is compiled.load
    assert cpp_extension.load is compiled._load_of_torch
