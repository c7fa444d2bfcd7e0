"""The way of an update: six functions lead from the UPDATE task to the compiled step."""

from __future__ import annotations

import heapq
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

import harmony_ds
from harmony_ds.offload.native import GilFreeOp
from harmony_ds.optim import updater
from harmony_ds.optim.updater import Updater
from harmony_ds.runtime import executor
from tests.engine.drive import config_of, engine_for, family, groups_of, train_groups

PACKAGE = str(Path(harmony_ds.__file__).parent)
COMPILED = pytest.mark.skipif(shutil.which(cpp_extension.get_cxx_compiler()) is None, reason="no C++ compiler")


def package_frames(frame: FrameType | None) -> Iterator[str]:
    """Yield the package's own functions on the stack, the innermost first, up to the executor or the thread's start."""
    while frame is not None and frame.f_code.co_filename != executor.__file__:
        if frame.f_code.co_filename.startswith(PACKAGE):
            yield frame.f_code.co_qualname
        frame = frame.f_back


def on_update_thread() -> bool:
    return threading.current_thread().name == "harmony-update"


class SteppedByTorch(torch.optim.SGD):
    """An optimizer that records who calls its step."""

    elementwise = True
    stacks: list[list[str]]

    def step(self, closure: Any = None) -> None:
        if on_update_thread():  # and not by the profiler, which times a step
            self.stacks.append([*package_frames(sys._getframe())])
        super().step(closure)


def stepped_by_torch(parameters: Any, stacks: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> Any:
    optimizer = SteppedByTorch(parameters, lr=0.1)
    optimizer.stacks = stacks
    return optimizer


def stepped_by_deepspeed(parameters: Any, stacks: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """DeepSpeed's Adam, whose compiled function records who calls it."""
    adam = pytest.importorskip("deepspeed.ops.adam")
    make = GilFreeOp.__init__

    def make_recording(self: GilFreeOp, *given: Any) -> None:
        make(self, *given)
        function = self.function

        def record(*arguments: Any) -> None:
            if on_update_thread():
                stacks.append([*package_frames(sys._getframe())])
            function(*arguments)

        self.function = record  # type: ignore[assignment]

    monkeypatch.setattr(GilFreeOp, "__init__", make_recording)
    return adam.DeepSpeedCPUAdam(parameters, lr=0.1)


@pytest.mark.parametrize("clip", [None, 1.0], ids=["immediate", "clipped"])
@pytest.mark.parametrize("make", [stepped_by_torch, pytest.param(stepped_by_deepspeed, marks=COMPILED)])
def test_six_functions_lead_from_the_update_task_to_the_optimizers_step(
    make: Callable[..., Any], clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the engine's thread those from the task's handler to the queue count, on the update thread all."""
    one, on_engine, on_thread = family("llama"), [], []
    push = heapq.heappush

    def push_recorded(jobs: list[Any], job: Any) -> None:
        frames = [*package_frames(sys._getframe())]
        if Updater.update.__qualname__ in frames:
            on_engine.append(frames)
        push(jobs, job)

    monkeypatch.setattr(updater.heapq, "heappush", push_recorded)
    config = config_of(2, clip, {"pack_layers": 1})
    with engine_for(one.build(0.0), lambda parameters: make(parameters, on_thread, monkeypatch), config) as engine:
        train_groups(engine, groups_of(one, 1, 2))
        engine.get_global_grad_norm()
        engine.state_dict()

    assert on_engine and on_thread
    longest = max(map(len, on_engine)) + max(map(len, on_thread))
    assert longest <= 6, (on_engine[0], on_thread[0])
