"""DeepSpeed's compiled CPU optimizers, with Python's lock released while they run.

What enters is the name of an optimizer, what leaves is an instance of DeepSpeed's own class whose compiled update does
not hold the global interpreter lock, and depends on its arguments alone (csrc/gil_free.cpp). Both are compiled once per
machine, on first use, into torch's extension cache.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

from harmony_ds.errors import CompilerMissingError

_logger = logging.getLogger(__name__)
_SOURCE = Path(__file__).parent / "csrc" / "gil_free.cpp"
_STALE_SECONDS = 1800.0  # a build takes minutes, on a busy machine too

_OPS = {
    # DeepSpeed's class: (its module, the attribute that holds its compiled op, the update function in it, our macro)
    "DeepSpeedCPUAdam": ("deepspeed.ops.adam", "ds_opt_adam", "adam_update", "HARMONY_ADAM"),
    "DeepSpeedCPUAdagrad": ("deepspeed.ops.adagrad", "ds_opt_adagrad", "adagrad_update", "HARMONY_ADAGRAD"),
    "DeepSpeedCPULion": ("deepspeed.ops.lion", "ds_opt_lion", "lion_update", "HARMONY_LION"),
}


def is_native(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` is one of DeepSpeed's compiled CPU optimizers."""
    return any(base.__name__ in _OPS for base in type(optimizer).__mro__)


def make_native(name: str, parameter_groups: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
    """An instance of DeepSpeed's class `name`, compiled if need be (one to three minutes, once per machine).

    Raises:
        CompilerMissingError: it cannot be compiled here; says what to install, and what needs no compiler.
    """
    _check_compiler(name)
    _remove_stale_lock("cpu_" + _OPS[name][1].rpartition("_")[2])
    cls = getattr(import_module(_OPS[name][0]), name)
    optimizer: torch.optim.Optimizer = _or_explain(name, lambda: cls(parameter_groups, **options))
    return optimizer


def gil_free_op(optimizer: torch.optim.Optimizer) -> tuple[str, object]:
    """The attribute of `optimizer` that holds its compiled op, and a stand-in whose update releases the lock.

    Raises:
        CompilerMissingError: the stand-in cannot be compiled here.
    """
    name = next(base.__name__ for base in type(optimizer).__mro__ if base.__name__ in _OPS)
    _, attribute, update, macro = _OPS[name]
    op = getattr(optimizer, attribute)
    _check_compiler(name)
    # A name of its own per installation: two of them would rebuild each other's for ever.
    origin = hashlib.sha256(f"{_SOURCE} {op.__file__} {torch.__version__}".encode()).hexdigest()[:10]
    extension = f"harmony_gil_free_{update}_{origin}"
    _remove_stale_lock(extension)
    compiled = _or_explain(
        name,
        lambda: cpp_extension.load(
            name=extension,
            sources=[str(_SOURCE)],
            extra_cflags=[f"-D{macro}", "-O1"],
            extra_ldflags=[op.__file__],
        ),
    )
    return attribute, GilFreeOp(op, update, getattr(compiled, update))


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


def _remove_stale_lock(extension: str) -> None:
    """A build that was killed leaves its lock behind, and torch would wait for it for ever."""
    lock = Path(cpp_extension._get_build_directory(extension, verbose=False)) / "lock"
    if lock.exists() and time.time() - lock.stat().st_mtime > _STALE_SECONDS:
        _logger.warning("removing %s, left behind by a build that did not finish", lock)
        lock.unlink(missing_ok=True)


def _or_explain(name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (RuntimeError, OSError, ImportError) as error:
        cause = error.__cause__ or error
        first = next((line for line in str(cause).splitlines() if "error:" in line), str(cause).partition("\n")[0])
        raise CompilerMissingError(_remedy(name, f"compiling it failed ({first.strip()})")) from None


def _remedy(name: str, what: str) -> str:
    return (
        f"{name} is compiled on first use, and {what}. Install a C++ compiler (Debian, Ubuntu: apt-get install g++; "
        'Fedora: dnf install gcc-c++) and try again, or set "torch_adam": true in the ds_config\'s optimizer params '
        "to use torch's fused AdamW, which needs no compiler."
    )
