"""DeepSpeed's compiled CPU optimizers, run without Python's global interpreter lock (GIL).

`make_native` returns an instance of DeepSpeed's own class, which DeepSpeed compiles on first use. Its update holds the GIL,
which would starve the thread that feeds the device; `GilFreeOp` calls the same compiled function through ctypes instead.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import ninja
import torch
from psutil import process_iter
from torch.utils import cpp_extension

from harmony_ds.config.hints import check_params
from harmony_ds.config.optimizers import OPTIMIZERS, Native, OptimizerRow, of_class
from harmony_ds.config.status_log import say
from harmony_ds.errors import OptimizerError

_logger = logging.getLogger(__name__)
_TYPES = {"i": ctypes.c_int, "m": ctypes.c_size_t, "f": ctypes.c_float, "b": ctypes.c_bool}


def native_of(optimizer: torch.optim.Optimizer) -> OptimizerRow | None:
    """Return the table row of `optimizer` if it is one of DeepSpeed's compiled CPU optimizers, else None."""
    row = of_class(type(optimizer).__mro__)
    names = {base.__name__ for base in type(optimizer).__mro__}
    return row if row is not None and row.native is not None and row.native.cls in names else None


def make_native(name: str, parameter_groups: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
    """Make DeepSpeed's optimizer `name`, compiled if need be (about a minute), or raise OptimizerError."""
    native = next(row.native for row in OPTIMIZERS if row.native is not None and row.native.cls == name)
    cls = getattr(import_module(f"deepspeed.ops.{native.kind}"), name)
    check_params("optimizer.params", cls, options)
    try:
        with compiling(f"cpu_{native.kind}"):
            optimizer: torch.optim.Optimizer = cls(parameter_groups, **options)
    except (RuntimeError, OSError, ImportError) as error:
        raise OptimizerError(_remedy(name, f"{error.__cause__ or error}".splitlines())) from None
    return optimizer


@contextmanager
def compiling(extension: str) -> Iterator[None]:
    """Hold a lock while `extension` is loaded, and compiled if need be, by the ninja that is installed beside this Python.

    It is logged before this process compiles, or waits for another one that does. torch's own lock is a file. Where its
    process was killed, the file is removed here: torch would wait for it for ever.
    """
    folder = Path(cpp_extension._get_build_directory(extension, verbose=False)).resolve()
    lock = folder / "lock"
    with (folder / "harmony_ds.lock").open("a+") as ours:
        with suppress(OSError):  # there are file systems without flock: torch's lock stays
            _wait_for(ours, extension)
            files = (file for process in process_iter(["open_files"]) for file in process.info["open_files"] or ())
            if lock.exists() and str(lock) in (file.path for file in files):
                say(f"waiting for another process that compiles {extension} ({lock})")
            elif lock.exists():
                _logger.warning("removing %s, which a process that was killed has left", lock)
                lock.unlink()
        if not _is_compiled(extension, folder):
            say(f"compiling {extension} into {folder}: about a minute, once for this folder and version of torch")
        # Python's environment may not be activated; and what another ninja has compiled, ninja compiles again.
        path = os.environ.get("PATH", os.defpath)
        os.environ["PATH"] = os.pathsep.join(filter(None, (ninja.BIN_DIR, path)))
        try:
            yield
        finally:
            os.environ["PATH"] = path


def _wait_for(ours: TextIO, extension: str) -> None:
    """Lock `ours`, for all servers that share the file, until its process ends; write the process into it."""
    try:
        fcntl.flock(ours, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        ours.seek(0)
        say(f"waiting for {ours.read() or 'another process'}, which loads or compiles {extension}")
        fcntl.flock(ours, fcntl.LOCK_EX)
    ours.truncate(0)
    ours.write(f"process {os.getpid()} of {socket.gethostname()}")
    ours.flush()


def _is_compiled(extension: str, folder: Path) -> bool:
    """Return whether ninja will find `extension` compiled for this torch, or DeepSpeed was installed with it."""
    from deepspeed.git_version_info import installed_ops

    build = folder / "build.ninja"
    is_built = (folder / f"{extension}.so").exists() and build.exists()
    return bool(installed_ops.get(extension)) or (is_built and str(Path(torch.__file__).parent) in build.read_text())


def gil_free_op(optimizer: torch.optim.Optimizer) -> tuple[str, object]:
    """Return the name of the attribute that holds the compiled op of `optimizer`, and the op as a `GilFreeOp`.

    Where the library of this version of DeepSpeed does not have the function, return the op itself, and warn.
    """
    row = native_of(optimizer)
    assert row is not None and row.native is not None
    name = f"ds_opt_{row.native.kind}"
    op = getattr(optimizer, name)
    try:
        return name, GilFreeOp(op, row.native)
    except (AttributeError, OSError) as error:
        _logger.warning("updates of %s hold Python's lock, so that device work may wait: %s", row.native.cls, error)
        return name, op


class GilFreeOp:
    """DeepSpeed's compiled op of an optimizer, called through ctypes, so that its update releases the GIL.

    DeepSpeed's optimizer calls `adam_update`, `adagrad_update` or `lion_update` of its op: here, `update` has that name.

    Attributes:
        kind: "adam", "adagrad" or "lion".
        types: the C types of the compiled function's numbers, which come before its tensors.
        function: the compiled function itself.
    """

    def __init__(self, op: Any, native: Native) -> None:
        """Raise AttributeError or OSError if the library of `op` does not have the function that `native` names."""
        self._op, self.kind = op, native.kind
        self.types: list[Any] = [_TYPES[letter] for letter in native.numbers]
        self.function = ctypes.CDLL(op.__file__)[native.symbol]
        self.function.argtypes = [*self.types, *[ctypes.c_void_p] * native.tensors]
        self._empty = [torch.empty(0)] * native.tensors
        setattr(self, f"{native.kind}_update", self.update)

    def update(self, *arguments: Any) -> None:
        """Step one parameter; `arguments`: the function's numbers, then weight, gradient and states."""
        numbers, tensors = self.check_arguments(arguments)
        if self.kind == "adam":
            # DeepSpeed's Adam multiplies the powers of its betas from step to step, but computes them anew when the step
            # number jumps, which rounds differently: results would depend on the step at which the process began. An empty
            # call with another step number before each update makes every update compute them anew.
            empty = [ctypes.c_void_p(tensor._cdata) for tensor in self._empty]
            self.function(numbers[0], numbers[1] + 2, *numbers[2:], *map(ctypes.addressof, empty))
        # A C++ tensor is a pointer to its implementation, whose address the Python tensor knows.
        pointers = [ctypes.c_void_p(tensor._cdata) for tensor in tensors]
        self.function(*numbers, *map(ctypes.addressof, pointers))

    def check_arguments(self, arguments: Sequence[Any]) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        """Return the numbers and the tensors of an update, which the compiled function can use.

        The function reads a gradient of another dtype as the weight's, skips a tensor that is not contiguous, and ends the
        process by an exception that it throws.
        """
        numbers, tensors = arguments[: len(self.types)], arguments[len(self.types) :]
        weight, gradient, *states = tensors
        assert weight.dtype is gradient.dtype and all(tensor.is_contiguous() for tensor in tensors)
        assert {state.dtype for state in states} in ({torch.float32}, {weight.dtype})
        return numbers, tensors

    def make_objects(self, optimizer: Any, count: int) -> ctypes.Array[ctypes.c_int]:
        """Make `count` compiled objects like that of `optimizer`, and return their ids.

        A step writes into its object, so that threads that step parts of a parameter need one each.
        """
        first = -1 - 4096 * optimizer.opt_id  # DeepSpeed counts ids up from 0
        ids = (ctypes.c_int * count)(*range(first, first - count, -1))
        modes = [optimizer.adam_w_mode] if self.kind == "adam" else []
        for number in ids:
            getattr(self._op, f"create_{self.kind}")(number, *[0.0] * self.types.count(ctypes.c_float), *modes, False)
        return ids

    def __getattr__(self, name: str) -> object:
        return getattr(self._op, name)


def _remedy(name: str, said: list[str]) -> str:
    why = next((line for line in said if "error:" in line or "not found" in line), said[-1])
    return (
        f"{name} is compiled on first use, and that failed ({why.strip()}). Install a C++ compiler (Debian, Ubuntu: "
        "apt-get install g++; Fedora: dnf install gcc-c++) and try again, let the environment variable "
        'TORCH_EXTENSIONS_DIR name a folder that can be written, or set "torch_adam": true in the ds_config\'s optimizer '
        "params to use torch's fused AdamW, which needs no compiler."
    )
