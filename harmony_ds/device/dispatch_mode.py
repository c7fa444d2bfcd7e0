"""Base of dispatch modes that see every operator, also of layers that are compiled elsewhere."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class EagerDispatchMode(TorchDispatchMode):
    """A dispatch mode that turns `torch.compile` off while it is active.

    Compiled code hides its operators, and code that dynamo meets under a dispatch mode stays uncompiled for good.
    """

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
