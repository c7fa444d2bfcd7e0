"""DeepSpeed's compiled CPU optimizers, with Python's lock released while they run.

What enters is the name of an optimizer, what leaves is an instance of DeepSpeed's own class whose compiled update does
not hold the global interpreter lock, and depends on its arguments alone (csrc/gil_free.cpp). Both are compiled once per
machine, on first use (compiled.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

from harmony_ds.config.hints import check_params
from harmony_ds.config.optimizers import OPTIMIZERS, OptimizerRow, of_class
from harmony_ds.errors import CompilerMissingError
from harmony_ds.offload import compiled

_SOURCE = Path(__file__).parent / "csrc" / "gil_free.cpp"


def native_of(optimizer: torch.optim.Optimizer) -> OptimizerRow | None:
    """The row of `optimizer` if it is one of DeepSpeed's compiled CPU optimizers."""
    row = of_class(type(optimizer).__mro__)
    names = {base.__name__ for base in type(optimizer).__mro__}
    return row if row is not None and row.native is not None and row.native.cls in names else None


def is_native(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` is one of DeepSpeed's compiled CPU optimizers."""
    return native_of(optimizer) is not None


def make_native(name: str, parameter_groups: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
    """An instance of DeepSpeed's class `name`, compiled if need be (one to three minutes, once per machine).

    Raises:
        CompilerMissingError: it cannot be compiled here; says what to install, and what needs no compiler.
    """
    native = next(row.native for row in OPTIMIZERS if row.native is not None and row.native.cls == name)
    cls = getattr(import_module(native.module), name)
    check_params("optimizer.params", cls, options)
    with compiled.instead_of_torch():
        optimizer: torch.optim.Optimizer = _or_explain(name, lambda: cls(parameter_groups, **options))
    return optimizer


def gil_free_op(optimizer: torch.optim.Optimizer) -> tuple[str, object]:
    """The attribute of `optimizer` that holds its compiled op, and a stand-in whose update releases the lock.

    Raises:
        CompilerMissingError: the stand-in cannot be compiled here.
    """
    row = native_of(optimizer)
    assert row is not None and row.native is not None
    native = row.native
    op = getattr(optimizer, native.op)
    flags = {"extra_cflags": [f"-D{native.macro}", "-O1"], "extra_ldflags": [op.__file__]}
    name = f"harmony_gil_free_{native.update}"
    extension = _or_explain(native.cls, lambda: compiled.load(name, [str(_SOURCE)], **flags))
    return native.op, GilFreeOp(op, native.update, getattr(extension, native.update))


class GilFreeOp:
    """A compiled op of DeepSpeed's with its update replaced; everything else is the op's own."""

    def __init__(self, op: object, update_name: str, update: Callable[..., int]) -> None:
        self._op = op
        self.__dict__[update_name] = update

    def __getattr__(self, name: str) -> object:
        return getattr(self._op, name)


def _check_compiler(name: str) -> None:
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        raise CompilerMissingError(_remedy(name, f'the C++ compiler "{compiler}" was not found'))
    if not cpp_extension.is_ninja_available():
        raise CompilerMissingError(_remedy(name, "ninja was not found (pip install ninja)"))


def _or_explain(name: str, make: Callable[[], Any]) -> Any:
    _check_compiler(name)
    try:
        return make()
    except (RuntimeError, OSError, ImportError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno is not None:  # none: the library cannot be loaded
            what = f"its folder cannot be written ({cause})"
            raise CompilerMissingError(_remedy(name, what, _ANOTHER_FOLDER)) from None
        said = f"{cause}\n{error}".splitlines()
        first = next((line for line in said if "error:" in line), said[0])
        raise CompilerMissingError(_remedy(name, f"compiling it failed ({first.strip()})")) from None


_COMPILER = "Install a C++ compiler (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++) and try again"
_ANOTHER_FOLDER = "Let the environment variable TORCH_EXTENSIONS_DIR name one that can"


def _remedy(name: str, what: str, cure: str = _COMPILER) -> str:
    return (
        f'{name} is compiled on first use, and {what}. {cure}, or set "torch_adam": true in the ds_config\'s optimizer '
        "params to use torch's fused AdamW, which needs no compiler."
    )
