"""How deep a layer's own code lies below the call of `train_batch` that runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harmony_ds
from tests.engine.drive import config_of, engine_for, sgd

HOUSE = Path(harmony_ds.__file__).parent
MOST_FRAMES, MOST_FILES = 12, 6
"""In a step, from `train_batch` on."""
MOST_FRAMES_OF_A_RUN, MOST_FILES_OF_A_RUN = 8, 4
"""Of these, from `Executor.run` on."""


class Looking(nn.Linear):
    """A layer that notes, at each call, the package's functions that it was called through, outermost first."""

    def __init__(self, stacks: list[list[str]]) -> None:
        super().__init__(4, 4)
        self.stacks = stacks

    def forward(self, x: Tensor) -> Tensor:
        stack = []
        frame: Any = sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(HOUSE):
                stack.append(f"{path.relative_to(HOUSE)} {frame.f_code.co_name}")
            frame = frame.f_back
        self.stacks.append(stack[::-1])
        return super().forward(x)


def files_of(stack: list[str]) -> set[str]:
    return {function.split()[0] for function in stack}


@pytest.mark.parametrize(
    "plan", [{"pack_layers": 2, "residency": "off"}, {}], ids=["layers that run again", "layers that run once"]
)
def test_few_functions_lie_between_train_batch_and_the_code_of_a_layer(plan: dict[str, Any]) -> None:
    stacks: list[list[str]] = []
    model = nn.Sequential(*(Looking(stacks) for _ in range(4)))
    with engine_for(model, sgd, config_of(2, harmony=plan)) as engine:
        for _ in range(3):  # the first one measures
            stacks.clear()
            engine.train_batch([torch.ones(2, 4), torch.ones(2, 4)], loss_fn=torch.sum)
    assert len(stacks) >= 2 * 4
    for stack in stacks:
        assert stack[0] == "engine.py train_batch"
        of_run = stack[stack.index("runtime/executor.py run") :]
        assert len(of_run) <= MOST_FRAMES_OF_A_RUN, of_run
        assert len(files_of(of_run)) <= MOST_FILES_OF_A_RUN, of_run
        assert len(stack) <= MOST_FRAMES, stack
        assert len(files_of(stack)) <= MOST_FILES, stack
