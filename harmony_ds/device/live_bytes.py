"""Counter of the bytes of living tensors, for devices without a counting allocator.

A storage counts from the operation that makes it to its finalisation, as in `torch.distributed._tools.mem_tracker`. Memory
that a kernel allocates and frees within one operation is not seen; what is known of CUDA's kernels may be counted for them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harmony_ds.device.kernel_scratch import scratch_bytes


class EagerDispatchMode(TorchDispatchMode):
    """Dispatch mode that turns `torch.compile` off while it is active.

    Compiled code hides its operators, and code that dynamo meets under a dispatch mode stays uncompiled for good. Operators
    of functions (flex attention) come as one operation.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._uncompiled = ExitStack()

    def __enter__(self) -> Any:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            self._uncompiled.enter_context(torch.compiler.set_stance("force_eager"))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._uncompiled.close()


class LiveBytes(EagerDispatchMode):
    """A `MemoryProbe`: bytes of the storages made inside the context and still alive, and their peak."""

    def __init__(self, device_type: str = "cpu", counts_scratch: bool = False) -> None:
        """Count tensors of `device_type`; `counts_scratch`: and what CUDA kernels would take for themselves meanwhile."""
        super().__init__()
        self._device_type = device_type
        self._counts_scratch = counts_scratch
        self._live = 0
        self._peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def allocated_bytes(self) -> int:
        return self._live

    def peak_bytes(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self._live

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {t.untyped_storage()._cdata for t in tensors_among((args, kwargs)) if is_plain(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_among(result):
            if is_plain(tensor) and tensor.device.type == self._device_type:
                self._follow(tensor, known)
        if self._counts_scratch:
            self._peak = max(self._peak, self._live + scratch_bytes(func, args))
        return result

    def _follow(self, tensor: Tensor, known: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in known or key in self._storages:
            return  # a view, or the result of an in-place operation
        nbytes = storage.nbytes()

        def uncount(_: object) -> None:
            self._storages.pop(key, None)
            self._live -= nbytes

        self._storages[key] = weakref.ref(storage, uncount)
        self._live += nbytes
        self._peak = max(self._peak, self._live)


def tensors_among(value: object) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments or results; torch's own trees take ten times as long."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_among(item)
    elif isinstance(value, dict):
        yield from tensors_among(tuple(value.values()))


_WITHOUT_MEMORY = ("PhantomParameter", "TokenTensor")
"""Classes of tensors, by name, that stand for others."""


def is_plain(tensor: Tensor) -> bool:
    return type(tensor).__name__ not in _WITHOUT_MEMORY and tensor.layout is torch.strided
