"""Compiled extensions that are whole or not there: `torch.utils.cpp_extension.load`, and what may be killed in the middle.

torch compiles where it loads from, under a lock file that a killed process leaves behind, and lets every other ninja
compile again in place. Here a library is compiled in a folder of its own and renamed when it is complete. Its name says
what it was made from, and its last bytes are a hash of the others: to import half of it would be a bus error. The lock
only spares others the same work; it is the kernel's, and goes with its process.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from torch.utils import cpp_extension

_logger = logging.getLogger(__name__)
_load_of_torch = cpp_extension.load
_HASH_BYTES = 32
_PLACES = ("extra_include_paths", "verbose")
"""Options that do not change what is compiled: where the headers of one version lie, and what is said."""
_AVOID = "To do without: \"torch_adam\": true in the ds_config's optimizer params takes torch's fused AdamW."


@contextmanager
def instead_of_torch() -> Iterator[None]:
    """Meanwhile torch's `load` is this one: DeepSpeed's op builders take it from there, with the options they work out."""
    cpp_extension.load = load  # type: ignore[assignment]
    try:
        yield
    finally:
        cpp_extension.load = _load_of_torch


def load(name: str, sources: Sequence[str], **options: Any) -> ModuleType:
    """The extension `name`, imported; compiled first if it is not there, or not whole. Arguments are those of torch's.

    Raises:
        RuntimeError: it cannot be compiled; holds what the compiler said.
        OSError: the folder of extensions cannot be written.
        ImportError: what was compiled cannot be imported.
    """
    options["extra_cflags"] = [*(options.get("extra_cflags") or ()), "-g0"]  # debug symbols take a third of the time
    folder = Path(cpp_extension._get_build_directory("harmony_ds", verbose=False))
    name = f"{name}_{_fingerprint(name, sources, options)}"
    library = folder / f"{name}.so"
    if not _is_whole(library):
        with _alone(library):
            if not _is_whole(library):  # else another process was first
                _compile(name, sources, options, library)
    return _imported(name, library)


def _fingerprint(name: str, sources: Sequence[str], options: dict[str, Any]) -> str:
    compiler = shutil.which(cpp_extension.get_cxx_compiler())
    parts = [
        name,
        *(Path(source).read_text(encoding="utf-8") for source in sources),
        *(f"{key}={value}" for key, value in sorted(options.items()) if key not in _PLACES),
        f"{torch.__version__} {version('deepspeed')} {sys.implementation.cache_tag}{sys.abiflags}",
        str(compiler and Path(compiler).resolve()),
        _processor(),
    ]
    return _hash("\0".join(parts).encode()).hex()[:16]


def _processor() -> str:
    """What -march=native makes use of: a home directory may be on several machines."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text(encoding="utf-8").splitlines() if described.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _is_whole(library: Path) -> bool:
    content = memoryview(library.read_bytes() if library.exists() else b"")
    return len(content) > _HASH_BYTES and _hash(content[:-_HASH_BYTES]) == content[-_HASH_BYTES:]


def _hash(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).digest()


def _imported(name: str, library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _alone(library: Path) -> Iterator[None]:
    """Waits for other processes that compile `library`."""
    with library.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _logger.warning("waiting for another process that compiles %s. %s", library, _AVOID)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(name: str, sources: Sequence[str], options: dict[str, Any], library: Path) -> None:
    for left_behind in library.parent.glob(f"{library.stem}.*/"):
        shutil.rmtree(left_behind, ignore_errors=True)
    _logger.warning("compiling %s, once per machine (minutes), into %s. %s", name, library.parent, _AVOID)
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)  # which would skip a build that failed before
    with TemporaryDirectory(prefix=f"{library.stem}.", dir=library.parent, ignore_cleanup_errors=True) as folder:
        # Not imported there: pybind11 hands a module out again by its name, wherever it is imported from.
        _load_of_torch(name, list(sources), build_directory=folder, **options, is_python_module=False)
        built = Path(folder) / f"{name}.so"
        with built.open("rb+") as file:
            file.write(_hash(file.read()))
            file.flush()
            os.fsync(file.fileno())
        built.replace(library)
